"""Memory of attention with head stages: UPipe's published tables, and the rows that our programs hold.

Printed (sections 2.2 to 4.1, Tables 1, 2 and 6; S tokens, C ranks, L layers, g query heads per KV head, nu stages):

    gamma = 1 + 2/g    Q, K and V, in units of rows of all query heads
    beta  = 4 + 4/g    Q, K, V, O and their gradients

The tables assume that a stage also holds 1/nu of K and V. In GQA order it holds more: its U query heads need up to U KV
heads, which are kept for g stages. `peak_rows` counts the rows that are held.

Whole layers and the head are in `apportion.planner.forecast.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from apportion import ConfigError, Model
from apportion.ir.fields import choice
from apportion.ir.tensors import TRAVELLING, Tensor
from apportion.planner.inner.groups import HeadStages
from apportion.planner.inner.upipe import UPipe

METHODS = ("ulysses", "ulysses_offload", "fpdt", "upipe")


class Peaks(NamedTuple):
    """Peak memory at four moments, in rows of all query heads of S/C tokens. Forward: before attention, in the
    all-to-all of Q, K and V, in the kernel, and in the all-to-all of the output. Backward: before attention, in the
    all-to-all of dO, in the kernel, and in the all-to-all of the gradients."""

    before: Fraction
    first: Fraction
    kernel: Fraction
    last: Fraction


def gamma(ratio: int) -> Fraction:
    """The size of Q, K and V relative to Q, with `ratio` query heads per KV head."""
    return 1 + Fraction(2, ratio)


def beta(ratio: int) -> Fraction:
    """The size of Q, K, V, O, dO, dQ, dK and dV, relative to Q."""
    return 4 + Fraction(4, ratio)


def printed_forward(method: str, ratio: int, chunks: int = 1, layers: int = 1) -> Peaks:
    """The values of Table 2. chunks: pi of FPDT, nu of UPipe; layers: the L layers whose inputs Ulysses keeps without
    offloading. Raises ConfigError."""
    _check(method, ratio, chunks, layers)
    qkv, part = gamma(ratio), Fraction(1, chunks)
    rows: dict[str, tuple[Fraction | int, ...]] = {
        "ulysses": (layers, layers + qkv + 1, layers + qkv + 1, layers + 2),
        "ulysses_offload": (1, 1 + qkv + 1, 1 + qkv + 1, 3),
        "fpdt": (part, part + (qkv + 1) * part, (2 * qkv + 1) * part, 2 * part),
        "upipe": (1, 2 + (qkv + 1) * part, 2 + qkv * part, 1 + 2 * part),
    }
    return Peaks(*(Fraction(value) for value in rows[method]))


def printed_backward(method: str, ratio: int, chunks: int = 1, layers: int = 1) -> Peaks:
    """The values of Table 6; arguments as in `printed_forward`. Raises ConfigError."""
    _check(method, ratio, chunks, layers)
    qkv, eight, part = gamma(ratio), beta(ratio), Fraction(1, chunks)
    rows: dict[str, tuple[Fraction | int, ...]] = {
        "ulysses": (layers + 1, layers + 2, layers + eight + 1, layers + qkv + 1),
        "ulysses_offload": (2, 3, eight + 2, qkv + 2),
        "fpdt": (part, 3 * part, (eight + 2) * part, (qkv + 2) * part),
        "upipe": (2, 2 + 2 * part, 2 + (eight + 1) * part, 2 + 2 * (qkv + 1) * part),
    }
    return Peaks(*(Fraction(value) for value in rows[method]))


def _check(method: str, ratio: int, chunks: int, layers: int) -> None:
    choice("method", method, METHODS)
    for name, value in (("ratio", ratio), ("chunks", chunks), ("layers", layers)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1", "use 1")


#: the sizes of the feed-forward network and the vocabulary in Table 1, relative to the hidden size
FFN_OVER_HIDDEN, VOCABULARY_OVER_HIDDEN = Fraction(267, 100), Fraction(30)


def printed_phases() -> Mapping[str, Fraction]:
    """The values of Table 1 before rounding: BF16 bytes of each phase of forward, in units of S x hidden size."""
    attention = 2 + 6 + 6 + 2  # input, QKV, all-to-all, output
    return MappingProxyType(
        {
            "embedding": Fraction(2),
            "attention": Fraction(attention),
            "feed_forward": 2 + 8 * FFN_OVER_HIDDEN + 2,
            "cross_entropy": 8 * VOCABULARY_OVER_HIDDEN,
        }
    )


def intermediate_bytes(tokens: int, ranks: int, heads: int, head_dim: int) -> Fraction:
    """The BF16 bytes per rank of Q, K and V with MHA, and again as much for their all-to-all (section 3.4). heads: all
    heads in Ulysses, the heads of a stage in UPipe."""
    return Fraction(12 * tokens * heads * head_dim, ranks)


def communicated_heads(q_heads: int, ranks: int, ratio: int | None = None) -> Fraction:
    """The Q, K and V heads of S/C tokens that a rank sends in all stages of forward, without the output, if a stage has
    as many heads as ranks (section 4.1). ratio: query heads per KV head in GQA order; None: natural order of heads."""
    if ratio is None:
        return Fraction(3 * q_heads * (ranks - 1), ranks)
    return Fraction((3 + ratio - 1) * q_heads * (ranks - 1), ranks * ratio)


class Arena(NamedTuple):
    """The work rows and head columns of a tensor."""

    rows: int
    heads: int


@dataclass(frozen=True)
class Member:
    """One rank of a group. rows: the group's, in attention order; home: the rank's own rows; tiles, gradient_tiles:
    the rows of KV and of dKV from other groups that it holds at a time."""

    rows: int
    home: int
    tiles: int = 0
    gradient_tiles: int = 0


def peak_rows(model: Model, degree: int, upipe: UPipe, member: Member, phase: str) -> dict[Tensor, Arena]:
    """The work rows of a rank at the peak of a phase, with groups of `degree` ranks: the attention rows with the heads
    of a stage (twice if a stage is received while another is computed) and, if heads are projected at home, the rows in
    transit to each other rank.

    KV heads that several ranks of a group share are projected once for all of them; each rank returns their gradients,
    which are summed at home.
    Raises ConfigError.
    """
    stages = upipe.stages(model, degree)
    others = (degree - 1) * member.home
    projected = upipe.project * others
    projected_keys = upipe.project * _other_key_sets(stages) * member.home
    returned = stages.shared * others
    rows = (1 + upipe.ahead * (len(stages) > 1)) * member.rows
    keys = (1 + upipe.ahead * (stages.windows > 1)) * member.rows
    of_query = {tensor: rows + projected * (tensor == Tensor.Q) for tensor in TRAVELLING["query", phase]}
    extra_rows = {Tensor.KV: member.tiles + projected_keys, Tensor.DKV: member.gradient_tiles + returned}
    of_key = {tensor: keys + extra_rows[tensor] for tensor in TRAVELLING["key", phase]}
    widest = int(stages.key_heads.max())
    arenas_of_query = {tensor: Arena(count, stages.query_heads) for tensor, count in of_query.items()}
    return arenas_of_query | {tensor: Arena(count, widest) for tensor, count in of_key.items()}


def peak_bytes(model: Model, arenas: Mapping[Tensor, Arena]) -> int:
    """The bytes of work rows, counted as in plans and caps."""
    return sum(arena.rows * model.row_bytes(tensor, arena.heads) for tensor, arena in arenas.items())


def _other_key_sets(stages: HeadStages) -> int:
    """The largest number of distinct sets of KV heads in any window, without the rank's own."""
    return max(len(set(row)) - 1 for row in stages.key.tolist())
