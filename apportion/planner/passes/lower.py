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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import (
    FETCHED,
    FIRST_DKV,
    FIRST_DQ,
    RETURNED,
    SIDES,
    TRAVELLING,
    Op,
    Space,
    Tensor,
)
from apportion.ir.plan import ProgramSet
from apportion.planner.passes.assemble import Assembler, Numbers, Operands, RangeSet, range_set
from apportion.planner.passes.exchange import (
    REQUESTS,
    Exchange,
    ExchangeSteps,
    bring_in,
    launch_other,
    reserve,
    take_out,
    take_out_shared,
)
from apportion.planner.passes.exchange import WHOLE as HOME_WHOLE
from apportion.planner.passes.lowering import (
    ARRIVING,
    CLEARED,
    PIECES,
    SENT,
    TILE,
    TILE_CLEARED,
    TILE_INSIDE,
    WHOLE,
    Lowering,
    RowRange,
    Side,
)
from apportion.planner.passes.rows import allot, whole_ranges
from apportion.planner.passes.script import Between, Fetches, Returns, append_steps

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

#: operands of rows in attention order, by tensor; their requests are those of `Side.home_ranges`
Home = dict[Tensor, Numbers]


def lower_forward(low: Lowering) -> ProgramSet:
    """The forward programs of all ranks."""
    asm, ops, exchange = Assembler(low.rows.ranks), Operands(low.rows.ranks), low.exchange
    come = reserve(asm, exchange, Op.ATTEND, _channel(low), parts=_parts(low, "forward"))
    ahead = _Ahead(asm, low, come, "forward")
    core = forward_core(asm, ops, low, ahead)
    leave, finish = ahead.leave(), asm.step(Op.FINISH)
    asm, ops = spread(asm, ops, low)
    results = core[Tensor.O][WHOLE]
    if exchange is not None and come is not None and leave is not None:
        home, beside = _homes(ops, low, exchange, "forward")
        late, early, _ = _apart(exchange)
        _bring_in(asm, exchange, come, home, core, late, "forward")
        take_out(asm, exchange, leave, core[Tensor.O][PIECES], home[Tensor.O], early)
        results = home[Tensor.O][HOME_WHOLE]
        if low.beside is not None:
            _clear(asm, come.clear, low.beside.alone.queries, beside[Tensor.O])
            _attend(
                asm,
                low.beside.alone,
                low.beside.steps(come.attend, leave.attend),
                low.beside.of_tasks(beside),
            )
            results = beside[Tensor.O][WHOLE]
    asm.rows("rowops", whole_ranges(low.home)[0], finish, 0, 0, results, 0, 0)
    return asm.build(ops, low.sets)


def lower_backward(low: Lowering) -> ProgramSet:
    """The backward programs of all ranks."""
    asm, ops, exchange = Assembler(low.rows.ranks), Operands(low.rows.ranks), low.exchange
    delta = asm.step(Op.DELTA)
    come = reserve(asm, exchange, Op.ATTEND_GRAD, _channel(low), parts=_parts(low, "backward"))
    ahead = _Ahead(asm, low, come, "backward")
    core = backward_core(asm, ops, low, ahead)
    leave = ahead.leave()
    asm, ops = spread(asm, ops, low)
    rows = {tensor: core[tensor][WHOLE] for tensor in (Tensor.DO, Tensor.DELTA)}
    if exchange is not None and come is not None and leave is not None:
        home, beside = _homes(ops, low, exchange, "backward")
        late, early, early_keys = _apart(exchange)
        _bring_in(asm, exchange, come, home, core, late, "backward")
        take_out(asm, exchange, leave, core[Tensor.DQ][PIECES], home[Tensor.DQ], early)
        take_out_shared(asm, ops, exchange, leave, core[Tensor.DKV][PIECES], home[Tensor.DKV], early_keys)
        rows = {tensor: home[tensor][HOME_WHOLE] for tensor in rows}
        if low.beside is not None:
            alone = low.beside.alone
            _clear(asm, come.clear, alone.queries, beside[Tensor.DQ])
            _clear(asm, come.clear, alone.keys, beside[Tensor.DKV])
            _attend_grad(asm, alone, low.beside.steps(come.attend, leave.attend), low.beside.of_tasks(beside))
            rows = {tensor: beside[tensor][WHOLE] for tensor in rows}
    _delta(asm, ops, low, delta, rows)
    return asm.build(ops, low.sets)


def _parts(low: Lowering, phase: str) -> int:
    """In how many parts tensors come in."""
    split = low.exchange is not None and low.exchange.direct
    return sum(len(FETCHED[side, phase]) for side in SIDES) if split else 1


def _bring_in(
    asm: Assembler,
    exchange: Exchange,
    come: ExchangeSteps,
    home: Home,
    core: Home,
    late: Bools | None,
    phase: str,
) -> None:
    """All tensors, each in its part. Queries may be late."""
    fetched = [(tensor, side) for side in SIDES for tensor in FETCHED[side, phase]]
    for number, (tensor, side) in enumerate(fetched):
        part = number if exchange.direct else 0
        apart = late if side == "query" else None
        bring_in(asm, exchange, come, home[tensor], core[tensor][PIECES], apart, part)


