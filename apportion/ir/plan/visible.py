"""Fetched rows visible to a rank's queries: the rank's forward program reduced to its transfers, without attention.

    home rows | received rows, round by round  ──Fetch.of──► hops, and the rows that each task sees
    their tokens, which travel first           ──arrange───► visible rows in the order of tokens | forwarded rows

An attention program names work rows, which are reused. Here every received row has its own number and remains in
memory, and its gradient goes back along the hops that brought it, the last hop first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, changes, group_of, index_in_group
from apportion.ir.isa import Op
from apportion.ir.plan.ops import starts_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import KV_SIDE, Space, Tensor


def obstacle(program: ProgramSet) -> str | None:
    """The reason why a forward program, of one rank or of all, does not fetch every visible row for home queries, or
    None."""
    operands = program["operands"]
    tensor, in_work = operands["tensor"], operands["space"] == Space.WORK
    if (tensor == Tensor.X).any():
        return "it projects heads itself"
    if (operands["heads"] > 0).any():
        return "it splits heads among ranks"
    if (in_work & np.isin(tensor, (Tensor.Q, Tensor.O))).any():
        return "its queries travel"
    return None


class Hop(NamedTuple):
    """One round of a rank. sources: earlier hops whose rows it forwards; sends, receives: peer -> rows, int64 [n]."""

    channel: int
    sources: tuple[int, ...]
    sends: Mapping[int, Ints]
    receives: Mapping[int, Ints]


class TaskKeys(NamedTuple):
    """The keys of one task: query i, counted from home row `query`, sees keys[j] if dmin <= i - j <= dmax."""

    query: int
    queries: int
    keys: Ints
    dmin: int
    dmax: int

    @property
    def visible(self) -> Ints:
        """The keys that at least one query sees."""
        return self.keys[max(0, -self.dmax) : max(0, self.queries - self.dmin)]


@dataclass(frozen=True)
class Arrangement:
    """A permutation of rows: the visible ones, each token once in token order, then all others.

    place: int64 [rows]; visible: number of visible rows; spans: int64 [home rows, ranges, 2], the visible rows of
    each query as ranges [first, end), ascending, padded with (0, 0).
    """

    place: Ints
    visible: int
    spans: Ints


@dataclass(frozen=True)
class Fetch:
    """Rows of one rank: its home rows, then received rows in order of arrival. home, rows: row counts."""

    home: int
    rows: int
    hops: tuple[Hop, ...]
    tasks: tuple[TaskKeys, ...]

    @staticmethod
    def of(program: ProgramSet, home: int) -> Fetch:
        """Builds the fetch of a rank's forward program, which must have no `obstacle`."""
        walk, instructions = _Walk(program, home), program["instructions"]
        starts = starts_of(instructions["op"], instructions.wide("count"))
        columns = (instructions[name].tolist() for name in ("op", "round", "channel", "count"))
        for op, _, channel, count, start in zip(*columns, starts.tolist(), strict=True):
            walk.step(Op(op), channel, slice(start, start + count))
        return Fetch(home, walk.rows, tuple(walk.hops), tuple(walk.tasks))

    @property
    def in_arrival_order(self) -> Arrangement:
        """All rows, in order of arrival."""
        return Arrangement(np.arange(self.rows), self.rows, np.zeros((self.home, 1, 2), np.int64))

    def arrange(self, tokens: Ints) -> Arrangement:
        """Visible rows first, in token order. tokens: int64 [rows], the global token of each row."""
        is_visible = np.zeros(self.rows, np.bool_)
        for task in self.tasks:
            is_visible[task.visible] = True
        visible = np.flatnonzero(is_visible)
        _, first, inverse = np.unique(tokens[visible], return_index=True, return_inverse=True)
        position, copy_position = np.full(self.rows, -1), np.full(self.rows, -1)
        copy_position[visible] = inverse  # all copies of a token get its position
        position[visible[first]] = np.arange(len(first))
        others = np.flatnonzero(position < 0)
        position[others] = len(first) + np.arange(len(others))
        return Arrangement(position, len(first), _spans(self.home, _ranges(self.tasks, copy_position)))


