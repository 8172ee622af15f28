"""Builds the work lists of attention, which assign rows to kernel programs, from the columns of a rank's program.

    tasks ──waves, cut_tiles──► tiles (rows with one owner) ──► entries (rows each tile walks) ──► one int32 buffer

A program has at most three lists, one per kernel. `owner` rows are accumulated; `with_owner` are operands with rows
parallel to the owner's; a tile walks over the rows of `walked`, and `with_walked` are operands parallel to those:

    kernel   owner   with_owner     walked   with_walked
    attend   O       Q              KV
    dq       dQ      Q, dO, delta   KV
    dkdv     dKV     KV             Q        dO, delta

An entry is rows [start, stop) of `walked` inside the band dmin <= owner row - walked row <= dmax; in [full0, full1),
whole blocks, no pair is masked.

Complete rows go to their destinations: home rows to the results, complete work rows to their message or to the results
of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from apportion.backends.interp import Program, kv_columns
from apportion.backends.torch.stage.tiles import KeyedRows, Tiles, column_groups, cut_tiles, waves
from apportion.ir.arrays import Ints, group_of, index_in_group, offsets
from apportion.ir.isa import FIRST_DKV, FIRST_DQ
from apportion.ir.plan.fusion import RowRanges
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet

#: int32s of a tile: row0, row1, first entry, one past the last, flags, lanes, heads, shifts of up to 3 `with_owner`;
#: then the target of complete rows: offset in 16-byte units, row of row0, columns of a row, heads' columns, offset of
#: their LSE
TILE = 16
AT, FIRST, COLUMNS, HEADS, LSE = range(10, 15)
#: int32s of an entry: start, stop, full0, full1, dmin, dmax, owner rows it applies to (from, to), flags, heads,
#: shifts of up to 2 `with_walked`
ENTRY = 12
#: flags of a tile: fresh, then whether the owner and each `with_owner` are work rows, complete, whether these rows go
#: into a message, whether it computes its rows' statistics; of an entry: the same for walked and `with_walked`
COMPLETE, STAGED, STATISTICS = 32, 64, 128
_FAR = 2**30  # beyond any row: diagonals are clipped to it


class Columns:
    """The operands of a rank's program as columns. space, row, rows, signature: int64 [operands]; signature: a number
    for each list of heads and their columns; names, columns: signature -> these lists."""

    def __init__(self, program: Program) -> None:
        fields = [
            (operand.space, operand.row, operand.rows, operand.heads, operand.column_list)
            for operand in program.operands
        ]
        space, row, rows, names, columns = zip(*fields, strict=True)
        self.space, self.row, self.rows = (np.array(column, np.int64) for column in (space, row, rows))
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(zip(names, columns, strict=True)))}
        self.signature = np.array([kinds[kind] for kind in zip(names, columns, strict=True)], np.int64)
        self.names, self.columns = ([kind[part] for kind in kinds] for part in (0, 1))
        self._group = program.header.q_heads // program.header.kv_heads

    def kv_of(self, q: int, kv: int) -> tuple[int, ...]:
        """The index of each query head's KV head, for query heads of one signature among KV heads of another."""
        return kv_columns(self.names[q], self.names[kv], self._group)


class Roles(NamedTuple):
    """Columns of a list of tasks for the roles of the table above."""

    table: str
    owner: str
    with_owner: tuple[str, ...]
    walked: str
    with_walked: tuple[str, ...]
    first: int  # bit of `first` for a task that is the first on the owner's rows


ROLES: Mapping[str, Roles] = MappingProxyType(
    {
        "attend": Roles("tasks", "o", ("q",), "kv", (), 1),
        "dq": Roles("grads", "dq", ("q", "do", "delta"), "kv", (), FIRST_DQ),
        "dkdv": Roles("grads", "dkv", ("kv",), "q", ("do", "delta"), FIRST_DKV),
    }
)


class Launch(NamedTuple):
    """Tiles [tile, tile + tiles) of a list, for at most `lanes` heads each."""

    tile: int
    tiles: int
    lanes: int


@dataclass(frozen=True, eq=False)
class WorkList:
    """The work list of a kernel. tiles: int32 [tiles, TILE]; entries: int32 [entries, ENTRY]; heads: int32, indexed by
    both; launches: instruction -> its launches, nearly always one."""

    tiles: Ints
    entries: Ints
    heads: Ints
    launches: Mapping[int, tuple[Launch, ...]]


