"""Programs that bring rows to where tasks run, forward and backward, with or without an exchange around them.

    forward    [in]         F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..         [out]  finish
    backward   delta  [in]  F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..     [out]

F: rounds that fetch tiles: KV rows, and where queries travel Q (backward also dO and delta) rows. R: rounds that return
what tasks add up for rows of others, the reverse of F (on a ring: on with the tile): gradients, and where queries
travel the results of the forward, partial or complete. The transfers of a round overlap the tasks of the rounds before
it.

Everything between the exchanges is lowered for groups of ranks and then spread over the members of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import FIRST_DKV, FIRST_DQ, Op
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import FETCHED, KV_SIDE, RETURNED, SIDES, Space, Tensor
from apportion.planner.lower.assemble import Assembler, Operands, Ranges
from apportion.planner.lower.exchange import (
    Exchange,
    ExchangeSteps,
    bring_in,
    launch_other,
    reserve,
    take_out,
    take_out_shared,
)
from apportion.planner.lower.inputs import Lowering
from apportion.planner.lower.order import Between, Fetches, Returns, append_steps
from apportion.planner.lower.sides import Side
from apportion.planner.tasks.rows import allot, whole_ranges

#: list of tasks -> the tensor of each of its operands
TASK_TENSORS = {
    op.rule.list: {argument.column: argument.tensors[0] for argument in op.rule.arguments}
    for op in (Op.ATTEND, Op.ATTEND_GRAD)
}


def lower_forward(low: Lowering) -> ProgramSet:
    """The forward programs of all ranks."""
    asm, exchange = Assembler(low.rows.ranks), low.exchange
    come = reserve(asm, exchange, Op.ATTEND, _channel(low), parts=_parts(low, "forward"))
    ahead = _Ahead(asm, low, come, "forward")
    forward_core(asm, low, ahead)
    leave, finish = ahead.leave(), asm.step(Op.FINISH)
    asm = spread(asm, low)
    if exchange is not None and come is not None and leave is not None:
        late, early, _ = _apart(exchange)
        _bring_in(asm, exchange, come, late, "forward")
        take_out(asm, exchange, leave, Tensor.O, early)
        if low.beside is not None:
            alone = low.beside.alone
            _clear(asm, come.clear, alone.queries, Tensor.O, Space.HOME)
            _attend(asm, alone, low.beside.steps(come.attend, leave.attend), _alone(alone))
    rank, row, rows = whole_ranges(low.home)
    asm.rows("rowops", rank, finish, c=Operands(Tensor.O, Ranges.of(Space.HOME, row, rows)))
    return asm.build(low.sets)


def lower_backward(low: Lowering) -> ProgramSet:
    """The backward programs of all ranks."""
    asm, exchange = Assembler(low.rows.ranks), low.exchange
    delta = asm.step(Op.DELTA)
    come = reserve(asm, exchange, Op.ATTEND_GRAD, _channel(low), parts=_parts(low, "backward"))
    ahead = _Ahead(asm, low, come, "backward")
    backward_core(asm, low, ahead)
    leave = ahead.leave()
    asm = spread(asm, low)
    if exchange is not None and come is not None and leave is not None:
        late, early, early_keys = _apart(exchange)
        _bring_in(asm, exchange, come, late, "backward")
        take_out(asm, exchange, leave, Tensor.DQ, early)
        take_out_shared(asm, exchange, leave, Tensor.DKV, early_keys)
        if low.beside is not None:
            alone = low.beside.alone
            _clear(asm, come.clear, alone.queries, Tensor.DQ, Space.HOME)
            _clear(asm, come.clear, alone.keys, Tensor.DKV, Space.HOME)
            _attend_grad(asm, alone, low.beside.steps(come.attend, leave.attend), _alone(alone))
    rank, row, rows = whole_ranges(low.home)
    whole = Ranges.of(Space.HOME, row, rows)
    o, do, statistics = (Operands(tensor, whole) for tensor in (Tensor.O, Tensor.DO, Tensor.DELTA))
    asm.rows("rowops", rank, delta, a=do, b=o, c=statistics)  # O is needed for nothing else and never travels
    return asm.build(low.sets)


def _parts(low: Lowering, phase: str) -> int:
    """In how many parts tensors come in."""
    split = low.exchange is not None and low.exchange.direct
    return sum(len(FETCHED[side, phase]) for side in SIDES) if split else 1


def _bring_in(
    asm: Assembler, exchange: Exchange, come: ExchangeSteps, late: Bools | None, phase: str
) -> None:
    """All tensors, each in its part. Queries may be late."""
    fetched = [(tensor, side) for side in SIDES for tensor in FETCHED[side, phase]]
    for number, (tensor, side) in enumerate(fetched):
        part = number if exchange.direct else 0
        bring_in(asm, exchange, come, tensor, late if side == "query" else None, part)


class _Ahead:
    """Waits for the late part of what comes in, and launches the early part of what goes out."""

    def __init__(self, asm: Assembler, low: Lowering, come: ExchangeSteps | None, phase: str) -> None:
        self._asm, self._low, self._come, self._early = asm, low, come, -1
        self._attend = Op.ATTEND if phase == "forward" else Op.ATTEND_GRAD
        self._results = 0 if low.exchange is None else low.exchange.results(phase)

    def first(self) -> None:
        if self._come is not None and self._come.other >= 0:
            self._asm.wait(self._come.other)

    def last(self) -> None:
        self._early = launch_other(self._asm, self._low.exchange, _channel(self._low), self._results)

    def leave(self) -> ExchangeSteps | None:
        """Append the steps of the way out."""
        return reserve(
            self._asm, self._low.exchange, self._attend, launched=self._early, results=self._results
        )


def _channel(low: Lowering) -> int:
    """Beside those of the rounds that fetch, and of those that return."""
    return 2 * (1 + int(low.schedule.channel.max(initial=0)))


def _apart(exchange: Exchange) -> tuple[Bools | None, Bools | None, Bools | None]:
    turns = exchange.turns
    return (None, None, None) if turns is None else (turns.late, turns.early, turns.early_keys)


def spread(asm: Assembler, low: Lowering) -> Assembler:
    """What groups do, done by each of their members."""
    return asm.spread(low.groups, low.sets) if low.groups.split else asm


def forward_core(asm: Assembler, low: Lowering, between: Between | None = None) -> None:
    """The forward of groups between exchanges."""
    _clear(asm, asm.step(Op.CLEAR), low.queries, Tensor.O, low.space)
    fetches, returns = append_steps(asm, low.schedule, Op.ATTEND, Op.MERGE, low.batches("forward"), between)
    _attend(asm, low, fetches.stage[low.stage], _tiles(asm, low, "forward", fetches, returns))


def backward_core(asm: Assembler, low: Lowering, between: Between | None = None) -> None:
    """The backward of groups between exchanges."""
    clear = asm.step(Op.CLEAR)
    _clear(asm, clear, low.queries, Tensor.DQ, low.space)
    _clear(asm, clear, low.keys, Tensor.DKV, low.space)
    fetches, returns = append_steps(
        asm, low.schedule, Op.ATTEND_GRAD, Op.ADD, low.batches("backward"), between
    )
    _attend_grad(asm, low, fetches.stage[low.stage], _tiles(asm, low, "backward", fetches, returns))


#: the rows of tasks, by tensor
TaskRows = Mapping[Tensor, Ranges]


def _alone(low: Lowering) -> TaskRows:
    """Of tasks whose rows are all at home."""
    queries, keys = (side.of_tasks(Space.HOME, _NO_TILES) for side in (low.queries, low.keys))
    return {tensor: keys if tensor in KV_SIDE else queries for tensor in Tensor}


def _attend(asm: Assembler, low: Lowering, at: Ints, of: TaskRows) -> None:
    """The tasks of the forward, at steps int64 [tasks]."""
    tasks, columns = low.tasks, TASK_TENSORS["tasks"]
    operands = {column: Operands(tensor, of[tensor]) for column, tensor in columns.items()}
    band = {"dmin": tasks.dmin, "dmax": tasks.dmax, "first": low.queries.opening}
    asm.rows("tasks", tasks.exec, at, **operands, **band)


def _attend_grad(asm: Assembler, low: Lowering, at: Ints, of: TaskRows) -> None:
    """The same of the backward."""
    tasks, columns = low.tasks, TASK_TENSORS["grads"]
    operands = {column: Operands(tensor, of[tensor]) for column, tensor in columns.items()}
    first = FIRST_DQ * low.queries.opening + FIRST_DKV * low.keys.opening
    asm.rows("grads", tasks.exec, at, **operands, dmin=tasks.dmin, dmax=tasks.dmax, first=first)


def _tiles(asm: Assembler, low: Lowering, phase: str, fetches: Fetches, returns: Returns) -> TaskRows:
    """Bring tiles along their routes, and what they add up back; returns the rows of the tasks."""
    of: dict[Tensor, Ranges] = {}
    for name, side in zip(reversed(SIDES), (low.keys, low.queries), strict=True):
        tile = _fetch(asm, low, side, FETCHED[name, phase], fetches)
        rows = side.of_tasks(low.space, tile)
        of |= dict.fromkeys(FETCHED[name, phase], rows)
        for result in RETURNED[name, phase]:
            if len(side.edges):
                rows = side.of_tasks(low.space, _return(asm, low, side, result, fetches, returns))
            of[result] = rows
    return of


def _fetch(asm: Assembler, low: Lowering, side: Side, tensors: tuple[Tensor, ...], fetches: Fetches) -> Ints:
    """Bring the tiles of some tensors, all of the same rows; int64 [edges], the first work row of each."""
    edges = side.edges
    if not len(edges):
        return _NO_TILES
    launch = fetches.launch[side.round]
    # a tile is held until its tasks are done and it is passed on
    held = np.maximum(
        fetches.stage[low.schedule.leads + side.back], np.append(fetches.wait, -1)[side.last_sent]
    )
    if low.holds:
        held = np.full_like(held, len(asm.steps))
    tile = allot(edges.dst, edges.rows, launch, held, low.kept, side.order)
    sent, arriving = side.sent(low.space, tile), side.tiles(tile)
    for tensor in tensors:
        asm.rows("transfers", edges.src, launch, send=1, peer=edges.dst, operand=Operands(tensor, sent))
        asm.rows("transfers", edges.dst, launch, send=0, peer=edges.src, operand=Operands(tensor, arriving))
    return tile


def _return(
    asm: Assembler, low: Lowering, side: Side, tensor: Tensor, fetches: Fetches, returns: Returns
) -> Ints:
    """Bring what each tile adds up to where it is combined, or home as results; int64 [edges], the first work row of
    each tile's sums."""
    edges, target = side.edges, side.returned_to
    batch = returns.batches.batch[side.index]
    whole = returns.batches.results[batch]
    launch, add, clear = returns.launch[batch], returns.add[batch], returns.clear[side.round]
    partial = np.flatnonzero(~whole)
    start = np.minimum(clear, fetches.stage[low.schedule.leads + side.round])
    tile, arriving = _room(low, side, partial, start, launch, returns.wait[batch], add, len(asm.steps))
    cleared = side.tile_openers.lane
    asm.rows("rowops", edges.dst[cleared], clear[cleared], c=Operands(tensor, side.tiles_cleared(tile)))
    into, sums = side.added_to(low.space, tile), Operands(tensor, side.tiles(tile))
    come = Operands(tensor, Ranges.of(Space.WORK, arriving, edges.rows[partial], side.heads_of(partial)))
    received = Ranges(into.packed.copy(), into.heads)
    received.packed[partial] = come.ranges.packed
    asm.rows("transfers", edges.dst, launch, send=1, peer=target, operand=sums)
    asm.rows("transfers", target, launch, send=0, peer=edges.dst, operand=Operands(tensor, received))
    asm.rows("rowops", target[partial], add[partial], a=come, c=Operands(tensor, into.take(partial)))
    return tile


