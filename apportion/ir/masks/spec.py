"""Base classes of mask specs, and their lowering to bands, positions and labels.

Each spec is a frozen dataclass with a constructor function of the same name. On local tokens 0..length-1:

    bands(length)        int64 [n, 6], disjoint
    diagonals()          the (dmin, dmax) of its bands, for any length
    runs(length)         (starts, positions) int64 [r]: tokens at which positions jump, and their positions
    unlabelled(length)   (tokens, labels) int64 [m]: the tokens whose label is not the next one (-1: no label)
    check(length, field) raises ConfigError if the spec does not fit a sequence of that length

In rules below, i is a query and j a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from textwrap import shorten
from typing import Any, ClassVar

import numpy as np

from apportion.ir.arrays import Ints, group_of, index_in_group
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, integers, rows, sequence
from apportion.ir.masks import bands as algebra
from apportion.ir.masks.bands import INF, MAX_TOKENS

Columns = tuple[Ints, Ints]
Row = Iterable[Any]  # q0, q1, k0, k1, dmin, dmax: scalars or columns
Diagonals = tuple[tuple[int, int], ...]  # distinct (dmin, dmax), in any order

MAX_PARTS = 2**22  # answers, nodes, spans, documents, raw bands or slices of one sequence
MAX_BANDS = 2**22  # bands of one sequence
MAX_NESTING = 8  # nesting depth of masks
ZERO = np.zeros(1, np.int64)
CAUSAL, FULL = (0, INF), (-INF, INF)

_SHOWN = 100  # characters of a parameter shown in a notebook
_LONGEST_SHOWN = 65536  # tokens of the longest sequence drawn there


@dataclass(frozen=True)
class Mask(ABC):
    """Base of the specs. structured: True if the spec has its own `runs` and `unlabelled`."""

    structured: ClassVar[bool] = False

    @abstractmethod
    def bands(self, length: int) -> Ints:
        """[n, 6] disjoint bands on local tokens."""

    @abstractmethod
    def diagonals(self) -> Diagonals:
        """The declared diagonals, even those without effect in a short sequence. A rectangle whose keys all precede its
        queries is declared with dmin >= 0."""

    @property
    def nesting(self) -> int:
        """The nesting depth of the masks inside this one."""
        inner = getattr(self, "mask", None)
        return 0 if inner is None else 1 + inner.nesting

    def parts(self) -> int:
        """The number of documents, nodes, answers and spans of one sequence, nested ones multiplied; known from the
        spec, before anything is built."""
        return 1

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        """[m, 6]: bands of sequences of `lengths` that begin at `starts`, in no particular order."""
        parts: list[Ints] = [np.zeros((0, 6), np.int64)]
        for length, firsts in _length_groups(lengths, starts):
            local = self.bands(length)
            check_count("mask", len(local) * len(firsts))
            offset = np.repeat(firsts, len(local))
            parts.append(algebra.shift(np.tile(local, (len(firsts), 1)), offset, offset))
        return np.concatenate(parts)

    def runs(self, length: int) -> Columns:
        """(starts, positions): positions count up by one from each start, the first of which is 0."""
        return ZERO, ZERO

    def unlabelled(self, length: int) -> Columns:
        """(tokens, labels) of every token whose label is not the next token; label -1: none."""
        return np.array([length - 1]), np.array([-1])

    def check(self, length: int, field: str) -> None:  # noqa: B027 most specs fit any length
        """Raises ConfigError if the spec does not fit `length`."""

    def _repr_html_(self) -> str:
        """HTML for notebooks: the mask on a sequence long enough to show it."""
        from apportion.ir import cards

        length = self.shown_length()
        picture = cards.cells(
            f"queries down, keys across, {length} tokens", cards.sample_mask(self.bands(length), length)
        )
        rows = [(key, shorten(str(value), _SHOWN)) for key, value in vars(self).items()]
        rows.append(("drawn on", f"{length:,} tokens"))
        return cards.card(type(self).__name__, rows, picture)

    def shown_length(self) -> int:
        """The sequence length for a picture: the mask's own length, if it has one, else four times its largest
        parameter."""
        length = min(4 * max(12, *_numbers(self)), _LONGEST_SHOWN)
        try:
            self.check(length, "mask")
        except ConfigError as error:  # the error names the length that fits
            length = max(_numbers(error.value))
        return length

    def positions(self, length: int) -> Ints:
        """[length] position id of each token."""
        return expand_runs(*self.runs(length), length)

    def labels(self, length: int) -> Ints:
        """[length]: the token that each token predicts, or -1."""
        labels = np.arange(1, length + 1)
        tokens, ends = self.unlabelled(length)
        labels[tokens] = ends
        return labels


def expand_runs(starts: Ints, positions: Ints, length: int) -> Ints:
    """[length]: positions that count up by one from `positions[r]` at token `starts[r]`."""
    return np.arange(length) + np.repeat(positions - starts, np.diff(starts, append=length))


def as_bands(*rows: Row) -> Ints:
    """Bands from rows of scalars or equally long columns, without the empty ones."""
    tables = [np.stack(np.broadcast_arrays(*(np.asarray(x, np.int64) for x in row)), axis=-1) for row in rows]
    bands = np.concatenate([table.reshape(-1, 6) for table in tables])
    return bands[algebra.area(bands) > 0]


def shifted_bands(starts: Ints, *rows: Row) -> Ints:
    """Bands from rows of scalars or columns, one band per row and sequence, shifted to the starts of the sequences; the
    diagonals are unchanged."""
    tables = np.empty((len(rows), len(starts), 6), np.int64)
    for table, row in zip(tables, rows, strict=True):
        for i, column in enumerate(row):
            table[:, i] = column if i > 3 else starts + column
    bands = tables.reshape(-1, 6)
    return bands[algebra.area(bands) > 0]


class Uniform(Mask):
    """A spec whose bands follow from the length by a few formulas, so that many sequences are lowered at once."""

    @abstractmethod
    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        """The bands of sequences of `lengths` [n]: rows of scalars or columns [n]; empty ones are dropped."""

    def bands(self, length: int) -> Ints:
        return self.lower(np.array([length]), ZERO)

    def lower(self, lengths: Ints, starts: Ints) -> Ints:
        return shifted_bands(starts, *self.rows(lengths))


class Diagonal(Uniform):
    """A spec with one band over all queries and keys."""

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        (diagonal,) = self.diagonals()
        return ((0, lengths, 0, lengths, *diagonal),)


class Gridded(Mask):
    """A spec with one band per `chunk` tokens. name: the mask's name in errors."""

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
        begin = index_in_group(counts) * self.chunk
        return shifted_bands(starts[owner], self.row(begin, np.minimum(begin + self.chunk, lengths[owner])))