def _homes(ops: Operands, low: Lowering, exchange: Exchange, phase: str) -> tuple[Home, Home]:
    """The operands of home rows, by tensor: of what is exchanged, and of what is computed beside it."""
    exchanged: Home = {}
    beside: Home = {}
    for name in SIDES:
        requests: list[RowRange] = []
        if low.beside is not None:
            alone = low.beside.alone
            side = alone.queries if name == "query" else alone.keys
            requests, _ = side.home_requests
            if name == "query":
                requests[WHOLE] = whole_ranges(low.home)
        found = exchange.homes(ops, TRAVELLING[name, phase], requests)
        exchanged |= found
        beside |= {tensor: Numbers(held.numbers, held.index[REQUESTS:]) for tensor, held in found.items()}
    return exchanged, beside


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


def spread(asm: Assembler, ops: Operands, low: Lowering) -> tuple[Assembler, Operands]:
    """What groups do, done by each of their members."""
    if not low.groups.split:
        return asm, ops
    return asm.spread(low.groups), ops.spread(low.groups, low.sets)


def forward_core(asm: Assembler, ops: Operands, low: Lowering, between: Between | None = None) -> Home:
    """The forward of groups between exchanges; returns the operands of rows in attention order."""
    home = _at_home(ops, low, "forward")
    _clear(asm, asm.step(Op.CLEAR), low.queries, home[Tensor.O])
    fetches, returns = append_steps(asm, low.schedule, Op.ATTEND, Op.MERGE, low.batches("forward"), between)
    of = _tiles(asm, ops, low, "forward", home, fetches, returns)
    _attend(asm, low, fetches.stage[low.stage], of)
    return home


def backward_core(asm: Assembler, ops: Operands, low: Lowering, between: Between | None = None) -> Home:
    """The backward of groups between exchanges; returns the operands of rows in attention order."""
    home = _at_home(ops, low, "backward")
    clear = asm.step(Op.CLEAR)
    _clear(asm, clear, low.queries, home[Tensor.DQ])
    _clear(asm, clear, low.keys, home[Tensor.DKV])
    fetches, returns = append_steps(
        asm, low.schedule, Op.ATTEND_GRAD, Op.ADD, low.batches("backward"), between
    )
    of = _tiles(asm, ops, low, "backward", home, fetches, returns)
    _attend_grad(asm, low, fetches.stage[low.stage], of)
    return home


def _attend(asm: Assembler, low: Lowering, at: Ints, of: Mapping[Tensor, Ints]) -> None:
    """The tasks of the forward, at steps int64 [tasks]; of: int32 [tasks], their operands, by tensor."""
    columns = (of[tensor] for tensor in (Tensor.Q, Tensor.KV, Tensor.O))
    tasks = low.tasks
    asm.rows("tasks", tasks.exec, at, *columns, tasks.dmin, tasks.dmax, low.queries.opening)


def _attend_grad(asm: Assembler, low: Lowering, at: Ints, of: Mapping[Tensor, Ints]) -> None:
    """The same of the backward."""
    names = (Tensor.Q, Tensor.KV, Tensor.DO, Tensor.DELTA, Tensor.DQ, Tensor.DKV)
    columns = (of[tensor] for tensor in names)
    tasks, first = low.tasks, FIRST_DQ * low.queries.opening + FIRST_DKV * low.keys.opening
    asm.rows("grads", tasks.exec, at, *columns, tasks.dmin, tasks.dmax, first)


def _at_home(ops: Operands, low: Lowering, phase: str) -> Home:
    """The operands of rows in attention order; only results are ever cleared."""
    home: Home = {}
    for name, side in zip(SIDES, (low.queries, low.keys), strict=True):
        home |= _numbers(ops, FETCHED[name, phase], low.space, side.home_ranges.without(CLEARED))
        if RETURNED[name, phase]:
            home |= _numbers(ops, RETURNED[name, phase], low.space, side.home_ranges)
    return home


def _tiles(
    asm: Assembler,
    ops: Operands,
    low: Lowering,
    phase: str,
    home: Home,
    fetches: Fetches,
    returns: Returns,
) -> dict[Tensor, Ints]:
    """Bring tiles along their routes, and what they add up back; returns the operands of the tasks, by tensor."""
    of: dict[Tensor, Ints] = {}
    for name, side in zip(reversed(SIDES), (low.keys, low.queries), strict=True):
        tiles = _fetch(asm, ops, low, side, FETCHED[name, phase], fetches, home)
        of |= {tensor: side.of_tasks(home[tensor], found) for tensor, found in tiles.items()}
        for result in RETURNED[name, phase]:
            outgoing = _return(asm, ops, low, side, result, fetches, returns, home[result])
            of[result] = side.of_tasks(home[result], outgoing)
    return of


