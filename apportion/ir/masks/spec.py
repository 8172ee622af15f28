"""What a mask spec is, and how it lowers to bands, positions and labels.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from textwrap import shorten
from typing import Any, ClassVar

import numpy as np

from apportion.ir.arrays import Ints, group_of, within
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, integers, rows, sequence
from apportion.ir.masks import bands as algebra
from apportion.ir.masks.bands import INF, MAX_TOKENS

Columns = tuple[Ints, Ints]
Row = Iterable[Any]  # q0, q1, k0, k1, dmin, dmax: scalars or columns
Diagonals = tuple[tuple[int, int], ...]  # distinct (dmin, dmax), in any order

MAX_PARTS = 2**22  # answers, nodes, spans, documents, raw bands or slices of one sequence
MAX_BANDS = 2**22  # bands of one sequence
MAX_NESTING = 8  # masks inside a mask, one in another
ZERO = np.zeros(1, np.int64)
CAUSAL, FULL = (0, INF), (-INF, INF)

_SHOWN = 100  # characters of a parameter, in a notebook
_LONGEST_SHOWN = 65536  # tokens, there


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

    @property
    def nesting(self) -> int:
        """How many masks lie inside it, one in another."""
        inner = getattr(self, "mask", None)
        return 0 if inner is None else 1 + inner.nesting

    def parts(self) -> int:
        """What it makes of one sequence, nested ones multiplied: documents, nodes, answers, spans. Of the spec alone,
        so that it is known before anything is built."""
        return 1

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        """[m, 6] bands of sequences of `lengths` that begin at `starts`, in no particular order."""
        parts: list[Ints] = [np.zeros((0, 6), np.int64)]
        for length, where in _by_length(lengths, starts):
            local = self.bands(length)
            check_count("mask", len(local) * len(where))
            offset = np.repeat(where, len(local))
            parts.append(algebra.shift(np.tile(local, (len(where), 1)), offset, offset))
        return np.concatenate(parts)

    def runs(self, length: int) -> Columns:
        """(starts, positions): positions count up by one from each start; the first start is 0."""
        return ZERO, ZERO

    def unlabelled(self, length: int) -> Columns:
        """(tokens, labels): every token whose label is not the next token, and its label or -1."""
        return np.array([length - 1]), np.array([-1])

    def check(self, length: int, field: str) -> None:  # noqa: B027 most specs fit any length
        """Raises ConfigError where the spec does not fit `length`."""

    def _repr_html_(self) -> str:
        """What a notebook shows: the mask on a sequence that is long enough to see it."""
        from apportion.ir import cards

        length = self.shown_length()
        picture = cards.cells(
            f"queries down, keys across, {length} tokens", cards.sampled(self.bands(length), length)
        )
        rows = [(key, shorten(str(value), _SHOWN)) for key, value in vars(self).items()]
        rows.append(("drawn on", f"{length:,} tokens"))
        return cards.card(type(self).__name__, rows, picture)

    def shown_length(self) -> int:
        """Tokens of a sequence that shows it: its own length, if it has one, else four times its largest parameter."""
        length = min(4 * max(12, *_numbers(self)), _LONGEST_SHOWN)
        try:
            self.check(length, "mask")
        except ConfigError as error:  # it says which length fits
            length = max(_numbers(error.value))
        return length

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


def as_bands(*rows: Row) -> Ints:
    """Bands of rows of scalars or equally long columns; those without pairs are dropped."""
    tables = [np.stack(np.broadcast_arrays(*(np.asarray(x, np.int64) for x in row)), axis=-1) for row in rows]
    bands = np.concatenate([table.reshape(-1, 6) for table in tables])
    return bands[algebra.area(bands) > 0]


def placed(starts: Ints, *rows: Row) -> Ints:
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
        return self.lower(np.array([length]), ZERO)

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        return placed(starts, *self.rows(lengths))


class Diagonal(Uniform):
    """One band on the whole square."""

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        (diagonal,) = self.diagonals()
        return ((0, lengths, 0, lengths, *diagonal),)


class Gridded(Mask):
    """A spec of one band for each `chunk` tokens. name: in errors."""

    name: ClassVar[str]
    chunk: int

    @abstractmethod
    def row(self, starts: Ints, stops: Ints) -> Row:
        """The band of each chunk [start, stop) of a sequence."""

    def bands(self, length: int) -> Ints:
        return self.lower(np.array([length]), ZERO)

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        counts = -(-lengths // self.chunk)
        check_count(f"{self.name}.chunk", int(counts.sum()))
        owner = group_of(counts)
        begin = within(counts) * self.chunk
        return placed(starts[owner], self.row(begin, np.minimum(begin + self.chunk, lengths[owner])))


# ---- lowering of many sequences that share a spec


def lower_runs(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(starts, positions) of the runs of such sequences, sorted."""
    if not spec.structured:
        return np.sort(starts), np.zeros(len(starts), np.int64)
    return lower_columns(spec.runs, lengths, starts, lambda positions, _: positions)


