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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import FIRST_DKV, Op
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import FETCHED, KV_SIDE, RETURNED, SIDES, TRAVELLING, Side, Space, Tensor
from apportion.planner.inner.groups import HeadStages
from apportion.planner.lower.assemble import Assembler, Cell, ListPart, Operands, Ranges
from apportion.planner.lower.exchange import CHANNEL, Exchange, side_by_side
from apportion.planner.lower.inputs import Lowering
from apportion.planner.lower.programs import backward_core, forward_core
from apportion.planner.tasks.rows import whole_ranges

#: what `project` makes of X
MADE = (Tensor.Q, Tensor.KV)


def lower_stages(low: Lowering, exchange: Exchange, stages: HeadStages, phase: str) -> ProgramSet:
    """The programs of all ranks for one phase."""
    programs = _Programs(low, exchange, stages, phase)
    programs.run()
    return programs.asm.build(stages.columns(low.groups.ranks))


def _side(tensor: Tensor) -> Side:
    return "key" if tensor in KV_SIDE else "query"


@dataclass(frozen=True)
class _Views:
    """How stages see one side of the core. heads: int64 [stages, ranks], the set of each rank; turn: int64 [stages], of
    the arenas of attention rows the one that is the stage's, of `turns`; kept: int64 [ranks], attention rows."""

    heads: Ints
    turn: Ints
    turns: int
    kept: Ints

    def seen(self, stages: Ints, rank: Ints, ranges: Ranges) -> Ranges:
        """Ranges of the core, on ranks int64 [n], in some stages: [stages, n]. Tiles lie beyond all turns."""
        kept = self.kept[rank]
        turn: Ints = np.where(ranges.row < kept, self.turn[stages][:, None], self.turns - 1)
        rows = np.broadcast_to(ranges.rows, turn.shape)
        return Ranges.of(Space.WORK, ranges.row + turn * kept, rows, self.heads[stages][:, rank])

    def beyond(self, reach: Ints) -> Ints:
        """int64 [ranks]: the first work row beyond all turns and tiles; reach: of the core."""
        return np.maximum(reach, self.kept) + (self.turns - 1) * self.kept


class _Core:
    """Attention of one stage: steps and rows of every rank. kept: int64 [ranks], attention rows."""

    def __init__(self, low: Lowering, phase: str, kept: Ints) -> None:
        asm = Assembler(len(low.groups))
        (forward_core if phase == "forward" else backward_core)(asm, low)
        self.asm, self._kept = asm.spread(low.groups, low.sets), kept
        self._clears = np.array([step.op == Op.CLEAR for step in asm.steps])

    def rows(self, opens: bool, closes: bool, hold: bool) -> Iterator[tuple[str, ListPart]]:
        """The rows of the lists in a stage that opens a window of stages, or closes it, or both.

        Gradients of keys are added to those of the stages before. hold: so are those of keys in tiles, which come with
        the first stage and whose gradients go back after the last."""
        resting = {
            tensor for tensor, moves in ((Tensor.KV, opens), (Tensor.DKV, closes)) if hold and not moves
        }
        for table, part in self.asm.parts():
            if table in _MOVED and part.operand(table, _MOVED[table])[0] in resting:
                continue
            yield table, part if opens else self._added_to(table, part, hold)

    def _added_to(self, table: str, part: ListPart, hold: bool) -> ListPart:
        """The part without what clears or overwrites gradients that earlier stages have added up."""
        if table == "grads":
            *others, first = part.plain
            dkv = part.operand(table, "dkv")[1]
            kept = np.where(hold | (dkv.row < self._kept[part.rank]), FIRST_DKV, 0)
            return replace(part, plain=(*others, first & ~kept))
        if table == "rowops" and part.operand(table, "c")[0] == Tensor.DKV:
            kept = hold | (part.operand(table, "c")[1].row < self._kept[part.rank])
            return part.take(np.flatnonzero(~(self._clears[part.position] & kept)))
        return part