class Targets(NamedTuple):
    """Destinations of complete work rows [row0, row1) of a sum; int64 [ranges], by row. staged: 1 for a message, 0 for
    results; first: the row there; columns: columns per row there; at, lse: byte offsets of the rows and of their LSE,
    in units of 16."""

    row0: Ints
    row1: Ints
    staged: Ints
    first: Ints
    columns: Ints
    at: Ints
    lse: Ints

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int, int, int, int]]) -> Targets:
        return Targets(*np.array(sorted(rows), np.int64).reshape(-1, 7).T)


def work_list(
    programs: ProgramSet,
    columns: Columns,
    kernel: str,
    height: int,
    block: int,
    complete: RowRanges,
    targets: Targets,
    statistics: RowRanges,
) -> WorkList:
    """Builds the list of one kernel: tiles of `height` owner rows that walk in steps of `block` rows. complete: the
    rows that tasks leave as results; targets: destinations of the work rows among them; statistics: home rows, by task,
    whose statistics the kernel computes."""
    tasks = _ListedTasks(programs, columns, ROLES[kernel])
    finished = KeyedRows(tasks.key[complete.of], complete.row0, complete.row1)
    cuts = _targets_of(finished, tasks.spaces[complete.of] & 1, targets)
    early = KeyedRows(tasks.key[statistics.of], statistics.row0, statistics.row1)
    tiles = cut_tiles(tasks.key, tasks.start, tasks.stop, tasks.first, height, finished, cuts, early)
    entries, of_tile = _entries(tasks, tiles, block)
    heads = _Heads(columns, tasks)
    numbers = np.arange(len(tiles.key))
    first, last = np.searchsorted(of_tile, numbers), np.searchsorted(of_tile, numbers, "right")
    sample = tasks.of_key[tiles.key]
    work = offsets(entries[:, 1] - entries[:, 0])
    launch = tasks.launch[sample]
    order = np.lexsort((work[first] - work[last], launch))  # longest first
    order = order[(tiles.fresh | tiles.complete | tiles.statistics | (last > first))[order]]
    flags = tiles.fresh + 2 * tasks.spaces[sample] + COMPLETE * tiles.complete + STATISTICS * tiles.statistics
    fields = [tiles.row0, tiles.row1, first, last, flags, heads.lanes[sample], heads.tile[sample]]
    fields += [shift[sample] for shift in tasks.with_owner]
    rows = np.zeros((len(order), TILE), np.int32)
    rows[:, : len(fields)] = np.stack(fields, axis=1)[order]
    _set_targets(rows, heads, tasks, sample[order], targets)
    entries[:, 9] = heads.entry[entries[:, 9]]  # replaces the task
    return WorkList(
        rows, entries.astype(np.int32), heads.numbers, _launches(tasks, launch[order], rows[:, 5])
    )


def _targets_of(done: KeyedRows, is_work: Ints, targets: Targets) -> KeyedRows:
    """The targets of complete work rows."""
    low = np.searchsorted(targets.row1, done.row0, "right")
    high = np.searchsorted(targets.row0, done.row1, "left")
    count = np.where(is_work == 1, high - low, 0)
    source = group_of(count)
    target = index_in_group(count) + low[source]
    return KeyedRows(
        done.key[source],
        np.maximum(targets.row0[target], done.row0[source]),
        np.minimum(targets.row1[target], done.row1[source]),
    )


def _set_targets(rows: Ints, heads: _Heads, tasks: _ListedTasks, sample: Ints, targets: Targets) -> None:
    """Fills in the targets of complete tiles. rows: int32 [tiles, TILE], in place; sample: int64 [tiles], a task of
    each."""
    complete = rows[:, 4] & COMPLETE > 0
    work = rows[:, 4] & 2 > 0
    home = np.flatnonzero(complete & ~work)
    rows[home, FIRST], rows[home, COLUMNS], rows[home, HEADS] = rows[home, 0], rows[home, 5], heads.in_order
    written = np.flatnonzero(complete & work)
    target = np.searchsorted(targets.row0, rows[written, 0], "right") - 1
    staged = targets.staged[target]
    rows[written, 4] += (STAGED * staged).astype(np.int32)
    rows[written, AT], rows[written, LSE] = targets.at[target], targets.lse[target]
    rows[written, FIRST] = targets.first[target] + rows[written, 0] - targets.row0[target]
    rows[written, COLUMNS] = targets.columns[target]
    rows[written, HEADS] = np.where(staged == 1, heads.in_order, heads.at_home[sample[written]])