def _fetch(
    asm: Assembler,
    ops: Operands,
    low: Lowering,
    side: Side,
    tensors: tuple[Tensor, ...],
    fetches: Fetches,
    home: Home,
) -> dict[Tensor, Numbers]:
    """Bring the tiles of some tensors, all of the same rows; returns the operands of those that arrive."""
    edges, roots, relays = side.edges, side.roots, side.relays
    if not len(edges):
        return dict.fromkeys(tensors, _NONE)
    launch = fetches.launch[side.round]
    # a tile is held until its tasks are done and it is passed on
    held = np.maximum(
        fetches.stage[low.schedule.leads + side.back], np.append(fetches.wait, -1)[side.last_sent]
    )
    if low.holds:
        held = np.full_like(held, len(asm.steps))
    row = allot(edges.dst, edges.rows, launch, held, low.kept, side.order)
    tiles = _numbers(ops, tensors, Space.WORK, side.tile_ranges(row, relays, edges.parent[relays]))
    for tensor in tensors:
        sent = np.empty(len(edges), np.int32)
        sent[roots], sent[relays] = home[tensor][SENT], tiles[tensor][TILE_INSIDE]
        asm.rows("transfers", edges.src, launch, 1, edges.dst, sent)
        asm.rows("transfers", edges.dst, launch, 0, edges.src, tiles[tensor][TILE])
    return tiles


def _return(
    asm: Assembler,
    ops: Operands,
    low: Lowering,
    side: Side,
    tensor: Tensor,
    fetches: Fetches,
    returns: Returns,
    home: Numbers,
) -> Numbers:
    """Bring what each tile adds up to where it is combined, or home as results; returns the operands of the tiles'
    sums."""
    edges = side.edges
    if not len(edges):
        return _NONE
    target, onward = side.returned_to, side.returns_to
    batch = returns.batches.batch[side.index]
    whole = returns.batches.results[batch]
    launch, add, clear = returns.launch[batch], returns.add[batch], returns.clear[side.round]
    partial = np.flatnonzero(~whole)
    rank = np.concatenate([edges.dst, target[partial]])
    start = np.concatenate(
        [np.minimum(clear, fetches.stage[low.schedule.leads + side.round]), launch[partial]]
    )
    end = np.concatenate([returns.wait[batch], add[partial]])
    order = None
    if side.order is not None:
        place = np.cumsum(~whole) - 1
        order = np.concatenate([side.order, len(edges) + place[side.order[~whole[side.order]]]])
    row = allot(rank, np.concatenate([edges.rows, edges.rows[partial]]), start, end, low.kept, order)
    leaving, arriving = np.split(row, [len(edges)])
    if low.holds:
        never = np.full(len(edges), len(asm.steps))
        leaving = allot(edges.dst, edges.rows, start[: len(edges)], never, low.kept, side.order)
        beyond = low.kept.copy()
        np.maximum.at(beyond, edges.dst, leaving + edges.rows)
        arriving = allot(target, edges.rows, launch, add, beyond, side.order)[partial]
    come = ((target[partial], arriving, edges.rows[partial]), side.edge_group[partial])
    staying, passed = np.flatnonzero(onward < 0), np.flatnonzero(onward >= 0)
    (tiles,) = ops.number((tensor,), Space.WORK, side.tile_ranges(leaving, passed, onward[passed], come))
    cleared = side.tile_openers.lane
    asm.rows("rowops", edges.dst[cleared], clear[cleared], 0, 0, tiles[TILE_CLEARED], 0, 0)
    into = np.empty(len(edges), np.int32)
    into[side.roots] = home[SENT]
    into[staying], into[passed] = into[side.root[staying]], tiles[TILE_INSIDE]
    received = into.copy()
    received[partial] = tiles[ARRIVING]
    asm.rows("transfers", edges.dst, launch, 1, target, tiles[TILE])
    asm.rows("transfers", target, launch, 0, edges.dst, received)
    asm.rows("rowops", target[partial], add[partial], tiles[ARRIVING], 0, into[partial], 0, 0)
    return tiles


def _clear(asm: Assembler, at: int, side: Side, operands: Numbers) -> None:
    """Home rows that no task opens begin at nothing."""
    rank = side.openers.lane // len(side.heads)
    asm.rows("rowops", rank, at, 0, 0, operands[CLEARED], 0, 0)


def _delta(asm: Assembler, ops: Operands, low: Lowering, at: int, rows: dict[Tensor, Ints]) -> None:
    """Row statistics of all home rows; O is needed for nothing else and never travels."""
    whole = whole_ranges(low.home)
    (o,) = ops.number((Tensor.O,), Space.HOME, range_set(whole))
    asm.rows("rowops", whole[0], at, rows[Tensor.DO], o[0], rows[Tensor.DELTA], 0, 0)


_NO_ROWS = np.zeros(0, np.int64)
_NONE = Numbers(_NO_ROWS, (_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS))


def _numbers(
    ops: Operands, tensors: tuple[Tensor, ...], space: Space, ranges: RangeSet
) -> dict[Tensor, Numbers]:
    return dict(zip(tensors, ops.number(tensors, space, ranges), strict=True))
