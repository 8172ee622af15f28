"""Memory: of attention under head stages, UPipe's tables as printed and the rows that our programs hold; of whole
layers and the head, published methods.

Printed (sections 2.2 to 4.1, Tables 1, 2 and 6; S tokens, C ranks, L layers, g query heads per KV head, nu stages):

    gamma = 1 + 2/g    Q, K and V, counted in rows of all query heads
    beta  = 4 + 4/g    Q, K, V, O and their gradients

The tables take a stage to hold 1/nu of K and V too. In GQA order it holds more: its U query heads bring as many KV
heads as there are, up to U, and keep them for g stages. `peak_rows` counts what is held.

Layers and head (`activation_bytes`) go by the formulas that are published: FPDT (Yao et al., 2024) and ALST (Bekman et
al., 2025) schedule no attention, but say what of a layer is on the device at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice, integer, number
from apportion.ir.isa import TRAVELLING, Tensor
from apportion.ir.model import Model
from apportion.planner.passes.groups import HeadStages
from apportion.planner.passes.upipe import UPipe

METHODS = ("ulysses", "ulysses_offload", "fpdt", "upipe")


class Peaks(NamedTuple):
    """Peak memory at four moments, in rows of all query heads of S/C tokens: of the forward before attention, while Q,
    K and V go to their heads, in the kernel, and while the output returns; of the backward before attention, while
    dO goes to its heads, in the kernel, and while gradients return."""

    before: Fraction
    first: Fraction
    kernel: Fraction
    last: Fraction


def gamma(ratio: int) -> Fraction:
    """Size of Q, K and V with `ratio` query heads per KV head, in Q's."""
    return 1 + Fraction(2, ratio)


def beta(ratio: int) -> Fraction:
    """Size of Q, K, V, O, dO, dQ, dK and dV, in Q's."""
    return 4 + Fraction(4, ratio)


def printed_forward(method: str, ratio: int, chunks: int = 1, layers: int = 1) -> Peaks:
    """Table 2. chunks: pi of FPDT, nu of UPipe; layers: L, whose inputs Ulysses keeps without offloading. Raises
    ConfigError."""
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
    """Table 6; arguments as in `printed_forward`. Raises ConfigError."""
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


#: Table 1's sizes of the feed-forward network and of the vocabulary, in hidden sizes
FFN_OVER_HIDDEN, VOCABULARY_OVER_HIDDEN = Fraction(267, 100), Fraction(30)


def printed_phases() -> Mapping[str, Fraction]:
    """Table 1 before rounding: bytes of each phase of a forward in BF16, in numbers of S x hidden size."""
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
    """Section 3.4: BF16 bytes on a rank of Q, K and V and as much for their all-to-all, with MHA; `heads`: all of them
    in Ulysses, those of a stage in UPipe."""
    return Fraction(12 * tokens * heads * head_dim, ranks)


def communicated_heads(q_heads: int, ranks: int, ratio: int | None = None) -> Fraction:
    """Section 4.1, stages of as many heads as ranks: Q, K and V heads of S/C tokens that a rank sends in all stages of
    a forward, without the output. ratio: query heads per KV head in GQA order; None: in order of heads."""
    if ratio is None:
        return Fraction(3 * q_heads * (ranks - 1), ranks)
    return Fraction((3 + ratio - 1) * q_heads * (ranks - 1), ranks * ratio)


class Arena(NamedTuple):
    """Work rows of a tensor and their head columns."""

    rows: int
    heads: int


@dataclass(frozen=True)
class Member:
    """One rank of a group. rows: of the group, in attention order; home: the rank's own; tiles, gradient_tiles: rows of
    KV and of dKV from other groups that it holds at a time."""

    rows: int
    home: int
    tiles: int = 0
    gradient_tiles: int = 0


