"""The parts of recurrent layers other than the recurrence, in closed form, on one tensor-parallel rank.

    hidden ──Q, K, V──► convolution ──► recurrence ──► norm, times the gate ──O──► hidden
           └─gate, decays, betas

Kinds with `diagonal` decays compute decays and gates by products of rank key_dim and value_dim (Kimi Delta Attention).
The recurrence itself is simulated (`simulate.recurrent`).
"""

from __future__ import annotations

from apportion.ir.request.model import Model
from apportion.ir.request.recurrent import Recurrent
from apportion.planner.simulate.recurrent import CHUNK


def attention_layers(model: Model) -> int:
    """Number of layers of all attention kinds."""
    return model.layers if isinstance(model.layers, int) else sum(model.layers.values())


def layer_count(model: Model) -> int:
    """Number of layers of all kinds, including recurrent ones."""
    return attention_layers(model) + sum(kind.layers for kind in model.recurrent.values())


def attention_share(model: Model) -> float:
    """Share of layers with attention."""
    return attention_layers(model) / layer_count(model)


def shares(model: Model) -> list[tuple[float, Recurrent]]:
    """(share of the layers, kind) of each recurrent kind."""
    return [(kind.layers / layer_count(model), kind) for kind in model.recurrent.values()]


def product_parameters(kind: Recurrent, hidden: int) -> int:
    """Parameters of the matrix products of one layer."""
    keys, values = kind.heads * kind.key_dim, kind.heads * kind.value_dim
    gates = hidden * (values + kind.heads)
    if kind.gate == "diagonal":
        gates = kind.key_dim * (hidden + keys) + kind.value_dim * (hidden + values)
    return hidden * (kind.conv_channels + values + kind.heads * kind.delta) + gates


def row_work_elements(kind: Recurrent) -> int:
    """Elements per token that row work reads and writes in forward: the convolution; the norm, which reads output and
    gate."""
    return 2 * kind.conv_channels * (kind.conv > 0) + 3 * kind.heads * kind.value_dim


def kept_elements(kind: Recurrent) -> int:
    """Elements per token that backward needs: Q, K and V before and after the convolution, output, gate and their
    product."""
    return kind.conv_channels * (1 + (kind.conv > 0)) + 3 * kind.heads * kind.value_dim


def working_elements(kind: Recurrent) -> float:
    """Elements per token while backward runs the layer: the kept ones, their gradients, and states of chunks."""
    return 2 * kept_elements(kind) + kind.heads * kind.state_numbers / CHUNK