# ---- lowering of many sequences that share a spec


def lower_runs(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(starts, positions) of the runs of sequences with this spec, sorted."""
    if not spec.structured:
        return np.sort(starts), np.zeros(len(starts), np.int64)
    return lower_columns(spec.runs, lengths, starts, lambda positions, _: positions)


def lower_unlabelled(spec: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(tokens, labels) of the tokens, in sequences with this spec, whose label is not the next token; sorted."""
    if not spec.structured:
        return np.sort(starts + lengths - 1), np.full(len(starts), -1)
    return lower_columns(
        spec.unlabelled, lengths, starts, lambda labels, offset: np.where(labels < 0, -1, labels + offset)
    )


def lower_columns(
    columns: Callable[[int], Columns], lengths: Ints, starts: Ints, move: Callable[[Ints, Ints], Ints]
) -> Columns:
    """(tokens, values) of sequences with one spec, sorted by token. columns: length -> (tokens, values) of one
    sequence; move: shifts values to a sequence's start."""
    tokens, values = list[Ints]([ZERO[:0]]), list[Ints]([ZERO[:0]])
    for length, firsts in _length_groups(lengths, starts):
        token, value = columns(length)
        offset = np.repeat(firsts, len(token))
        tokens.append(np.tile(token, len(firsts)) + offset)
        values.append(move(np.tile(value, len(firsts)), offset))
    token, value = np.concatenate(tokens), np.concatenate(values)
    order = np.argsort(token, kind="stable")
    return token[order], value[order]


def _numbers(data: Any) -> list[int]:
    """All integers in the fields of a mask, at any depth, and some ones, so that the list is never empty."""
    if is_dataclass(data):
        data = tuple(vars(data).values())
    if isinstance(data, list | tuple):
        return [1, *(number for part in data for number in _numbers(part))]
    return [1, data] if isinstance(data, int) and not isinstance(data, bool) else [1]


def _length_groups(lengths: Ints, starts: Ints) -> Iterable[tuple[int, Ints]]:
    """(length, starts of the sequences of that length) for each distinct length."""
    order = np.argsort(lengths, kind="stable")
    unique, counts = np.unique(lengths, return_counts=True)
    stops = np.cumsum(counts)
    for length, low, high in zip(unique.tolist(), stops - counts, stops, strict=True):
        yield length, starts[order[low:high]]


# ---- helpers of the specs


def append_range(ranges: tuple[tuple[int, int], ...], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Appends [start, stop) to `ranges`, merged with the last one if that ends at `start`."""
    if ranges and ranges[-1][1] == start:
        return (*ranges[:-1], (ranges[-1][0], stop))
    return (*ranges, (start, stop))


def merge_runs(starts: Ints, positions: Ints) -> Columns:
    """Drops runs that continue the positions of the previous run."""
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


def check_nesting(field: str, levels: int) -> None:
    """Checks the nesting depth of the mask at `field`, which is inside another mask and itself nests `levels` deep."""
    if levels >= MAX_NESTING:
        raise ConfigError(field, "...", f"masks may nest at most {MAX_NESTING} deep", "flatten the packs")


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
    table = rows(field, values, width, names)
    numbers = [x for row in table for x in row]
    if not all(kind is int for kind in map(type, numbers)) or (
        numbers and not -INF <= min(numbers) <= max(numbers) <= INF
    ):
        return [[integer(f"{field}[{i}]", x, -INF, INF) for x in row] for i, row in enumerate(table)]
    return table


def read_table(field: str, values: Any, width: int, names: str, low: int) -> tuple[tuple[int, ...], ...]:
    table = read_rows(field, values, width, names)
    integers(field, [x for row in table for x in row], low, MAX_TOKENS)
    return tuple(tuple(row) for row in table)


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
