"""What layers compute and move besides attention, by closed forms: of which forecasts price the numbers, and profiles
measure the rates.

    parameters of products   ×2 FLOPs a token, forward; twice that backward
    row work                 numbers read and written a token, forward, by kernels that each read and write once
    loss, optimizer          likewise, a logit and a parameter

A rate in bytes/s is of these bytes, whatever the kernels that ran really moved.
"""

from __future__ import annotations

from apportion.ir.request.model import Model

#: backward over forward, of products and of row work
BACKWARD = 2
#: what norms (two, each row read and written) and residual sums (two, likewise) move, in numbers of the hidden size
NORMS = 8
#: of a gated FFN: gate and up read, their product written, in numbers of its size
GATED = 3
#: of a row that goes to an expert: read and written in the order of experts, and again as it comes back, in numbers of
#: the hidden size
DISPATCHED = 4
#: of a logit: written by the product, read by the loss, its gradient written
LOSS = 3
#: bytes of a float32 number
FLOAT32 = 4


def linear_parameters(model: Model) -> int:
    """Of one layer: projections of Q, K, V and O, and a gated FFN (three matrices). Without the expansion of latent
    rows, which is part of attention."""
    heads = model.q_heads * (model.head_dim + model.value_dim)
    return model.hidden * (heads + 3 * model.ffn) + model.key_products


def row_numbers(model: Model, tensor: int = 1) -> float:
    """Numbers that the row work of one layer reads and writes a token, forward: norms, residual sums, rotary embeddings
    of Q and K, and the gate. tensor: ranks that norms and sums are split among."""
    heads = 2 * (model.q_heads + model.kv_heads) * model.head_dim
    return NORMS * model.hidden / tensor + heads + GATED * model.ffn


def adam_state_bytes(element_bytes: int) -> int:
    """Of one parameter: two moments of Adam (Kingma and Ba, 2015) and, unless the weight is in float32 itself, its
    float32 copy, as mixed-precision training keeps them (ZeRO, section 3.1: 12 of its 16 bytes a parameter)."""
    return FLOAT32 * (3 if element_bytes < FLOAT32 else 2)


def adam_bytes(gradient_bytes: int, element_bytes: int) -> int:
    """Of one parameter in a step of Adam: its state read and written, the gradient read, the weight written, and read
    too where it has no copy."""
    weight = element_bytes if element_bytes < FLOAT32 else 2 * element_bytes
    return 2 * adam_state_bytes(element_bytes) + gradient_bytes + weight