class _ListedTasks:
    """The tasks of a list by role; all int64 [tasks] except `of_key`.

    start, stop: owner rows; low, high: walked rows; dmin, dmax: bounds of owner row - walked row; launch: index among
    the list's launches; key: the owner, its rows' shifts to `with_owner` and the launch; of_key: one task of each key.
    """

    def __init__(self, programs: ProgramSet, columns: Columns, roles: Roles) -> None:
        table, row = programs[roles.table], columns.row
        operand_of = {
            name: table[name].astype(np.int64)
            for name in (roles.owner, *roles.with_owner, roles.walked, *roles.with_walked)
        }
        self.roles, self.of = roles, operand_of
        owner, walked = operand_of[roles.owner], operand_of[roles.walked]
        self.start, self.stop = row[owner], row[owner] + columns.rows[owner]
        self.low, self.high = row[walked], row[walked] + columns.rows[walked]
        sign = -1 if roles.walked == "q" else 1
        bounds = [table[name].astype(np.int64) * sign for name in ("dmin", "dmax")[::sign]]
        self.dmin, self.dmax = (bound + row[owner] - row[walked] for bound in bounds)
        self.first = table["first"].astype(np.int64) & roles.first > 0
        self.with_owner = [row[operand_of[name]] - row[owner] for name in roles.with_owner]
        self.with_walked = [row[operand_of[name]] - row[walked] for name in roles.with_walked]
        self.spaces = _bits(columns.space[operand_of[name]] for name in (roles.owner, *roles.with_owner))
        self.walked_spaces = _bits(
            columns.space[operand_of[name]] for name in (roles.walked, *roles.with_walked)
        )
        op, count = (programs["instructions"].wide(name) for name in ("op", "count"))
        self.instruction = instruction_of(op, count, roles.table)
        signatures = [columns.signature[operand_of[name]] for name in (roles.owner, *roles.with_owner)]
        key = group(self.instruction, self.spaces, *signatures, *self.with_owner)
        slot = 2 * column_groups(self.instruction, signatures[0], columns.columns) + columns.space[owner]
        wave = waves(self.instruction, slot, self.start, self.stop, key)
        self.launch = group(self.instruction, wave)
        self.key = group(self.launch, key)
        self.of_key = np.zeros(int(self.key.max(initial=-1)) + 1, np.int64)
        self.of_key[self.key] = np.arange(len(key))


