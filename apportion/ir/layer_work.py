"""FLOPs and memory traffic of layers other than attention, in closed form. Forecasts price them at rates that
profiles measure.

    parameters of products   ×2 FLOPs per token, forward; twice that backward
    row work                 numbers read and written per token, forward; each kernel reads and writes its rows once
    loss, optimizer          the same per logit and per parameter

Rates in bytes/s count these bytes, not the bytes that the measured kernels actually moved.
"""

from __future__ import annotations

from apportion.ir.request.model import Model

#: backward work relative to forward, for products and row work
BACKWARD = 2
#: memory traffic of two norms and two residual sums (each row read and written), in units of the hidden size
NORMS = 8
#: memory traffic of a gated FFN (gate and up read, their product written), in units of its width
GATED = 3
#: memory traffic of a row routed to an expert (read and written in expert order, and again on return), in units of the
#: hidden size
DISPATCHED = 4
#: memory traffic of a logit: written by the product, read by the loss, its gradient written
LOSS = 3
#: bytes of a float32 number
FLOAT32 = 4


def linear_parameters(model: Model) -> int:
    """Parameters of one layer: projections of Q, K, V and O, and a gated FFN (three matrices). The expansion of latent
    rows counts as attention instead."""
    heads = model.q_heads * (model.head_dim + model.value_dim)
    return model.hidden * (heads + 3 * model.ffn) + model.key_products


def row_work_numbers(model: Model, tensor: int = 1) -> float:
    """Numbers read and written per token by the row work of one layer, forward: norms, residual sums, rotary embeddings
    of Q and K, and the gate. tensor: tensor-parallel ranks that divide norms and residual sums among them."""
    heads = 2 * (model.q_heads + model.kv_heads) * model.head_dim
    return NORMS * model.hidden / tensor + heads + GATED * model.ffn


def adam_state_bytes(element_bytes: int) -> int:
    """Optimizer state of one parameter: two moments of Adam (Kingma and Ba, 2015) and, unless the weight itself is
    float32, its float32 copy, as in mixed-precision training (ZeRO, section 3.1: 12 of its 16 bytes per parameter)."""
    return FLOAT32 * (3 if element_bytes < FLOAT32 else 2)


def adam_bytes(gradient_bytes: int, element_bytes: int) -> int:
    """Memory traffic of one parameter in an Adam step: state read and written, gradient read, weight written, and also
    read if it has no float32 copy."""
    weight = element_bytes if element_bytes < FLOAT32 else 2 * element_bytes
    return 2 * adam_state_bytes(element_bytes) + gradient_bytes + weight
