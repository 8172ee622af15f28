"""Programs that move KV to the queries, forward and backward, with or without an exchange around them.

    forward    [in]         F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..         [out]  finish
    backward   delta  [in]  F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..     [out]

F: rounds that fetch KV tiles. R: rounds that return their gradients, the reverse of F (on a ring: on with the tile).
The transfers of a round overlap the tasks of the rounds before it.

Everything between the exchanges is lowered for groups of ranks and then spread over the members of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import FIRST_DKV, FIRST_DQ, Op, Space, Tensor
from apportion.ir.plan import ProgramSet
from apportion.planner.passes.assemble import Assembler, Numbers, Operands, RangeSet, range_set
from apportion.planner.passes.exchange import (
    WHOLE,
    bring_in,
    reserve,
    take_out,
    take_out_shared,
)
from apportion.planner.passes.layouts import whole_ranges
from apportion.planner.passes.lowering import (
    ARRIVING,
    KEY_CLEARED,
    KEY_PIECES,
    QUERIES,
    QUERY_CLEARED,
    QUERY_PIECES,
    QUERY_WHOLE,
    SENT_KEYS,
    TILE,
    TILE_INSIDE,
    Lowering,
    allot,
)
from apportion.planner.passes.script import Fetches, Returns, backward_script, forward_script

Ints = NDArray[np.integer[Any]]

# What the backward takes and gives for each query row and for each key row.
OF_QUERY = (Tensor.Q, Tensor.DO, Tensor.DELTA, Tensor.DQ)
OF_KEY = (Tensor.KV, Tensor.DKV)


def lower_forward(low: Lowering) -> ProgramSet:
    """The forward programs of all ranks."""
    asm, ops = Assembler(low.rows.ranks), Operands(low.rows.ranks)
    q, o = ops.number((Tensor.Q, Tensor.O), low.space, low.query_ranges)
    (kv,) = ops.number((Tensor.KV,), low.space, low.key_ranges)
    come = reserve(asm, low.exchange)
    _clear(asm, asm.step(Op.CLEAR), low.rows.home[low.query_openers.cleared], o[QUERY_CLEARED])
    fetches = forward_script(asm, low.schedule)
    tiles = _fetch(asm, ops, low, fetches, kv)
    tasks = low.tasks
    asm.rows(
        "tasks",
        tasks.exec,
        fetches.stage[low.stage],
        q[QUERIES],
        low.keys(kv, tiles),
        o[QUERIES],
        tasks.dmin,
        tasks.dmax,
        low.query_openers.flags(len(tasks)),
    )
    leave, finish = reserve(asm, low.exchange), asm.step(Op.FINISH)
    asm, ops = _spread(asm, ops, low)
    results = o[QUERY_WHOLE] if low.exchange is None else _NO_ROWS
    if low.exchange is not None and come is not None and leave is not None:
        home = low.exchange.homes(ops, (Tensor.Q, Tensor.KV, Tensor.O))
        bring_in(asm, low.exchange, come, home[Tensor.Q], q[QUERY_PIECES])
        bring_in(asm, low.exchange, come, home[Tensor.KV], kv[KEY_PIECES])
        take_out(asm, low.exchange, leave, o[QUERY_PIECES], home[Tensor.O])
        results = home[Tensor.O][WHOLE]
    asm.rows("rowops", whole_ranges(low.home)[0], finish, 0, 0, results, 0, 0)
    return asm.build(ops, low.sets)


def lower_backward(low: Lowering) -> ProgramSet:
    """The backward programs of all ranks."""
    asm, ops = Assembler(low.rows.ranks), Operands(low.rows.ranks)
    of_query = _numbers(ops, OF_QUERY, low.space, low.query_ranges)
    of_key = _numbers(ops, OF_KEY, low.space, low.key_ranges)
    delta = asm.step(Op.DELTA)
    come = reserve(asm, low.exchange)
    clear = asm.step(Op.CLEAR)
    _clear(asm, clear, low.rows.home[low.query_openers.cleared], of_query[Tensor.DQ][QUERY_CLEARED])
    _clear(asm, clear, low.rows.home[low.key_openers.cleared], of_key[Tensor.DKV][KEY_CLEARED])
    fetches, returns = backward_script(asm, low.schedule)
    tiles = _fetch(asm, ops, low, fetches, of_key[Tensor.KV])
    outgoing = _return(asm, ops, low, fetches, returns, of_key[Tensor.DKV])
    _grads(asm, low, fetches, of_query, of_key, tiles, outgoing)
    leave = reserve(asm, low.exchange)
    asm, ops = _spread(asm, ops, low)
    home = {} if low.exchange is None else low.exchange.homes(ops, (*OF_QUERY, *OF_KEY))
    if low.exchange is not None and come is not None and leave is not None:
        for tensor in (Tensor.Q, Tensor.DO, Tensor.DELTA):
            bring_in(asm, low.exchange, come, home[tensor], of_query[tensor][QUERY_PIECES])
        bring_in(asm, low.exchange, come, home[Tensor.KV], of_key[Tensor.KV][KEY_PIECES])
        take_out(asm, low.exchange, leave, of_query[Tensor.DQ][QUERY_PIECES], home[Tensor.DQ])
        dkv = of_key[Tensor.DKV][KEY_PIECES]
        take_out_shared(asm, ops, low.exchange, leave, dkv, home[Tensor.DKV])
    _delta(asm, ops, low, delta, of_query, home)
    return asm.build(ops, low.sets)


def _grads(
    asm: Assembler,
    low: Lowering,
    fetches: Fetches,
    of_query: dict[Tensor, Numbers],
    of_key: dict[Tensor, Numbers],
    tiles: Numbers,
    outgoing: Numbers,
) -> None:
    tasks = low.tasks
    opened_keys = low.key_openers.flags(len(tasks)) | low.tile_openers.flags(len(tasks))
    asm.rows(
        "grads",
        tasks.exec,
        fetches.stage[low.stage],
        of_query[Tensor.Q][QUERIES],
        low.keys(of_key[Tensor.KV], tiles),
        of_query[Tensor.DO][QUERIES],
        of_query[Tensor.DELTA][QUERIES],
        of_query[Tensor.DQ][QUERIES],
        low.keys(of_key[Tensor.DKV], outgoing),
        tasks.dmin,
        tasks.dmax,
        FIRST_DQ * low.query_openers.flags(len(tasks)) + FIRST_DKV * opened_keys,
    )


def _fetch(asm: Assembler, ops: Operands, low: Lowering, fetches: Fetches, home: Numbers) -> Numbers:
    """Bring KV tiles along their routes; returns the operands of the tiles that arrive."""
    edges, turn, roots, relays = low.edges, low.schedule.round, low.roots, low.relays
    if not len(edges):
        return _NONE
    # a tile is held until its tasks are done and it is passed on
    held = np.maximum(fetches.stage[1 + turn], np.append(fetches.wait, -1)[low.last_sent])
    row = allot(edges.dst, edges.rows, fetches.launch[turn], held, low.kept)
    (tiles,) = ops.number((Tensor.KV,), Space.WORK, low.tile_ranges(row, relays, edges.parent[relays]))
    sent = np.empty(len(edges), np.int32)
    sent[roots], sent[relays] = home[SENT_KEYS], tiles[TILE_INSIDE]
    asm.rows("transfers", edges.src, fetches.launch[turn], 1, edges.dst, sent)
    asm.rows("transfers", edges.dst, fetches.launch[turn], 0, edges.src, tiles[TILE])
    return tiles


def _return(
    asm: Assembler, ops: Operands, low: Lowering, fetches: Fetches, returns: Returns, home: Numbers
) -> Numbers:
    """Bring each tile's gradients to where they are added up; returns the operands of the tiles' gradients."""
    edges, turn = low.edges, low.schedule.round
    if not len(edges):
        return _NONE
    target, onward = low.returned_to, low.returns_to
    launch, add = returns.launch[turn], returns.add[turn]
    rank = np.concatenate([edges.dst, target])
    start = np.concatenate([np.minimum(returns.clear, fetches.stage[1:])[turn], launch])
    end = np.concatenate([returns.wait[turn], add])
    row = allot(rank, np.concatenate([edges.rows, edges.rows]), start, end, low.kept)
    staying, passed = np.flatnonzero(onward < 0), np.flatnonzero(onward >= 0)
    leaving, arriving = np.split(row, 2)
    ranges = low.tile_ranges(leaving, passed, onward[passed], (target, arriving, edges.rows))
    (tiles,) = ops.number((Tensor.DKV,), Space.WORK, ranges)
    cleared = low.tile_openers.cleared
    _clear(asm, returns.clear[turn[cleared]], edges.dst[cleared], tiles[TILE][cleared])
    asm.rows("transfers", edges.dst, launch, 1, target, tiles[TILE])
    asm.rows("transfers", target, launch, 0, edges.dst, tiles[ARRIVING])
    into = np.empty(len(edges), np.int32)
    into[low.roots] = home[SENT_KEYS]
    into[staying], into[passed] = into[low.root[staying]], tiles[TILE_INSIDE]
    asm.rows("rowops", target, add, tiles[ARRIVING], 0, into, 0, 0)
    return tiles


def _clear(asm: Assembler, at: Ints | int, rank: Ints, operands: Ints) -> None:
    asm.rows("rowops", rank, at, 0, 0, operands, 0, 0)


def _delta(
    asm: Assembler,
    ops: Operands,
    low: Lowering,
    at: int,
    of_query: dict[Tensor, Numbers],
    home: dict[Tensor, Numbers],
) -> None:
    """Row statistics of all home rows; O is needed for nothing else and never travels."""
    do, delta = (
        home[tensor][WHOLE] if home else of_query[tensor][QUERY_WHOLE] for tensor in (Tensor.DO, Tensor.DELTA)
    )
    whole = whole_ranges(low.home)
    (o,) = ops.number((Tensor.O,), Space.HOME, range_set(whole))
    asm.rows("rowops", whole[0], at, do, o[0], delta, 0, 0)


def _spread(asm: Assembler, ops: Operands, low: Lowering) -> tuple[Assembler, Operands]:
    """What groups do, done by each of their members."""
    if not low.groups.split:
        return asm, ops
    return asm.spread(low.groups), ops.spread(low.groups, low.sets)


_NO_ROWS = np.zeros(0, np.int64)
_NONE = Numbers(_NO_ROWS, (_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS))


def _numbers(
    ops: Operands, tensors: tuple[Tensor, ...], space: Space, ranges: RangeSet
) -> dict[Tensor, Numbers]:
    return dict(zip(tensors, ops.number(tensors, space, ranges), strict=True))