def group(*columns: Ints) -> Ints:
    """int64 [n]: the number of each row; equal rows have the same number, and numbers ascend from 0 in sorted order."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        distinct, number = np.unique(column, return_inverse=True)
        key = np.unique(key * len(distinct) + number, return_inverse=True)[1]
    return key


def _bits(columns: Iterable[Ints]) -> Ints:
    """int64 [n]: bit i is set if column i is 1."""
    shifted = np.stack([column.astype(np.int64) << i for i, column in enumerate(columns)])
    bits: Ints = np.bitwise_or.reduce(shifted, axis=0)
    return bits


def _entries(tasks: _ListedTasks, tiles: Tiles, block: int) -> tuple[Ints, Ints]:
    """(entries int64 [entries, ENTRY], with the task in place of heads; tile of each), without empty entries."""
    tile, task = tiles.of_entry, tiles.task
    row0, row1 = tiles.row0[tile], tiles.row1[tile]
    from_, to = np.maximum(row0, tasks.start[task]), np.minimum(row1, tasks.stop[task])
    dmin, dmax, low, high = tasks.dmin[task], tasks.dmax[task], tasks.low[task], tasks.high[task]
    start, stop = np.maximum(low, from_ - dmax), np.minimum(high, to - dmin)
    # walked rows that all rows of the tile see: none if the task covers only some of its rows
    all0, all1 = np.maximum(low, to - 1 - dmax), np.minimum(high, from_ - dmin + 1)
    all1 = np.where((from_ == row0) & (to == row1), all1, all0)
    full0 = np.minimum(start + -(-(np.maximum(all0, start) - start) // block) * block, stop)
    full1 = full0 + np.maximum(np.minimum(all1, stop) - full0, 0) // block * block
    clipped = [np.clip(bound, -_FAR, _FAR) for bound in (dmin, dmax)]
    walked_rows = [shift[task] for shift in tasks.with_walked]
    fields = [start, stop, full0, full1, *clipped, from_, to, tasks.walked_spaces[task], task, *walked_rows]
    rows = np.zeros((len(task), ENTRY), np.int64)
    rows[:, : len(fields)] = np.stack(fields, axis=1)
    nonempty = np.flatnonzero(stop > start)
    return rows[nonempty], tile[nonempty]


class _Heads:
    """Offsets of the head columns of tiles and entries in one list; lanes, tile, entry: int64 [tasks].

    tile: for each lane the columns in owner and each `with_owner`, four numbers. at_home: int64 [tasks], the owner's
    head of each lane; in_order: 0, 1, .... entry of attend and dq: the KV column of each lane. entry of dkdv: the range
    of each lane's query heads; a query head is its columns in `walked` and `with_walked`.
    """

    def __init__(self, columns: Columns, tasks: _ListedTasks) -> None:
        self._columns, self._numbers = columns, [0]
        roles, signature = tasks.roles, columns.signature
        owners = [signature[tasks.of[name]] for name in (roles.owner, *roles.with_owner)]
        walked = [signature[tasks.of[name]] for name in (roles.walked, *roles.with_walked)]
        self.tile = self._signature_offsets(owners, self._lanes)
        by_key = roles.walked == "q"
        self.entry = self._signature_offsets([owners[0], *walked], self._queries if by_key else self._keys)
        self.lanes = np.array([len(heads) for heads in columns.columns])[owners[0]]
        self.at_home = self._signature_offsets(owners[:1], lambda owner: list(columns.names[owner]))
        self.in_order = len(self._numbers)
        self._numbers += range(int(self.lanes.max(initial=0)))
        self.numbers = np.array(self._numbers, np.int32)

    def _signature_offsets(self, signatures: Sequence[Ints], numbers_of: Callable[..., list[int]]) -> Ints:
        """int64 [tasks]: the offset in `numbers` of what `numbers_of` returns for each task's signatures."""
        distinct, which = np.unique(np.stack(signatures, axis=1), axis=0, return_inverse=True)
        starts = np.zeros(len(distinct), np.int64)
        for i, row in enumerate(distinct.tolist()):
            starts[i] = len(self._numbers)
            self._numbers += numbers_of(*row)
        return starts[which]

    def _lanes(self, *signatures: int) -> list[int]:
        rows = zip(*(self._columns.columns[signature] for signature in signatures), strict=True)
        return [number for row in rows for number in (*row, 0, 0, 0)[:4]]

    def _keys(self, owner: int, kv: int) -> list[int]:
        return [self._columns.columns[kv][i] for i in self._columns.kv_of(owner, kv)]

    def _queries(self, owner: int, *queries: int) -> list[int]:
        lanes = len(self._columns.columns[owner])
        kv_of = self._columns.kv_of(queries[0], owner)
        rows = list(zip(*(self._columns.columns[query] for query in queries), strict=True))
        ends: list[int] = []
        heads: list[int] = []
        for lane in range(lanes):
            ends.append(len(self._numbers) + lanes + 1 + len(heads))
            heads += [number for i, row in enumerate(rows) if kv_of[i] == lane for number in row]
        return [*ends, len(self._numbers) + lanes + 1 + len(heads), *heads]


def _launches(tasks: _ListedTasks, launch: Ints, lanes: Ints) -> Mapping[int, tuple[Launch, ...]]:
    """Launches by instruction. launch: int64 [tiles], the launch number of each tile, ascending."""
    result: dict[int, tuple[Launch, ...]] = {}
    numbers, first, count = np.unique(launch, return_index=True, return_counts=True)
    instruction = np.zeros(int(tasks.launch.max(initial=-1)) + 1, np.int64)
    instruction[tasks.launch] = tasks.instruction
    for number, start, tiles in zip(numbers.tolist(), first.tolist(), count.tolist(), strict=True):
        entry = Launch(start, tiles, int(lanes[start : start + tiles].max()))
        result[int(instruction[number])] = (*result.get(int(instruction[number]), ()), entry)
    return result