class _Walk:
    """Steps through a forward program. _work_rows: the row now stored in each KV work row; _first_rows: the first row
    received in each hop."""

    def __init__(self, program: ProgramSet, home: int) -> None:
        self._tables = {name: list(zip(*program[name].values.tolist(), strict=True)) for name in _LISTS}
        arenas = program["arenas"]
        self._work_rows = np.full(int(arenas["rows"][arenas["tensor"] == Tensor.KV].sum()), -1)
        self._first_rows = list[int]()
        self.rows, self.hops, self.tasks = home, list[Hop](), list[TaskKeys]()

    def step(self, op: Op, channel: int, part: slice) -> None:
        if op == Op.LAUNCH:
            self._launch(channel, self._tables["transfers"][part])
        elif op == Op.ATTEND:
            for q, kv, _, dmin, dmax, _ in self._tables["tasks"][part]:
                _, _, row, rows, _, _ = self._tables["operands"][q]
                self.tasks.append(TaskKeys(row, rows, self._rows_of(kv).copy(), dmin, dmax))
        elif op == Op.COPY:
            for a, _, c, _, _ in self._tables["rowops"][part]:
                if self._tables["operands"][a][0] in KV_SIDE:
                    self._rows_of(c)[:] = self._rows_of(a)

    def _rows_of(self, operand: int) -> Ints:
        """The rows of an operand; a view for work rows."""
        _, space, row, rows, _, _ = self._tables["operands"][operand]
        return np.arange(row, row + rows) if space == Space.HOME else self._work_rows[row : row + rows]

    def _launch(self, channel: int, transfers: Sequence[tuple[int, ...]]) -> None:
        # in table order: the k-th tile sent to a peer matches the k-th received from it
        sends: dict[int, list[Ints]] = {}
        receives: dict[int, list[Ints]] = {}
        parents: set[int] = set()
        for send, peer, operand in transfers:
            if send:
                sends.setdefault(peer, []).append(rows := self._rows_of(operand).copy())
                parents |= {*(np.searchsorted(self._first_rows, rows, "right") - 1).tolist()} - {-1}
        self._first_rows.append(self.rows)
        for send, peer, operand in transfers:
            if not send:
                received_rows = self._rows_of(operand)
                received_rows[:] = np.arange(self.rows, self.rows + len(received_rows))
                receives.setdefault(peer, []).append(received_rows.copy())
                self.rows += len(received_rows)
        self.hops.append(Hop(channel, tuple(sorted(parents)), _concatenate(sends), _concatenate(receives)))


_LISTS = ("operands", "transfers", "tasks", "rowops")


def _concatenate(tiles: Mapping[int, list[Ints]]) -> dict[int, Ints]:
    return {peer: np.concatenate(tiles[peer]) for peer in sorted(tiles)}


def _ranges(tasks: Iterable[TaskKeys], index: Ints) -> Ints:
    """int64 [n, 3]: (query, first, end), sorted: the non-empty ranges of visible rows that each query sees. index:
    int64 [rows], the position of each row among the visible ones."""
    parts = [np.zeros((0, 3), np.int64)]
    for task in tasks:
        key_rows, i = index[task.keys], np.arange(task.queries)[:, None]
        starts = np.flatnonzero(np.append(True, np.diff(key_rows) != 1))  # runs of visible rows
        end = np.append(starts[1:], len(key_rows))
        low, high = np.maximum(starts, i - task.dmax), np.minimum(end, i - task.dmin + 1)
        query, run = np.nonzero(high > low)
        shift = (key_rows[starts] - starts)[run]
        parts.append(np.stack([task.query + query, low[query, run] + shift, high[query, run] + shift], 1))
    ranges = np.concatenate(parts)
    return ranges[np.lexsort(ranges.T[1::-1])]


def _spans(home: int, ranges: Ints) -> Ints:
    """int64 [home, ranges, 2] from sorted ranges, int64 [n, 3]; adjacent ranges are merged."""
    query, first, end = ranges.T
    is_first = changes(query)
    is_first[1:] |= first[1:] != end[:-1]
    starts = np.flatnonzero(is_first)
    counts = np.bincount(query[starts], minlength=home)
    spans = np.zeros((home, max(1, int(counts.max(initial=0))), 2), np.int64)
    last = np.append(starts, len(ranges))[1:] - 1
    spans[group_of(counts), index_in_group(counts)] = np.stack([first[starts], end[last]], 1)
    return spans
