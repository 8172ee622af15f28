"""Mask specs: what a user declares, and how it lowers to bands, positions and labels.

Each spec is a frozen dataclass with a constructor function of its name. On the local tokens 0..length-1:

    bands(length)        int64 [n, 6], disjoint
    diagonals()          the (dmin, dmax) of its bands, whatever the length
    runs(length)         (starts, positions) int64 [r]: where positions do not just count on, and to what
    unlabelled(length)   (tokens, labels) int64 [m]: the tokens whose label is not the next one (-1: no label)
    check(length, field) raises ConfigError where the spec does not fit a sequence of that length

In rules below, i is a query and j a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir import bands as algebra
from apportion.ir.arrays import Ints, group_of, within
from apportion.ir.bands import INF, MAX_TOKENS
from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import integer, integers, known, rows, suggestion

Columns = tuple[Ints, Ints]
Row = Iterable[Any]  # q0, q1, k0, k1, dmin, dmax: scalars or columns
Diagonals = tuple[tuple[int, int], ...]  # distinct (dmin, dmax), in any order

MAX_PARTS = 2**22  # answers, nodes, spans, documents, raw bands or slices of one sequence
MAX_BANDS = 2**22  # bands of one sequence
_MAX_NESTING = 8

_ZERO = np.zeros(1, np.int64)
_CAUSAL, _FULL = (0, INF), (-INF, INF)


@dataclass(frozen=True)
class Mask(ABC):
    """Base of the specs. `structured` ones say themselves where positions restart and labels end."""

    structured: ClassVar[bool] = False

    @abstractmethod
    def bands(self, length: int) -> Ints:
        """[n, 6] disjoint bands on local tokens."""

    @abstractmethod
    def diagonals(self) -> Diagonals:
        """What it declares, also where a sequence is too short to show it. A rectangle whose keys all come before its
        queries looks back, and counts with dmin = 0 at least."""

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        """[m, 6] bands of sequences of `lengths` that begin at `starts`, in no particular order."""
        parts: list[Ints] = [np.zeros((0, 6), np.int64)]
        for length, where in _by_length(lengths, starts):
            local = self.bands(length)
            _check_count("mask", len(local) * len(where))
            offset = np.repeat(where, len(local))
            parts.append(algebra.shift(np.tile(local, (len(where), 1)), offset, offset))
        return np.concatenate(parts)

    def runs(self, length: int) -> Columns:
        """(starts, positions): positions count up by one from each start; the first start is 0."""
        return _ZERO, _ZERO

    def unlabelled(self, length: int) -> Columns:
        """(tokens, labels): every token whose label is not the next token, and its label or -1."""
        return np.array([length - 1]), np.array([-1])

    def check(self, length: int, field: str) -> None:  # noqa: B027 most specs fit any length
        """Raises ConfigError where the spec does not fit `length`."""

    def positions(self, length: int) -> Ints:
        """[length] position id of each token."""
        return expand_runs(*self.runs(length), length)

    def labels(self, length: int) -> Ints:
        """[length] the token that each token predicts, -1 where there is none."""
        labels = np.arange(1, length + 1)
        tokens, ends = self.unlabelled(length)
        labels[tokens] = ends
        return labels


def expand_runs(starts: Ints, positions: Ints, length: int) -> Ints:
    """[length] positions that count up by one from `positions[r]` at token `starts[r]`."""
    return np.arange(length) + np.repeat(positions - starts, np.diff(starts, append=length))


def _bands(*rows: Row) -> Ints:
    """Bands of rows of scalars or equally long columns; those without pairs are dropped."""
    tables = [np.stack(np.broadcast_arrays(*(np.asarray(x, np.int64) for x in row)), axis=-1) for row in rows]
    bands = np.concatenate([table.reshape(-1, 6) for table in tables])
    return bands[algebra.area(bands) > 0]


def _placed(starts: Ints, *rows: Row) -> Ints:
    """The bands of such rows, one of each for a sequence, moved to where the sequences start (diagonals stay)."""
    tables = np.empty((len(rows), len(starts), 6), np.int64)
    for table, row in zip(tables, rows, strict=True):
        for i, column in enumerate(row):
            table[:, i] = column if i > 3 else starts + column
    bands = tables.reshape(-1, 6)
    return bands[algebra.area(bands) > 0]


class Uniform(Mask):
    """A spec whose bands are the same few formulas of the length: many sequences are lowered at once."""

    @abstractmethod
    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        """The bands of sequences of `lengths` [n]: rows of scalars or columns [n]; those without pairs are dropped."""

    def bands(self, length: int) -> Ints:
        return self.lower(np.array([length]), _ZERO)

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        return _placed(starts, *self.rows(lengths))


class Diagonal(Uniform):
    """One band on the whole square."""

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        (diagonal,) = self.diagonals()
        return ((0, lengths, 0, lengths, *diagonal),)


class Gridded(Mask):
    """A spec of one band for each `chunk` tokens."""

    chunk: int

    @abstractmethod
    def row(self, starts: Ints, stops: Ints) -> Row:
        """The band of each chunk [start, stop) of a sequence."""

    def bands(self, length: int) -> Ints:
        return self.lower(np.array([length]), _ZERO)

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        counts = -(-lengths // self.chunk)
        _check_count(f"{_NAMES[type(self)]}.chunk", int(counts.sum()))
        owner = group_of(counts)
        begin = within(counts) * self.chunk
        return _placed(starts[owner], self.row(begin, np.minimum(begin + self.chunk, lengths[owner])))


@dataclass(frozen=True)
class Causal(Diagonal):
    """j <= i."""

    def diagonals(self) -> Diagonals:
        return (_CAUSAL,)


@dataclass(frozen=True)
class Full(Diagonal):
    """Every pair of the sequence."""

    def diagonals(self) -> Diagonals:
        return (_FULL,)


@dataclass(frozen=True)
class SlidingWindow(Diagonal):
    """i - window < j <= i + right: `window` keys up to the token itself, `right` after it.

    (flash-attn's `window_size=(w - 1, 0)` is `sliding_window(w)`.)
    """

    window: int
    right: int = 0

    def __post_init__(self) -> None:
        integer("sliding_window.window", self.window, 1, MAX_TOKENS)
        integer("sliding_window.right", self.right, 0, MAX_TOKENS)

    def diagonals(self) -> Diagonals:
        return ((-self.right, self.window - 1),)


@dataclass(frozen=True)
class SinkWindow(Uniform):
    """j <= i and (j < sink or j > i - window): the first tokens and the recent ones."""

    sink: int
    window: int

    def __post_init__(self) -> None:
        integer("sink_window.sink", self.sink, 0, MAX_TOKENS)
        integer("sink_window.window", self.window, 1, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        sink = np.minimum(self.sink, lengths)
        return (0, lengths, 0, sink, 0, INF), (0, lengths, sink, lengths, 0, self.window - 1)

    def diagonals(self) -> Diagonals:
        recent = (0, self.window - 1)
        return (_CAUSAL, recent) if self.sink else (recent,)


@dataclass(frozen=True)
class CausalBlockwise(Uniform):
    """In-context learning: j <= i, and in all but the last `test` blocks also (j < sink * block or
    j >= i - local * block)."""

    block: int
    local: int
    sink: int = 1
    test: int = 1

    def __post_init__(self) -> None:
        integer("causal_blockwise.block", self.block, 1, MAX_TOKENS)
        for item in ("local", "sink", "test"):
            integer(f"causal_blockwise.{item}", getattr(self, item), 0, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        test = np.clip(((lengths - 1) // self.block + 1 - self.test) * self.block, 0, lengths)
        sink = np.minimum(self.sink * self.block, test)
        return (
            (0, test, 0, sink, 0, INF),
            (0, test, sink, test, 0, self.local * self.block),
            (test, lengths, 0, lengths, 0, INF),
        )

    def diagonals(self) -> Diagonals:
        local = (0, self.local * self.block)
        return (_CAUSAL, local) if self.sink or self.test else (local,)


@dataclass(frozen=True)
class SharedQuestion(Mask):
    """One prompt, several answers: an answer sees the prompt and itself causally, and its positions
    go on from the prompt's."""

    prompt: int
    answers: tuple[int, ...]
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer("shared_question.prompt", self.prompt, 1, MAX_TOKENS)
        object.__setattr__(self, "answers", _lengths("shared_question.answers", self.answers))

    def _starts(self) -> Ints:
        return np.cumsum([self.prompt, *self.answers])

    def bands(self, length: int) -> Ints:
        edges, prompt = self._starts(), self.prompt
        start, stop = edges[1:-1], edges[2:]
        head = min(
            int(edges[min(1, len(self.answers))]), length
        )  # the prompt and, joined to it, the first answer
        own = (start, stop, start, stop, 0, INF)
        return _bands((0, head, 0, head, 0, INF), (start, stop, 0, prompt, -INF, INF), own)

    def diagonals(self) -> Diagonals:
        return (_CAUSAL,)

    def runs(self, length: int) -> Columns:
        later = self._starts()[1:-1]
        return np.append(0, later), np.append(0, np.full(len(later), self.prompt))

    def unlabelled(self, length: int) -> Columns:
        edges = self._starts()
        ends = (edges if len(self.answers) != 1 else edges[1:]) - 1
        return ends, np.full(len(ends), -1)

    def check(self, length: int, field: str) -> None:
        _check_sum(field, "prompt and answers", self.prompt + sum(self.answers), length)


@dataclass(frozen=True)
class PrefixLM(Uniform):
    """j < prefix or j <= i."""

    prefix: int

    def __post_init__(self) -> None:
        integer("prefix_lm.prefix", self.prefix, 0, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        prefix = np.minimum(self.prefix, lengths)
        return (0, prefix, 0, prefix, -INF, INF), (prefix, lengths, 0, lengths, 0, INF)

    def diagonals(self) -> Diagonals:
        return (_FULL, _CAUSAL) if self.prefix else (_CAUSAL,)


@dataclass(frozen=True)
class BlockCausal(Gridded):
    """Chunks of a video: chunk(j) <= chunk(i), and chunk(j) > chunk(i) - window where there is a window."""

    chunk: int
    window: int | None = None

    def __post_init__(self) -> None:
        integer("block_causal.chunk", self.chunk, 1, MAX_TOKENS)
        if self.window is not None:
            integer("block_causal.window", self.window, 1, MAX_TOKENS)

    def row(self, starts: Ints, stops: Ints) -> Row:
        first = 0 if self.window is None else np.maximum(starts - (self.window - 1) * self.chunk, 0)
        return starts, stops, first, stops, -INF, INF

    def diagonals(self) -> Diagonals:
        return (_FULL,)


@dataclass(frozen=True)
class Chunked(Gridded):
    """i // chunk == j // chunk and j <= i, as in Llama 4; the grid starts anew in each sequence."""

    chunk: int

    def __post_init__(self) -> None:
        integer("chunked.chunk", self.chunk, 1, MAX_TOKENS)

    def row(self, starts: Ints, stops: Ints) -> Row:
        return starts, stops, starts, stops, 0, INF

    def diagonals(self) -> Diagonals:
        return (_CAUSAL,)


@dataclass(frozen=True)
class ImageSpans(Mask):
    """`mask` (causal), and i and j in the same span [start, end): images inside text."""

    spans: tuple[tuple[int, int], ...]
    mask: Mask = field(default_factory=Causal)

    def __post_init__(self) -> None:
        where = "image_spans.spans"
        table = _table(where, self.spans, 2, "start, end", 0)
        for i, (start, end) in enumerate(table):
            if start >= end or (i and start < table[i - 1][1]):
                raise ConfigError(
                    f"{where}[{i}]", [start, end], "must rise and not overlap", "sort the spans"
                )
        object.__setattr__(self, "spans", table)
        _check_inner("image_spans.mask", self.mask)

    def bands(self, length: int) -> Ints:
        edges = np.array([0, *(edge for span in self.spans for edge in span), length])
        text, image = (edges[0::2], edges[1::2]), (edges[1:-1:2], edges[2:-1:2])
        if isinstance(self.mask, Causal):  # an image sees all keys before it: one band instead of two
            return _bands((*text, 0, text[1], 0, INF), (*image, 0, image[1], -INF, INF))
        return _bands(*(part.T for part in self._around(self.mask.bands(length), text, image, length)))

    def diagonals(self) -> Diagonals:
        inner = self.mask.diagonals()
        return (*inner, _FULL) if self.spans and _FULL not in inner else inner

    def _around(self, inner: Ints, text: Columns, image: Columns, length: int) -> Iterable[Ints]:
        """The inner bands but for the pairs inside an image, and these in full."""
        for start, end in zip(*text, strict=True):
            yield algebra.intersect(inner, [start, end, 0, length])
        for start, end in zip(*image, strict=True):
            yield algebra.intersect(inner, [start, end, 0, start])
            yield algebra.intersect(inner, [start, end, end, length])
            yield np.array([[start, end, start, end, -INF, INF]])

    def check(self, length: int, field: str) -> None:
        if self.spans and self.spans[-1][1] > length:
            rule = f"must end within the sequence ({length} tokens)"
            raise ConfigError(
                f"{field}.image_spans.spans", self.spans[-1], rule, "correct the span or the length"
            )
        self.mask.check(length, f"{field}.image_spans.mask")


@dataclass(frozen=True)
class Tree(Mask):
    """Nodes (parent or -1, length), parents first: a node sees its ancestors fully and itself causally, and
    continues its parent's positions."""

    nodes: tuple[tuple[int, int], ...]
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        table = _table("tree.nodes", self.nodes, 2, "parent, length", -1)
        if not table:
            raise ConfigError("tree.nodes", table, "must have a node", "write [[-1, length]]")
        for i, (parent, length) in enumerate(table):
            integer(f"tree.nodes[{i}] length", length, 1, MAX_TOKENS)
            if parent >= i:
                raise ConfigError(
                    f"tree.nodes[{i}]",
                    [parent, length],
                    "a parent must come before its node",
                    "reorder the nodes",
                )
        object.__setattr__(self, "nodes", table)

    def _columns(self) -> tuple[Ints, Ints, Ints]:
        """(parent, start, stop) of every node."""
        parent, length = np.array(self.nodes).T
        stop = np.cumsum(length)
        return parent, stop - length, stop

    def bands(self, length: int) -> Ints:
        """A node's own band reaches back over the ancestors stored just before it; others are rectangles."""
        _, starts, stops = self._columns()
        found: list[tuple[int, int, int, int, int, int]] = []
        paths: list[tuple[tuple[int, int], ...]] = []
        for (parent, _), start, stop in zip(self.nodes, starts.tolist(), stops.tolist(), strict=True):
            above = paths[parent] if parent >= 0 else ()
            paths.append(_appended(above, start, stop))
            *ranges, (first, _) = paths[-1]
            found.append((start, stop, first, stop, 0, INF))
            found += [(start, stop, low, high, -INF, INF) for low, high in ranges]
            _check_count("tree.nodes", len(found))
        return np.array(found)

    def diagonals(self) -> Diagonals:
        return (_CAUSAL,)

    def _depths(self) -> Ints:
        """Position of every node's first token."""
        depth: list[int] = []
        for parent, _ in self.nodes:
            depth.append(depth[parent] + self.nodes[parent][1] if parent >= 0 else 0)
        return np.array(depth)

    def runs(self, length: int) -> Columns:
        return _merged_runs(self._columns()[1], self._depths())

    def unlabelled(self, length: int) -> Columns:
        """A node's last token predicts the first token of its child, if it has exactly one."""
        parent, start, stop = self._columns()
        children = np.bincount(parent[parent >= 0], minlength=len(parent))
        label = np.full(len(parent), -1)
        label[parent[parent >= 0]] = start[parent >= 0]
        label[children != 1] = -1
        return stop - 1, label

    def check(self, length: int, field: str) -> None:
        _check_sum(field, "the nodes", int(self._columns()[2][-1]), length)


@dataclass(frozen=True)
class Documents(Mask):
    """A pack: each document sees itself under `mask`; positions restart, no label crosses documents."""

    lengths: tuple[int, ...]
    mask: Mask = field(default_factory=Causal)
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _lengths("documents.lengths", self.lengths))
        _check_inner("documents.mask", self.mask)

    def _columns(self) -> Columns:
        """(lengths, starts)."""
        lengths = np.array(self.lengths, np.int64)
        return lengths, np.cumsum(lengths) - lengths

    def bands(self, length: int) -> Ints:
        return self.mask.lower(*self._columns())

    def diagonals(self) -> Diagonals:
        return self.mask.diagonals()

    def runs(self, length: int) -> Columns:
        return lower_runs(self.mask, *self._columns())

    def unlabelled(self, length: int) -> Columns:
        return lower_unlabelled(self.mask, *self._columns())

    def check(self, length: int, field: str) -> None:
        _check_sum(field, "the documents", sum(self.lengths), length)
        for document in sorted(set(self.lengths)):
            self.mask.check(document, f"{field}.documents.mask")


@dataclass(frozen=True)
class Bands(Mask):
    """Raw bands (q0, q1, k0, k1, dmin, dmax); diagonals of +-2**62 and beyond are unbounded. Disjoint."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        listed = _listed("bands.bands", self.rows, 6, "q0, q1, k0, k1, dmin, dmax")
        table = np.array(listed, np.int64).reshape(-1, 6)
        _check_rects("bands.bands", table)
        algebra.check_disjoint("bands.bands", table)
        object.__setattr__(self, "rows", tuple(map(tuple, table.tolist())))

    def bands(self, length: int) -> Ints:
        return _bands(np.array(self.rows, np.int64).reshape(-1, 6).T)

    def diagonals(self) -> Diagonals:
        return algebra.diagonals(self.bands(0))

    def check(self, length: int, field: str) -> None:
        _check_inside(f"{field}.bands.bands", self.rows, length)


@dataclass(frozen=True)
class Slices(Mask):
    """Raw slices (q0, q1, k0, k1, type), the type by number or name: 0 FULL, 1 CAUSAL (bottom-right), 2 INVCAUSAL
    (top-left), 3 BICAUSAL (both)."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        numbered = algebra.number_types("slices.slices", self.rows)
        listed = _listed("slices.slices", numbered, 5, "q0, q1, k0, k1, type")
        table = np.array(listed, np.int64).reshape(-1, 5)
        _check_rects("slices.slices", table)
        algebra.check_types("slices.slices", table)
        algebra.check_disjoint("slices.slices", algebra.from_slices(table))
        object.__setattr__(self, "rows", tuple(map(tuple, table.tolist())))

    def bands(self, length: int) -> Ints:
        return _bands(algebra.from_slices(self.rows).T)

    def diagonals(self) -> Diagonals:
        return algebra.diagonals(self.bands(0))

    def check(self, length: int, field: str) -> None:
        _check_inside(f"{field}.slices.slices", self.rows, length)


# ---- lowering of many sequences that share a spec


def lower_runs(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(starts, positions) of the runs of such sequences, sorted."""
    if not spec.structured:
        return np.sort(starts), np.zeros(len(starts), np.int64)
    return _lower_columns(spec.runs, lengths, starts, lambda positions, _: positions)


def lower_unlabelled(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(tokens, labels) of such sequences whose label is not the next token, sorted."""
    if not spec.structured:
        return np.sort(starts + lengths - 1), np.full(len(starts), -1)
    return _lower_columns(
        spec.unlabelled, lengths, starts, lambda labels, offset: np.where(labels < 0, -1, labels + offset)
    )


def _lower_columns(
    columns: Callable[[int], Columns], lengths: Ints, starts: Ints, moved: Callable[[Ints, Ints], Ints]
) -> Columns:
    tokens, values = list[Ints]([_ZERO[:0]]), list[Ints]([_ZERO[:0]])
    for length, where in _by_length(lengths, starts):
        token, value = columns(length)
        offset = np.repeat(where, len(token))
        tokens.append(np.tile(token, len(where)) + offset)
        values.append(moved(np.tile(value, len(where)), offset))
    token, value = np.concatenate(tokens), np.concatenate(values)
    order = np.argsort(token, kind="stable")
    return token[order], value[order]


def _by_length(lengths: Ints, starts: Ints) -> Iterable[tuple[int, Ints]]:
    """(length, starts of the sequences of that length)."""
    order = np.argsort(lengths, kind="stable")
    unique, counts = np.unique(lengths, return_counts=True)
    stops = np.cumsum(counts)
    for length, low, high in zip(unique.tolist(), stops - counts, stops, strict=True):
        yield length, starts[order[low:high]]


# ---- helpers of the specs


def _appended(ranges: tuple[tuple[int, int], ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """`ranges` and [start, stop), joined to the last of them where that ends at `start`."""
    if ranges and ranges[-1][1] == start:
        return (*ranges[:-1], (ranges[-1][0], stop))
    return (*ranges, (start, stop))


def _merged_runs(starts: Ints, positions: Ints) -> Columns:
    """The runs whose position is not what the run before counts up to."""
    breaks = np.diff(positions - starts, prepend=-1) != 0
    breaks[0] = True
    return starts[breaks], positions[breaks]


def _check_count(field: str, count: int) -> None:
    if count > MAX_BANDS:
        raise ConfigError(field, count, f"makes more than {MAX_BANDS} bands", "use coarser parts")


def _check_sum(field: str, what: str, total: int, length: int) -> None:
    if total != length:
        raise ConfigError(
            field, total, f"{what} must add up to the sequence's length ({length})", "correct one of the two"
        )


def _check_inner(field: str, mask: Any) -> None:
    if not isinstance(mask, Mask):
        raise ConfigError(field, mask, "must be a mask", "write masks.causal()")


def _lengths(field: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    lengths = integers(field, values, 1, MAX_TOKENS)
    _check_parts(field, len(lengths))
    if not len(lengths):
        raise ConfigError(field, values, "must not be empty", "list at least one length")
    if lengths.sum() > MAX_TOKENS:
        raise ConfigError(
            field, int(lengths.sum()), f"must add up to at most {MAX_TOKENS}", "use shorter parts"
        )
    return tuple(lengths.tolist())


def _check_parts(field: str, count: int) -> None:
    if count > MAX_PARTS:
        raise ConfigError(field, count, f"must have at most {MAX_PARTS} parts", "split the sequence")


def _listed(field: str, values: Any, width: int, names: str) -> list[list[int]]:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    _check_parts(field, len(values) if isinstance(values, list | tuple) else 0)
    listed = rows(field, values, width, names)
    flat = [x for row in listed for x in row]
    if not all(kind is int for kind in map(type, flat)) or (
        flat and not -INF <= min(flat) <= max(flat) <= INF
    ):
        return [[integer(f"{field}[{i}]", x, -INF, INF) for x in row] for i, row in enumerate(listed)]
    return listed


def _table(field: str, values: Any, width: int, names: str, low: int) -> tuple[tuple[int, ...], ...]:
    listed = _listed(field, values, width, names)
    integers(field, [x for row in listed for x in row], low, MAX_TOKENS)
    return tuple(tuple(row) for row in listed)


def _check_rects(field: str, table: Ints) -> None:
    for i in np.flatnonzero(
        (table[:, :4].min(axis=1, initial=0) < 0) | (table[:, :4].max(axis=1) > MAX_TOKENS)
    ):
        rule = f"token ranges must lie in [0, {MAX_TOKENS}]"
        raise ConfigError(f"{field}[{i}]", table[i].tolist(), rule, "count tokens from the sequence's start")
    for i in np.flatnonzero((table[:, 0] >= table[:, 1]) | (table[:, 2] >= table[:, 3])):
        raise ConfigError(
            f"{field}[{i}]", table[i].tolist(), "must have q0 < q1 and k0 < k1", "drop the empty row"
        )


def _check_inside(field: str, rows: Sequence[Sequence[int]], length: int) -> None:
    for i, row in enumerate(rows):
        if row[1] > length or row[3] > length:
            rule = f"must lie within the sequence ({length} tokens)"
            raise ConfigError(f"{field}[{i}]", list(row), rule, "count tokens from the sequence's start")


# ---- constructors


def causal() -> Causal:
    """j <= i."""
    return Causal()


def full() -> Full:
    """Every pair of the sequence."""
    return Full()


def sliding_window(window: int, right: int = 0) -> SlidingWindow:
    """`window` keys up to and including the token itself, `right` after it."""
    return SlidingWindow(window, right)


def sink_window(sink: int, window: int) -> SinkWindow:
    """Causal, on the first `sink` tokens and the `window` most recent ones."""
    return SinkWindow(sink, window)


def causal_blockwise(block: int, local: int, sink: int = 1, test: int = 1) -> CausalBlockwise:
    """Causal, on the first `sink` blocks and `local` blocks back; the last `test` blocks see all."""
    return CausalBlockwise(block, local, sink, test)


def shared_question(prompt: int, answers: Sequence[int]) -> SharedQuestion:
    """One prompt of `prompt` tokens, then answers of the given lengths that do not see each other."""
    return SharedQuestion(prompt, answers)  # type: ignore[arg-type]


def prefix_lm(prefix: int) -> PrefixLM:
    """Causal, and every token sees the first `prefix` tokens."""
    return PrefixLM(prefix)


def block_causal(chunk: int, window: int | None = None) -> BlockCausal:
    """Chunks that see themselves and the earlier ones: `window` chunks with their own, or all."""
    return BlockCausal(chunk, window)


def chunked(chunk: int) -> Chunked:
    """Causal inside chunks of `chunk` tokens."""
    return Chunked(chunk)


def image_spans(spans: Sequence[Sequence[int]], mask: Mask | None = None) -> ImageSpans:
    """`mask` (causal), with the spans [start, end) bidirectional."""
    return ImageSpans(spans, mask or causal())  # type: ignore[arg-type]


def tree(nodes: Sequence[Sequence[int]]) -> Tree:
    """Nodes [parent or -1, length], parents first."""
    return Tree(nodes)  # type: ignore[arg-type]


def documents(lengths: Sequence[int], mask: Mask | None = None) -> Documents:
    """A pack of documents, each under `mask` (causal)."""
    return Documents(lengths, mask or causal())  # type: ignore[arg-type]


def bands(rows: ArrayLike) -> Bands:
    """Raw bands (q0, q1, k0, k1, dmin, dmax) on the sequence's own tokens."""
    return Bands(rows)  # type: ignore[arg-type]


def slices(rows: ArrayLike) -> Slices:
    """Raw slices (q0, q1, k0, k1, type) on the sequence's own tokens; a type is FULL, CAUSAL, INVCAUSAL, BICAUSAL
    or its number from 0 on."""
    return Slices(rows)  # type: ignore[arg-type]


# ---- data

SPECS: Mapping[str, type[Mask]] = MappingProxyType(
    {
        "causal": Causal,
        "full": Full,
        "sliding_window": SlidingWindow,
        "sink_window": SinkWindow,
        "causal_blockwise": CausalBlockwise,
        "shared_question": SharedQuestion,
        "prefix_lm": PrefixLM,
        "block_causal": BlockCausal,
        "chunked": Chunked,
        "image_spans": ImageSpans,
        "tree": Tree,
        "documents": Documents,
        "bands": Bands,
        "slices": Slices,
    }
)
_NAMES: Mapping[type[Mask], str] = MappingProxyType({spec: name for name, spec in SPECS.items()})
_RAW = MappingProxyType({"bands": "bands", "slices": "slices"})  # the data name of the field `rows`


def to_data(spec: Mask) -> dict[str, Any]:
    """Plain data {"name": {parameter: value}}; parameters at their default are left out."""
    name = _NAMES[type(spec)]
    params = {}
    for item in fields(spec):
        value = getattr(spec, item.name)
        default = Causal() if item.name == "mask" else item.default
        if value != default:
            params[_RAW.get(name, item.name)] = _plain(value)
    return {name: params}


def _plain(value: Any) -> Any:
    if isinstance(value, Mask):
        return to_data(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def is_data(data: Any) -> bool:
    """Whether `data` looks like one mask, {"name": {…}}, rather than like {kind: {"name": {…}}}."""
    return _names_mask(data) and not _names_mask(next(iter(data.values())))


def _names_mask(data: Any) -> bool:
    if not isinstance(data, Mapping) or len(data) != 1:
        return False
    ((name, params),) = data.items()
    return name in SPECS and (params is None or isinstance(params, Mapping))


def from_data(data: Any, field: str = "mask", depth: int = 0) -> Mask:
    """The spec of plain data {"name": {parameter: value}}. Raises ConfigError, UnknownNameError."""
    if depth > _MAX_NESTING:
        raise ConfigError(field, "...", f"masks nest at most {_MAX_NESTING} deep", "flatten the packs")
    if not isinstance(data, Mapping) or len(data) != 1:
        raise ConfigError(
            field, data, "must name one mask", f'write {{"causal": {{}}}}; there is {", ".join(SPECS)}'
        )
    ((name, params),) = data.items()
    if not isinstance(name, str) or name not in SPECS:
        raise UnknownNameError(field, name, "no mask of that name", suggestion(str(name)[:64], SPECS))
    return _build(SPECS[name], name, {} if params is None else params, f"{field}.{name}", depth)


def _build(spec: type[Mask], name: str, params: Any, field: str, depth: int) -> Mask:
    names = {_RAW.get(name, item.name): item for item in fields(spec)}
    required = [key for key, item in names.items() if item.default is item.default_factory]
    params = known(field, params, names, required)
    values = {names[key].name: value for key, value in params.items()}
    if "mask" in values:
        values["mask"] = from_data(values["mask"], f"{field}.mask", depth + 1)
    return spec(**values)


__all__ = [
    "Mask",
    "bands",
    "block_causal",
    "causal",
    "causal_blockwise",
    "chunked",
    "documents",
    "from_data",
    "full",
    "image_spans",
    "prefix_lm",
    "shared_question",
    "sink_window",
    "slices",
    "sliding_window",
    "to_data",
    "tree",
]