def peak_rows(model: Model, degree: int, upipe: UPipe, member: Member, phase: str) -> dict[Tensor, Arena]:
    """Work rows that a rank holds at the peak of a phase, under groups of `degree` ranks: its attention rows with the
    heads of a stage (twice where a stage comes in while another is computed), and, where heads are made at home, those
    on their way to and from each other rank.

    KV heads that several ranks of a group share are made once for all of them; their gradients come from each.
    Raises ConfigError.
    """
    stages = upipe.stages(model, degree)
    others = (degree - 1) * member.home
    made = upipe.project * others
    made_keys = upipe.project * _other_key_sets(stages) * member.home
    returned = (upipe.project or stages.shared) * others
    rows = (1 + upipe.ahead * (len(stages) > 1)) * member.rows
    keys = (1 + upipe.ahead * (stages.windows > 1)) * member.rows
    at_home = (Tensor.Q, Tensor.DQ)
    of_query = {tensor: rows + made * (tensor in at_home) for tensor in TRAVELLING["query", phase]}
    beside = {Tensor.KV: member.tiles + made_keys, Tensor.DKV: member.gradient_tiles + returned}
    of_key = {tensor: keys + beside[tensor] for tensor in TRAVELLING["key", phase]}
    widest = int(stages.key_heads.max())
    held = {tensor: Arena(count, stages.query_heads) for tensor, count in of_query.items()}
    return held | {tensor: Arena(count, widest) for tensor, count in of_key.items()}


def peak_bytes(model: Model, arenas: Mapping[Tensor, Arena]) -> int:
    """Bytes of work rows, as plans and caps count them."""
    return sum(arena.rows * model.row_bytes(tensor, arena.heads) for tensor, arena in arenas.items())


def _other_key_sets(stages: HeadStages) -> int:
    """The most different sets of KV heads beside a rank's own, in any window."""
    return max(len(set(row)) - 1 for row in stages.key.tolist())


# --- whole layers and the head


#: plain: Ulysses with the input of every layer on the device. The others have these on the host. alst: what stands
#: between attentions in tiles, Ulysses as it is. upipe: the same with heads in stages. fpdt: tokens in chunks.
LAYER_METHODS = ("plain", "alst", "upipe", "fpdt")
_MOST = 2**48
_FLOAT32 = 4