def lower_unlabelled(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(tokens, labels) of such sequences whose label is not the next token, sorted."""
    if not spec.structured:
        return np.sort(starts + lengths - 1), np.full(len(starts), -1)
    return lower_columns(
        spec.unlabelled, lengths, starts, lambda labels, offset: np.where(labels < 0, -1, labels + offset)
    )


def lower_columns(
    columns: Callable[[int], Columns], lengths: Ints, starts: Ints, moved: Callable[[Ints, Ints], Ints]
) -> Columns:
    """(tokens, values) of such sequences, sorted. columns: of a length; moved: its values where a sequence starts."""
    tokens, values = list[Ints]([ZERO[:0]]), list[Ints]([ZERO[:0]])
    for length, where in _by_length(lengths, starts):
        token, value = columns(length)
        offset = np.repeat(where, len(token))
        tokens.append(np.tile(token, len(where)) + offset)
        values.append(moved(np.tile(value, len(where)), offset))
    token, value = np.concatenate(tokens), np.concatenate(values)
    order = np.argsort(token, kind="stable")
    return token[order], value[order]


def _numbers(data: Any) -> list[int]:
    """All whole numbers in the fields of a mask, however deep, and a 1."""
    if is_dataclass(data):
        data = tuple(vars(data).values())
    if isinstance(data, list | tuple):
        return [1, *(number for part in data for number in _numbers(part))]
    return [1, data] if isinstance(data, int) and not isinstance(data, bool) else [1]


def _by_length(lengths: Ints, starts: Ints) -> Iterable[tuple[int, Ints]]:
    """(length, starts of the sequences of that length)."""
    order = np.argsort(lengths, kind="stable")
    unique, counts = np.unique(lengths, return_counts=True)
    stops = np.cumsum(counts)
    for length, low, high in zip(unique.tolist(), stops - counts, stops, strict=True):
        yield length, starts[order[low:high]]


# ---- helpers of the specs


def appended(ranges: tuple[tuple[int, int], ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """`ranges` and [start, stop), joined to the last of them where that ends at `start`."""
    if ranges and ranges[-1][1] == start:
        return (*ranges[:-1], (ranges[-1][0], stop))
    return (*ranges, (start, stop))


def merged_runs(starts: Ints, positions: Ints) -> Columns:
    """The runs whose position is not what the run before counts up to."""
    breaks = np.diff(positions - starts, prepend=-1) != 0
    breaks[0] = True
    return starts[breaks], positions[breaks]


def check_count(field: str, count: int) -> None:
    if count > MAX_BANDS:
        raise ConfigError(field, count, f"makes more than {MAX_BANDS} bands", "use coarser parts")


def check_sum(field: str, what: str, total: int, length: int) -> None:
    if total != length:
        raise ConfigError(
            field, total, f"{what} must add up to the sequence's length ({length})", "correct one of the two"
        )


def check_inner(field: str, mask: Any) -> None:
    if not isinstance(mask, Mask):
        raise ConfigError(field, mask, "must be a mask", "write masks.causal()")
    check_nesting(field, mask.nesting)


def check_nesting(field: str, inside: int) -> None:
    """`inside`: how many masks the mask at `field`, which lies in another, has inside."""
    if inside >= MAX_NESTING:
        raise ConfigError(field, "...", f"masks nest at most {MAX_NESTING} deep", "flatten the packs")


def lengths_of(field: str, values: Any) -> tuple[int, ...]:
    lengths = integers(field, values, 1, MAX_TOKENS)
    check_parts(field, len(lengths))
    if not len(lengths):
        raise ConfigError(field, values, "must not be empty", "list at least one length")
    if lengths.sum() > MAX_TOKENS:
        raise ConfigError(
            field, int(lengths.sum()), f"must add up to at most {MAX_TOKENS}", "use shorter parts"
        )
    return tuple(lengths.tolist())


def check_parts(field: str, count: int) -> None:
    if count > MAX_PARTS:
        raise ConfigError(field, count, f"must have at most {MAX_PARTS} parts", "split the sequence")


def read_rows(field: str, values: Any, width: int, names: str) -> list[list[int]]:
    values = sequence(field, values)
    check_parts(field, len(values))
    listed = rows(field, values, width, names)
    flat = [x for row in listed for x in row]
    if not all(kind is int for kind in map(type, flat)) or (
        flat and not -INF <= min(flat) <= max(flat) <= INF
    ):
        return [[integer(f"{field}[{i}]", x, -INF, INF) for x in row] for i, row in enumerate(listed)]
    return listed


def read_table(field: str, values: Any, width: int, names: str, low: int) -> tuple[tuple[int, ...], ...]:
    listed = read_rows(field, values, width, names)
    integers(field, [x for row in listed for x in row], low, MAX_TOKENS)
    return tuple(tuple(row) for row in listed)


def check_rects(field: str, table: Ints) -> None:
    for i in np.flatnonzero(
        (table[:, :4].min(axis=1, initial=0) < 0) | (table[:, :4].max(axis=1) > MAX_TOKENS)
    ):
        rule = f"token ranges must lie in [0, {MAX_TOKENS}]"
        raise ConfigError(f"{field}[{i}]", table[i].tolist(), rule, "count tokens from the sequence's start")
    for i in np.flatnonzero((table[:, 0] >= table[:, 1]) | (table[:, 2] >= table[:, 3])):
        raise ConfigError(
            f"{field}[{i}]", table[i].tolist(), "must have q0 < q1 and k0 < k1", "drop the empty row"
        )


def check_inside(field: str, rows: Sequence[Sequence[int]], length: int) -> None:
    for i, row in enumerate(rows):
        if row[1] > length or row[3] > length:
            rule = f"must lie within the sequence ({length} tokens)"
            raise ConfigError(f"{field}[{i}]", list(row), rule, "count tokens from the sequence's start")