def _room(
    low: Lowering, side: Side, partial: Ints, start: Ints, launch: Ints, wait: Ints, add: Ints, end: int
) -> tuple[Ints, Ints]:
    """First work rows: int64 [edges] of what tiles add up, from `start` until it has left, and int64 [partial], of the
    edges `partial`, of what arrives to be added up, from `launch` to `add`. Where tiles stay for the stages of a window
    nothing takes their place before the `end`."""
    edges, target = side.edges, side.returned_to
    if low.holds:
        tile = allot(edges.dst, edges.rows, start, np.full(len(edges), end), low.kept, side.order)
        beyond = low.kept.copy()
        np.maximum.at(beyond, edges.dst, tile + edges.rows)
        return tile, allot(target, edges.rows, launch, add, beyond, side.order)[partial]
    order = None
    if side.order is not None:
        place = np.full(len(edges), -1)
        place[partial] = len(edges) + np.arange(len(partial))
        behind = place[side.order]
        order = np.concatenate([side.order, behind[behind >= 0]])
    rank, rows, begin, last = (
        np.concatenate([leaving, arriving[partial]])
        for leaving, arriving in ((edges.dst, target), (edges.rows, edges.rows), (start, launch), (wait, add))
    )
    tile, arriving = np.split(allot(rank, rows, begin, last, low.kept, order), [len(edges)])
    return tile, arriving


def _clear(asm: Assembler, at: int, side: Side, tensor: Tensor, space: Space) -> None:
    """Rows in attention order that no task opens begin at nothing."""
    rank, row, rows, heads = side.cleared
    asm.rows("rowops", rank, at, c=Operands(tensor, Ranges.of(space, row, rows, heads)))


_NO_TILES = np.zeros(0, np.int64)