class Activations(NamedTuple):
    """Bytes of activations on a rank: `kept` all the time, and beside these at the peak of each phase; `host`: in host
    memory."""

    kept: int
    attention: int
    feed_forward: int
    cross_entropy: int
    host: int

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak."""
        return self.kept + max(self.attention, self.feed_forward, self.cross_entropy)


def activation_bytes(
    method: str,
    model: Model,
    tokens_per_rank: int,
    vocabulary: int,
    chunks: int = 1,
    tile_tokens: int | None = None,
    logits_tile_bytes: int = 2**30,
) -> int:
    """Bytes of activations on a rank at the peak of a training step of all layers and the head; arguments and errors as
    in `activations`. What has no formula in the sources is not counted: the residual stream beyond a layer's input and
    output, norms, copies in float32, the allocator (docs/comparison.md has what was measured beside it)."""
    return activations(
        method, model, tokens_per_rank, vocabulary, chunks, tile_tokens, logits_tile_bytes
    ).peak


def activations(
    method: str,
    model: Model,
    tokens_per_rank: int,
    vocabulary: int,
    chunks: int = 1,
    tile_tokens: int | None = None,
    logits_tile_bytes: int = 2**30,
) -> Activations:
    """Bytes on a rank by phase, with real widths where the sources take heads times head dim to be the hidden size.

    vocabulary: columns of the logits. chunks: pi of fpdt, nu of upipe, 1 for the others. tile_tokens: tokens of a tile
    of the feed-forward network of alst and upipe; None: the hidden size (UPipe, section 4). logits_tile_bytes: of what
    is in float32 of a tile of logits; nothing to plain, which has all of them.

    kept            plain: the input of every layer (UPipe, Table 2)
    attention       in the kernel of the backward (UPipe, Table 6)
    feed_forward    input, four tensors of its width and output (UPipe, Table 1); the four in tiles (ALST), or in chunks
                    (FPDT in DeepSpeed)
    cross_entropy   input, and in float32 logits and their log-softmax (UPipe, Table 1); the two in tiles (ALST; FPDT in
                    DeepSpeed)
    host            the inputs of all layers, but for plain (ALST; UPipe, section 5.1)

    Raises ConfigError.
    """
    tokens = integer("tokens_per_rank", tokens_per_rank, 1, _MOST)
    _check_layer(method, vocabulary, chunks, tile_tokens, logits_tile_bytes)
    row, width, logits = (
        model.hidden * model.element_bytes,
        4 * model.ffn * model.element_bytes,
        2 * _FLOAT32 * vocabulary,
    )
    sizes = _Widths.of(model)
    eight, inputs = 2 * (sizes.queries + sizes.keys + sizes.output), _layers(model) * row * tokens
    if method == "plain":
        own = (row + eight) * tokens, (2 * row + width) * tokens, (row + logits) * tokens
        return Activations(inputs, *own, host=0)
    part = -(-tokens // chunks)
    tile = part if method == "fpdt" else min(tokens, model.hidden if tile_tokens is None else tile_tokens)
    attention = {
        "alst": (2 * row + eight) * tokens,
        "upipe": 2 * row * tokens - (-(eight + sizes.queries) * tokens // chunks),
        "fpdt": (2 * row + eight) * part,
    }
    head = logits * min(tokens, max(1, logits_tile_bytes // logits))
    return Activations(
        0, attention[method], 2 * row * tokens + width * tile, row * tokens + head, host=inputs
    )


def _check_layer(
    method: str, vocabulary: int, chunks: int, tile_tokens: int | None, logits_tile_bytes: int
) -> None:
    choice("method", method, LAYER_METHODS)
    integer("vocabulary", vocabulary, 1, _MOST)
    integer("logits_tile_bytes", logits_tile_bytes, 1, _MOST)
    if integer("chunks", chunks, 1, _MOST) > 1 and method not in ("fpdt", "upipe"):
        raise ConfigError("chunks", chunks, f"method {method} has none", "leave it out, or use fpdt or upipe")
    if tile_tokens is not None:
        integer("tile_tokens", tile_tokens, 1, _MOST)
        if method not in ("alst", "upipe"):
            rule = f"method {method} has no tiles of tokens"
            raise ConfigError("tile_tokens", tile_tokens, rule, "leave it out, or use alst or upipe")


def _layers(model: Model) -> int:
    return model.layers if isinstance(model.layers, int) else sum(model.layers.values())


class _Widths(NamedTuple):
    """Bytes of a token's Q, K and V together, and O, each in the model's dtype."""

    queries: int
    keys: int
    output: int

    @staticmethod
    def of(model: Model) -> _Widths:
        keys = model.kv_heads * (model.head_dim + model.value_dim)
        widths = model.q_heads * model.head_dim, keys, model.q_heads * model.value_dim
        return _Widths(*(width * model.element_bytes for width in widths))


class Offload(NamedTuple):
    """Bytes that a rank sends to the host and takes from it, in one layer."""

    to_host: int
    to_device: int

    def ms(self, host_gbs: float) -> float:
        """Milliseconds at so many GB/s each way: the longer of the two ways, as a link carries both at once. Raises
        ConfigError."""
        return max(self) / (number("host_gbs", host_gbs, 0.0, above=True) * 1e6)


def fpdt_offload(model: Model, tokens_per_rank: int, chunks: int, phase: str) -> Offload:
    """Bytes that FPDT moves of a layer of causal attention in `chunks`. A rank has its share of the heads and all
    tokens of a chunk, which is as much as its share of the tokens with all heads, unless ranks share KV heads.

    Counted from the loops of its implementation in DeepSpeed, under full checkpointing. forward: the layer's input, its
    norm, Q, K, V, O and the LSE go to the host once, and every chunk of queries takes K and V of the chunks before.
    backward: the layer's input comes, and the forward runs again; then each chunk of K and V and of the norm comes
    once, dO goes out once, and each chunk of K and V brings all chunks of queries that see it: Q, O, the LSE, dO (which
    the first chunk finds on the device) and dQ in float32, which goes back after each. For a chunk or two that happen
    to be on the device nothing is taken off.
    Raises ConfigError.
    """
    choice("phase", phase, ("forward", "backward"))
    tokens = integer("tokens_per_rank", tokens_per_rank, 1, _MOST)
    chunks = integer("chunks", chunks, 1, _MOST)
    queries, keys, output = _Widths.of(model)
    row, part, before = model.hidden * model.element_bytes, -(-tokens // chunks), chunks * (chunks - 1) // 2
    pairs, saved, sums = (
        before + chunks,
        output + _FLOAT32 * model.q_heads,
        _FLOAT32 * model.q_heads * model.head_dim,
    )
    out, back = (row + queries + keys + saved) * tokens, before * part * keys
    if phase == "forward":
        return Offload(row * tokens + out, back)
    brought = (row + row + keys) * tokens + (pairs * (queries + saved + sums) + before * output) * part
    return Offload(out + output * tokens + pairs * sums * part, back + brought)