#: list -> the operand that says which rows travel, or have
_MOVED = {"transfers": "operand", "rowops": "a"}


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
    """Builds the programs of one phase. Ranges of the copies of the exchange are [stages, copies] for tensors of
    queries, [windows, copies] for those of keys."""

    def __init__(self, low: Lowering, exchange: Exchange, stages: HeadStages, phase: str) -> None:
        self.asm = Assembler(low.groups.ranks)
        self._low, self._exchange, self._stages, self._phase = low, exchange, stages, phase
        member = low.groups.member
        self._sets: dict[Side, Ints] = {"query": stages.query[:, member], "key": stages.key[:, member]}
        self._opens = np.flatnonzero([stages.opens(stage) for stage in range(len(stages))])
        self._closes = np.flatnonzero([stages.closes(stage) for stage in range(len(stages))])
        self._kept = low.kept[low.groups.of_rank]
        self._core, self._views = _Core(low, phase, self._kept), self._seen()
        self._owners = np.stack([_owners(exchange, sets) for sets in self._sets["key"]])
        self._own = self._owners == np.arange(len(exchange.piece))
        self._made = self._rows_made()

    def _seen(self) -> dict[Side, _Views]:
        stages, every, turns = self._stages, np.arange(len(self._stages)), 1 + self._stages.ahead
        of_query, of_key = min(turns, len(stages)), min(turns, stages.windows)
        same = [stages.window_like(window, of_key) for window in stages.window.tolist()]
        return {
            "query": _Views(self._sets["query"], every % of_query, of_query, self._kept),
            "key": _Views(self._sets["key"][same], stages.window % of_key, of_key, self._kept),
        }

    # rows

    def _rows_made(self) -> dict[Tensor, Ranges]:
        """Work rows at home for what is projected or added up there."""
        forward, project = self._phase == "forward", self._stages.project
        made = {*MADE, *(() if forward else (Tensor.DQ, Tensor.DKV))} if project else set()
        made |= {Tensor.DKV} if self._stages.shared and not forward else set()
        return {
            tensor: self._beyond(tensor)
            for side in SIDES
            for tensor in TRAVELLING[side, self._phase]
            if tensor in made
        }

    def _beyond(self, tensor: Tensor) -> Ranges:
        """Rows beyond all others, side by side, for the copies that need some in each stage; none for others."""
        side, exchange = _side(tensor), self._exchange
        base, sets = self._views[side].beyond(self._core.asm.reach(tensor)), self._sets[side]
        rank, rows = exchange.src, exchange.home_rows[1]
        packed = np.full((len(sets), len(rank)), -1)
        for window, found in enumerate(packed):
            some = exchange.moved
            if tensor == Tensor.KV:  # of projected heads, one copy for all ranks that share them
                some = some[self._own[window][some]]
            row = base[rank[some]] + side_by_side(rank[some], rows[some])
            found[some] = Ranges.of(Space.WORK, row, rows[some]).packed
        return Ranges(packed, sets[:, exchange.dst])

    def _attention(self, tensor: Tensor) -> Ranges:
        """Attention rows of the copies, where they are computed."""
        exchange, side = self._exchange, _side(tensor)
        stages = self._opens if side == "key" else np.arange(len(self._stages))
        return self._views[side].seen(stages, exchange.dst, exchange.in_attention[side])

    def _at_home(self, tensor: Tensor) -> Ranges:
        """What is sent from home to attention rows, or arrives from there."""
        if tensor not in self._made:
            return self._homes(tensor)
        stays, made = self._attention(tensor), self._made[tensor]
        kept = self._exchange.src == self._exchange.dst
        found = Ranges(*(np.where(kept, *pair) for pair in zip(stays, made, strict=True)))
        return self._of_owners(found) if tensor == Tensor.KV else found

    def _homes(self, tensor: Tensor) -> Ranges:
        """Home rows."""
        heads = self._sets[_side(tensor)][:, self._exchange.dst]
        row, rows = (np.broadcast_to(column, heads.shape) for column in self._exchange.home_rows)
        return Ranges.of(Space.HOME, row, rows, heads)

    def _of_owners(self, ranges: Ranges) -> Ranges:
        return ranges.each(lambda column: np.take_along_axis(column, self._owners, 1))

    # programs

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
        (rank, row, rows), at = whole_ranges(self._low.home), self.asm.step(op)
        whole = Ranges.of(Space.HOME, row, rows)
        columns = {column: Operands(tensor, whole) for column, tensor in tensors.items()}
        self.asm.rows("rowops", rank, at, **columns)

    def _attend(self, script: _Script) -> None:
        """The core, once a stage."""
        stages, backward = self._stages, self._phase == "backward"
        opens, closes = np.zeros((2, len(stages)), bool)
        opens[self._opens], closes[self._closes] = True, True
        kinds = 2 * opens + closes if backward or stages.hold else np.full(len(stages), 3)
        for kind in np.unique(kinds).tolist():
            chosen = np.flatnonzero(kinds == kind)
            for table, part in self._core.rows(kind >= 2, kind % 2 == 1, stages.hold):
                self.asm.add(table, self._in_stages(part, chosen, script.attend[chosen][:, None]))

    def _in_stages(self, part: ListPart, stages: Ints, first: Ints) -> ListPart:
        """A part of the core in some stages; first: int64 [stages, 1], where the steps of each begin."""
        ranges = (
            self._views[_side(tensor)].seen(stages, part.rank, held)
            for held, tensor in zip(part.ranges, part.tensors(), strict=True)
        )
        shape = len(stages), len(part)
        return ListPart(
            _flat(part.rank, shape),
            _flat(part.position + first, shape),
            tuple(column if isinstance(column, int) else _flat(column, shape) for column in part.plain),
            part.named,
            tuple(held.each(np.ravel) for held in ranges),
        )

    def _exchanges(self, script: _Script) -> None:
        """All that comes in and leaves, stage after stage; of keys, in the first and after the last of a window."""
        every = np.arange(len(self._stages))
        coming, leaving = (
            [t for side in SIDES for t in way[side, self._phase]] for way in (FETCHED, RETURNED)
        )
        for tensor in coming:
            stages = self._opens if tensor in KV_SIDE else every
            self._move(tensor, script.coming[stages], script.brought[stages], True)
        for tensor in leaving:
            stages = self._closes if tensor in KV_SIDE else every
            self._move(tensor, script.going[stages], script.left[stages], False)

    def _move(self, tensor: Tensor, launches: Ints, copy: Ints, inward: bool) -> None:
        """Transfers between ranks, and copies where both are one, unless rows are made or used up where they are."""
        exchange, moved, kept = self._exchange, self._exchange.moved, self._exchange.kept
        ways = (exchange.src, self._at_home(tensor)), (exchange.dst, self._attention(tensor))
        (src, out), (dst, into) = ways if inward else ways[::-1]
        at = launches[:, exchange.slots.round] if len(moved) else launches[:, :0]
        sent, arriving = (Operands(tensor, _columns(held, moved)) for held in (out, into))
        self._add_rows("transfers", src[moved], at, send=1, peer=dst[moved], operand=sent)
        self._add_rows("transfers", dst[moved], at, send=0, peer=src[moved], operand=arriving)
        if tensor not in self._made:
            stays, comes = (Operands(tensor, _columns(held, kept)) for held in (out, into))
            self._add_rows("rowops", src[kept], copy[:, None], a=stays, c=comes, first=1)

    def _project(self, script: _Script) -> None:
        """The heads of every rank of the group, of all pieces at home; KV heads where a window of stages begins."""
        keys, q, x = self._owned(Tensor.KV, self._opens), self._at_home(Tensor.Q), self._pieces()
        operands = {"a": Operands(Tensor.X, x), "b": Operands(Tensor.Q, q), "c": Operands(Tensor.KV, keys)}
        self._add_rows("rowops", self._exchange.src, script.project[:, None], **operands)
        if self._phase == "backward":
            self._push_back(script, x)

    def _push_back(self, script: _Script, x: Ranges) -> None:
        """Gradients of each stage's heads into those of X; those of KV heads, added up before, after a window."""
        exchange = self._exchange
        first = np.zeros((len(self._stages), len(exchange.piece)), np.int32)
        first[0, np.unique(exchange.piece, return_index=True)[1]] = 1
        ranges = {
            "a": (Tensor.X, x),
            "b": (Tensor.DQ, self._at_home(Tensor.DQ)),
            "c": (Tensor.DKV, self._owned(Tensor.DKV, self._closes)),
            "d": (Tensor.DX, x),
        }
        operands = {column: Operands(*operand) for column, operand in ranges.items()}
        self._add_rows("rowops", exchange.src, script.pushed[:, None], **operands, first=first)

    def _owned(self, tensor: Tensor, stages: Ints) -> Ranges:
        """[stages, copies]: a tensor of keys in some stages, of copies that own its heads; none in others."""
        found = self._at_home(tensor)
        packed = np.full((len(self._stages), len(self._exchange.piece)), -1)
        heads = np.zeros_like(packed)
        packed[stages], heads[stages] = np.where(self._own, found.packed, -1), found.heads
        return Ranges(packed, heads)

    def _pieces(self) -> Ranges:
        """[stages, copies]: home rows of tensors without heads."""
        shape = len(self._stages), len(self._exchange.piece)
        row, rows = (np.broadcast_to(column, shape) for column in self._exchange.home_rows)
        return Ranges.of(Space.HOME, row, rows)

    def _gather(self, script: _Script) -> None:
        """Adds up gradients of KV heads that ranks share: at home, or, to be pushed back, in the rows of one."""
        if Tensor.DKV not in self._made:
            return
        partial, project = self._at_home(Tensor.DKV), self._stages.project
        into = self._of_owners(partial) if project else self._homes(Tensor.DKV)
        window, copy = np.nonzero(~self._own if project else np.ones_like(self._own))
        sums, whole = (
            Operands(Tensor.DKV, held.each(lambda column: column[window, copy])) for held in (partial, into)
        )
        at = script.added[self._closes][window]
        self.asm.rows("rowops", self._exchange.src[copy], at, a=sums, c=whole)

    def _add_rows(self, table: str, rank: Ints, at: Ints, **columns: Cell) -> None:
        """Rows of several stages: at int64 [stages, rows] or [stages, 1]; columns [stages, rows] or [rows]."""
        shape = len(at), len(rank)
        flat = {name: _flat_cell(cell, shape) for name, cell in columns.items()}
        self.asm.rows(table, _flat(rank, shape), _flat(at, shape), **flat)


def _columns(ranges: Ranges, index: Ints) -> Ranges:
    """Some of the copies, in all stages."""
    return ranges.each(lambda column: column[:, index])


def _flat(column: Ints, shape: tuple[int, int]) -> Ints:
    return np.ascontiguousarray(np.broadcast_to(column, shape).reshape(-1))


def _flat_cell(cell: Cell, shape: tuple[int, int]) -> Cell:
    if isinstance(cell, int):
        return cell
    if not isinstance(cell, Operands):
        return _flat(cell, shape)
    return Operands(cell.tensor, cell.ranges.each(lambda column: _flat(column, shape)))


def _owners(exchange: Exchange, sets: Ints) -> Ints:
    """int64 [copies]: of the copies of one piece with the same heads, the one whose rows all use at home: that which
    stays there, else the first."""
    key = exchange.piece * (int(sets.max()) + 1) + sets[exchange.dst]
    order = np.lexsort((exchange.src != exchange.dst, key))
    fresh = np.append(True, key[order][1:] != key[order][:-1])[: len(order)]
    owner = np.empty(len(order), np.int64)
    owner[order] = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    return owner
