"""Programs of head stages: one lowering of a group's attention, placed once a stage, and the exchanges around it.

    forward    in 0 | attend 0 | out 0, in 1 | attend 1 | out 1, in 2 | ..  | finish
    backward   delta | in 0 | grads 0 | out 0, in 1 | grads 1 | ..

Rows are those of Ulysses: work rows in attention order hold the heads of one stage, then those of the next (UPipe,
section 3.3). KV rows stay for the stages of their window, and so do their gradients, which leave after its last stage.
With `ahead` there are two arenas in turn: a stage comes in while the one before it is computed. With `hold` KV tiles of
other groups stay for the stages of a window too; else every stage brings its own, as ring attention does for its heads.

Where the program projects, a home rank makes the heads of each rank of the group in work rows beyond the attention
rows, from where they are sent; its own, and KV heads that it shares, in their place. Gradients return to such rows
and are pushed back through the projection, stage after stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import (
    FETCHED,
    FIRST_DKV,
    KV_SIDE,
    OPERAND_COLUMNS,
    RETURNED,
    SIDES,
    TABLES,
    TRAVELLING,
    Op,
    Space,
    Tensor,
)
from apportion.ir.plan import ProgramSet
from apportion.ir.sorting import sort_order
from apportion.planner.passes.assemble import (
    Assembler,
    Column,
    OperandRows,
    Operands,
    Part,
    Ranges,
    range_set,
)
from apportion.planner.passes.exchange import CHANNEL, Exchange, side_by_side
from apportion.planner.passes.groups import HeadStages
from apportion.planner.passes.lower import backward_core, forward_core
from apportion.planner.passes.lowering import PIECES, Lowering
from apportion.planner.passes.rows import whole_ranges

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

#: what `project` makes of X
MADE = (Tensor.Q, Tensor.KV)


def lower_stages(low: Lowering, exchange: Exchange, stages: HeadStages, phase: str) -> ProgramSet:
    """The programs of all ranks for one phase."""
    programs = _Programs(low, exchange, stages, phase)
    programs.run()
    return programs.asm.build(programs.ops, stages.columns(low.groups.ranks))


@dataclass(frozen=True)
class _View:
    """How a stage sees one side of the core: heads int64 [ranks], the set of each rank; the attention rows are those of
    arena `turn` of `turns`. name: equal for equal views."""

    name: Hashable
    heads: Ints
    turn: int
    turns: int


@dataclass(frozen=True)
class _Block:
    """Operands of one tensor, by rank. index: of each in its rank's part of the block; at: among all of the core;
    kept: attention rows of its rank; attention: whether it has some of these, and not rows of tiles."""

    held: OperandRows
    per_rank: Ints
    index: Ints
    at: Ints
    kept: Ints
    attention: Bools

    def seen(self, view: _View) -> OperandRows:
        """The same for one stage."""
        ranges, heads = self.held.ranges, np.repeat(view.heads, self.per_rank)
        if view.turns > 1:  # tiles lie beyond all turns
            turn: Ints = np.where(self.attention, view.turn, view.turns - 1)
            ranges = replace(ranges, row=ranges.row + turn * self.kept)
        return replace(self.held, ranges=replace(ranges, heads=heads))


class _Core:
    """Attention of one stage: steps and operands of every rank, without heads."""

    def __init__(self, low: Lowering, phase: str) -> None:
        asm, ops = Assembler(len(low.groups)), Operands(len(low.groups))
        self.numbers = (forward_core if phase == "forward" else backward_core)(asm, ops, low)
        self.asm, self._ops = asm.spread(low.groups), ops.spread(low.groups, low.sets)
        self.start = np.concatenate([[0], np.cumsum(self._ops.counts)])  # each rank's operands among all
        self._kept = low.kept[low.groups.of_rank]
        self._blocks = [self._block(held, first) for held, first in self._ops.blocks()]

    def _block(self, held: OperandRows, first: Ints) -> _Block:
        order = sort_order(held.ranges.rank, self._ops.ranks)
        columns = (held.ranges.rank, held.ranges.row, held.ranges.rows)
        rank, row, rows = (np.take(column, order).astype(np.int32, copy=False) for column in columns)
        per_rank = np.bincount(rank, minlength=self._ops.ranks)
        index = np.arange(len(rank)) - np.repeat(np.cumsum(per_rank) - per_rank, per_rank)
        kept = np.repeat(self._kept, per_rank).astype(np.int32)
        at = index + np.repeat(self.start[:-1] + first, per_rank)
        return _Block(replace(held, ranges=Ranges(rank, row, rows)), per_rank, index, at, kept, row < kept)

    def place(self, ops: Operands, views: Sequence[tuple[_View, _View]]) -> Ints:
        """Adds the operands of all stages, as queries and as keys see them; their numbers, int32 [stages, operands]."""
        moved, added = np.zeros((len(views), int(self.start[-1])), np.int32), {}
        for stage, pair in enumerate(views):
            for number, block in enumerate(self._blocks):
                view = pair[block.held.tensor in KV_SIDE]
                if (number, view.name) not in added:
                    added[number, view.name] = ops.add(block.seen(view), block.per_rank)
                first = np.repeat(added[number, view.name], block.per_rank)
                moved[stage, block.at] = block.index + first
        return moved

    def rows(self, opens: bool, closes: bool, hold: bool) -> Iterator[tuple[str, Part]]:
        """The rows of the lists in a stage that opens a window of stages, or closes it, or both.

        Gradients of keys are added to those of the stages before. hold: so are those of keys in tiles, which come with
        the first stage and whose gradients go back after the last."""
        kept = None if opens else self._marked((Tensor.DKV,), tiles=hold)
        fetched, due = () if opens else (Tensor.KV,), () if closes else (Tensor.DKV,)
        still = self._marked(fetched + due) if hold and fetched + due else None
        for table, part in self.asm.parts():
            part = part if kept is None else self._added_to(table, part, kept)
            yield table, part if still is None else self._resting(table, part, still)

    def _marked(self, tensors: Sequence[Tensor], tiles: bool = True) -> Bools:
        """bool [operands]: those of some tensors, in attention rows and, where wanted, in rows of tiles."""
        found = np.zeros(int(self.start[-1]), bool)
        for block in self._blocks:
            if block.held.tensor in tensors:
                found[block.at] = block.attention | tiles
        return found

    def _added_to(self, table: str, part: Part, kept: Bools) -> Part:
        """The part without what clears or overwrites operands that are `kept`."""
        rank, position, columns = part
        if table == "grads":
            *others, first = columns
            dkv = self.start[rank] + columns[TABLES[table].index("dkv")]
            return rank, position, (*others, first & ~np.where(kept[dkv], FIRST_DKV, 0))
        if table == "rowops":
            clears = np.array([step.op == Op.CLEAR for step in self.asm.steps])[position]
            return _without(part, clears & kept[self.start[rank] + columns[TABLES[table].index("c")]])
        return part

    def _resting(self, table: str, part: Part, still: Bools) -> Part:
        """The part without transfers and additions of operands that are `still`."""
        rank, _, columns = part
        if table in ("tasks", "grads"):
            return part
        moved = columns[TABLES[table].index("operand" if table == "transfers" else "a")]
        return _without(part, still[self.start[rank] + moved])


def _without(part: Part, dropped: Bools) -> Part:
    rank, position, columns = part
    left = np.flatnonzero(~dropped)
    taken = (value if isinstance(value, int) else value[left] for value in columns)
    return rank[left], position[left], tuple(taken)


class _Script:
    """The steps of one phase, and where those of each stage stand: int64 [stages]; launches int64 [stages, rounds]."""

    def __init__(
        self, asm: Assembler, core: Assembler, exchange: Exchange, stages: HeadStages, results: int
    ) -> None:
        self._asm, self._core, self._exchange, self._stages = asm, core, exchange, stages
        self._results = results
        # beside tiles that are under way at the same time
        self._channel = 1 + max(step.channel for step in core.steps) if stages.ahead else CHANNEL
        self.project, self.brought, self.attend, self.left, self.added, self.pushed = (
            np.zeros(len(stages), np.int64) for _ in range(6)
        )
        self.coming, self.going = (np.zeros((len(stages), exchange.slots.rounds), np.int64) for _ in range(2))

    def append(self) -> None:
        """All stages. With `ahead` one comes in, and one before it leaves, while a stage is computed."""
        stages, ahead = len(self._stages), self._stages.ahead
        self._bring(0)
        for stage in range(stages):
            self._wait(self.coming[stage])
            if ahead and stage + 1 < stages:
                self._bring(stage + 1)
            self.attend[stage] = self._asm.append(self._core)
            if ahead and stage:
                self._close(stage - 1)
            self.going[stage] = self._launch(self._results)
            self.left[stage] = self._asm.step(Op.DELIVER if self._results else Op.COPY)
            if not ahead and stage + 1 < stages:
                self._bring(stage + 1)
            if not ahead or stage + 1 == stages:
                self._close(stage)

    def _bring(self, stage: int) -> None:
        self.project[stage] = self._asm.step(Op.PROJECT)
        self.coming[stage] = self._launch()
        self.brought[stage] = self._asm.step(Op.COPY)

    def _close(self, stage: int) -> None:
        self._wait(self.going[stage])
        self.added[stage] = self._asm.step(Op.ADD)
        self.pushed[stage] = self._asm.step(Op.PROJECT_GRAD)

    def _launch(self, results: int = 0) -> list[int]:
        rounds = range(self._exchange.slots.rounds)
        return [self._asm.launch(self._channel, self._exchange.mode | results) for _ in rounds]

    def _wait(self, launches: Ints) -> None:
        for launch in launches.tolist():
            self._asm.wait(launch)


class _Programs:
    """Builds the programs of one phase. Operands of the copies of the exchange are int32 [stages, copies] for tensors
    of queries, [windows, copies] for those of keys."""

    def __init__(self, low: Lowering, exchange: Exchange, stages: HeadStages, phase: str) -> None:
        self.asm, self.ops = Assembler(low.groups.ranks), Operands(low.groups.ranks)
        self._low, self._exchange, self._stages, self._phase = low, exchange, stages, phase
        member = low.groups.member
        self._query_sets, self._key_sets = stages.query[:, member], stages.key[:, member]
        self._opens = np.flatnonzero([stages.opens(stage) for stage in range(len(stages))])
        self._closes = np.flatnonzero([stages.closes(stage) for stage in range(len(stages))])
        self._core = _Core(low, phase)
        self._placed = self._core.place(self.ops, [self._views(stage) for stage in range(len(stages))])
        self._rows = _Rows(self.ops, exchange)
        self._owners = np.stack([_owners(exchange, sets) for sets in self._key_sets])
        self._own = self._owners == np.arange(len(exchange.piece))
        self._homes: dict[Tensor, Ints] = {}
        self._staged: dict[Tensor, Ints] = {}
        self._number()

    def _views(self, stage: int) -> tuple[_View, _View]:
        stages = self._stages
        window, turns = int(stages.window[stage]), 1 + stages.ahead
        of_query, of_key = min(turns, len(stages)), min(turns, stages.windows)
        same = stages.window_like(window, of_key)
        return (
            _View(("query", stage), self._query_sets[stage], stage % of_query, of_query),
            _View(("key", same), self._key_sets[same], window % of_key, of_key),
        )

    # operands

    def _number(self) -> None:
        """Numbers the rows at home and those for what is projected or added up there."""
        forward, project = self._phase == "forward", self._stages.project
        back = () if forward else (Tensor.DQ, Tensor.DKV)
        of_query, of_key = (set(TRAVELLING[side, self._phase]) for side in SIDES)
        away = {*MADE, *back} if project else set()
        staged = away | ({Tensor.DKV} & set(back) if self._stages.shared else set())
        for tensors, sets in ((of_query, self._query_sets), (of_key, self._key_sets)):
            self._homes |= self._rows.at_home(tuple(sorted(tensors - away)), sets)
            for tensor in sorted(tensors & staged):
                moved = [self._sent(tensor, index) for index in range(len(sets))]
                self._staged[tensor] = self._rows.staged(tensor, moved, sets)

    def _sent(self, tensor: Tensor, window: int) -> Ints:
        """Copies that need rows of their own at home: of projected KV heads, one for all ranks that share them."""
        moved = self._exchange.moved
        return moved if tensor != Tensor.KV else moved[self._own[window][moved]]

    def _attention(self, tensor: Tensor) -> Ints:
        """Attention rows of the copies, where they are computed."""
        own = self._core.numbers[tensor][PIECES][self._exchange.piece]
        stages = self._opens if tensor in KV_SIDE else slice(None)
        return self._placed[stages][:, self._core.start[self._exchange.dst] + own]

    def _at_home(self, tensor: Tensor) -> Ints:
        """What is sent from home to attention rows, or arrives from there."""
        if tensor not in self._staged:
            return self._homes[tensor]
        kept = self._exchange.src == self._exchange.dst
        found = np.where(kept, self._attention(tensor), self._staged[tensor])
        return np.take_along_axis(found, self._owners, 1) if tensor == Tensor.KV else found

    # rows

    def run(self) -> None:
        """The whole program."""
        forward, stages = self._phase == "forward", self._stages
        if not forward:
            self._whole(Op.DELTA, a=Tensor.DO, b=Tensor.O, c=Tensor.DELTA)
        if not forward and stages.shared and not stages.project:
            self._whole(Op.CLEAR, c=Tensor.DKV)
        results = self._exchange.results(self._phase)
        script = _Script(self.asm, self._core.asm, self._exchange, stages, results)
        script.append()
        if forward:
            self._whole(Op.FINISH, c=Tensor.O)
        self._exchanges(script)
        self._attend(script)
        if stages.project:
            self._project(script)
        if not forward:
            self._gather(script)

    def _whole(self, op: Op, **tensors: Tensor) -> None:
        """An op on all home rows of each rank."""
        whole, at = whole_ranges(self._low.home), self.asm.step(op)
        numbers = self.ops.number(tuple(tensors.values()), Space.HOME, range_set(whole))
        of = dict(zip(tensors, (n[0] for n in numbers), strict=True))
        self.asm.rows("rowops", whole[0], at, *(of.get(column, 0) for column in "abc"), 0, 0)

    def _attend(self, script: _Script) -> None:
        """The core, once a stage."""
        stages, backward = self._stages, self._phase == "backward"
        opens, closes = np.zeros((2, len(stages)), bool)
        opens[self._opens], closes[self._closes] = True, True
        kinds = 2 * opens + closes if backward or stages.hold else np.full(len(stages), 3)
        for kind in np.unique(kinds).tolist():
            chosen = np.flatnonzero(kinds == kind)
            placed, first = self._placed[chosen], script.attend[chosen][:, None]
            for table, (rank, position, columns) in self._core.rows(kind >= 2, kind % 2 == 1, stages.hold):
                base = self._core.start[rank]
                moved = (
                    placed[:, base + value]
                    if name in OPERAND_COLUMNS[table] and not isinstance(value, int)
                    else value
                    for name, value in zip(TABLES[table], columns, strict=True)
                )
                self._add_rows(table, rank, position + first, *moved)

    def _exchanges(self, script: _Script) -> None:
        """All that comes in and leaves, stage after stage; of keys, in the first and after the last of a window."""
        src, dst, every = self._exchange.src, self._exchange.dst, np.arange(len(self._stages))
        coming, leaving = (
            [t for side in SIDES for t in way[side, self._phase]] for way in (FETCHED, RETURNED)
        )
        for tensor in coming:
            stages = self._opens if tensor in KV_SIDE else every
            given, taken = (src, self._at_home(tensor)), (dst, self._attention(tensor))
            self._move(tensor, script.coming[stages], script.brought[stages], given, taken)
        for tensor in leaving:
            stages = self._closes if tensor in KV_SIDE else every
            given, taken = (dst, self._attention(tensor)), (src, self._at_home(tensor))
            self._move(tensor, script.going[stages], script.left[stages], given, taken)

    def _move(
        self,
        tensor: Tensor,
        launches: Ints,
        copy: Ints,
        given: tuple[Ints, Ints],
        taken: tuple[Ints, Ints],
    ) -> None:
        """Transfers between ranks, and copies where both are one, unless rows are made or used up where they are."""
        moved, kept = self._exchange.moved, self._exchange.kept
        (src, out), (dst, into) = given, taken
        at = launches[:, self._exchange.slots.round] if len(moved) else out[:, moved]
        self._add_rows("transfers", src[moved], at, 1, dst[moved], out[:, moved])
        self._add_rows("transfers", dst[moved], at, 0, src[moved], into[:, moved])
        if tensor not in self._staged:
            self._add_rows("rowops", src[kept], copy[:, None], out[:, kept], 0, into[:, kept], 0, 1)

    def _project(self, script: _Script) -> None:
        """The heads of every rank of the group, of all pieces at home; KV heads where a window of stages begins."""
        keys = np.zeros((len(self._stages), len(self._exchange.piece)), np.int32)
        keys[self._opens] = np.where(self._own, self._at_home(Tensor.KV), 0)
        x = self._rows.pieces(Tensor.X)[self._exchange.piece]
        q, at = self._at_home(Tensor.Q), script.project[:, None]
        self._add_rows("rowops", self._exchange.src, at, x, q, keys, 0, 0)
        if self._phase == "backward":
            self._push_back(script, x)

    def _push_back(self, script: _Script, x: Ints) -> None:
        """Gradients of each stage's heads into those of X; those of KV heads, added up before, after a window."""
        exchange = self._exchange
        keys, first = np.zeros((2, len(self._stages), len(exchange.piece)), np.int32)
        keys[self._closes] = np.where(self._own, self._at_home(Tensor.DKV), 0)
        first[0, np.unique(exchange.piece, return_index=True)[1]] = 1
        dx, dq = self._rows.pieces(Tensor.DX)[exchange.piece], self._at_home(Tensor.DQ)
        self._add_rows("rowops", exchange.src, script.pushed[:, None], x, dq, keys, dx, first)

    def _gather(self, script: _Script) -> None:
        """Adds up gradients of KV heads that ranks share: at home, or, to be pushed back, in the rows of one."""
        if Tensor.DKV not in self._staged:
            return
        partial = self._at_home(Tensor.DKV)
        if self._stages.project:
            window, copy = np.nonzero(~self._own)
            into = np.take_along_axis(partial, self._owners, 1)
        else:
            window, copy = np.nonzero(np.ones_like(self._own))
            into = self._homes[Tensor.DKV]
        at = script.added[self._closes][window]
        numbers = partial[window, copy], into[window, copy]
        self.asm.rows("rowops", self._exchange.src[copy], at, numbers[0], 0, numbers[1], 0, 0)

    def _add_rows(self, table: str, rank: Ints, at: Ints, *columns: Column) -> None:
        """Rows of several stages: at int64 [stages, rows] or [stages, 1]; columns [stages, rows] or [rows]."""
        shape = (len(at), len(rank))
        flat = [v if isinstance(v, int) else np.broadcast_to(v, shape).reshape(-1) for v in columns]
        self.asm.rows(table, np.tile(rank, len(at)), np.broadcast_to(at, shape).reshape(-1), *flat)


@dataclass(frozen=True)
class _Rows:
    """Numbers the operands of the copies on their home ranks."""

    ops: Operands
    exchange: Exchange

    @property
    def _home(self) -> tuple[Ints, Ints, Ints]:
        pieces, piece = self.exchange.pieces, self.exchange.piece
        return self.exchange.src, pieces.src_row[piece], pieces.rows[piece]

    def pieces(self, tensor: Tensor) -> Ints:
        """int32 [pieces]: home rows of a tensor without heads."""
        pieces = self.exchange.pieces
        (numbers,) = self.ops.number(
            (tensor,), Space.HOME, range_set((pieces.src, pieces.src_row, pieces.rows))
        )
        return numbers[0]

    def at_home(self, tensors: Sequence[Tensor], sets: Ints) -> dict[Tensor, Ints]:
        """Home rows of the copies, int32 [stages, copies], for sets int64 [stages, ranks], the heads of every rank."""
        if not tensors:
            return {}
        found = range_set(*[self._home] * len(sets), heads=[held[self.exchange.dst] for held in sets])
        numbers = self.ops.number(tensors, Space.HOME, found)
        index = np.stack(found.index)
        return {tensor: of.numbers[index] for tensor, of in zip(tensors, numbers, strict=True)}

    def staged(self, tensor: Tensor, copies: Sequence[Ints], sets: Ints) -> Ints:
        """Work rows beyond all others, side by side, for some of the copies of each stage; int32 [stages, copies], 0
        for others."""
        rank, _, rows = self._home
        base = self.ops.reach(tensor).copy()
        requests = [(rank[c], base[rank[c]] + side_by_side(rank[c], rows[c]), rows[c]) for c in copies]
        heads = [held[self.exchange.dst[c]] for held, c in zip(sets, copies, strict=True)]
        (numbers,) = self.ops.number((tensor,), Space.WORK, range_set(*requests, heads=heads))
        found = np.zeros((len(copies), len(rank)), np.int32)
        for index, chosen in enumerate(copies):
            found[index, chosen] = numbers[index]
        return found


def _owners(exchange: Exchange, sets: Ints) -> Ints:
    """int64 [copies]: of the copies of one piece with the same heads, the one whose rows all use at home: that which
    stays there, else the first."""
    key = exchange.piece * (int(sets.max()) + 1) + sets[exchange.dst]
    order = np.lexsort((exchange.src != exchange.dst, key))
    fresh = np.append(True, key[order][1:] != key[order][:-1])[: len(order)]
    owner = np.empty(len(order), np.int64)
    owner[order] = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    return owner
