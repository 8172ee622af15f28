"""Programs that move KV to the queries, forward and backward, with or without reshuffling around them.

    forward    [in]  F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..                [out]  finish
    backward   delta  [in]  F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..     [out]

F: rounds that fetch KV tiles. R: rounds that return their gradients, by the reverse of the same matchings. The
transfers of a round overlap the tasks of the rounds before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import FIRST_DKV, FIRST_DQ, Op, Space, Tensor
from apportion.ir.plan import ProgramSet
from apportion.planner.passes.assemble import Assembler, Numbers, Operands, RangeSet, range_set
from apportion.planner.passes.layouts import whole_ranges
from apportion.planner.passes.lowering import (
    KEY_CLEARED,
    KEY_SHUFFLE,
    QUERIES,
    QUERY_CLEARED,
    QUERY_SHUFFLE,
    QUERY_WHOLE,
    SENT_KEYS,
    TILE,
    Lowering,
)
from apportion.planner.passes.reshuffle import PIECE, WHOLE

Ints = NDArray[np.integer[Any]]

FETCH_CHANNEL, RETURN_CHANNEL = 0, 1
# Gradients of one round travel while those of the next are computed.
RETURN_DEPTH = 2

# What the backward holds for each query row and for each key row.
OF_QUERY = (Tensor.Q, Tensor.DO, Tensor.DELTA, Tensor.DQ)
OF_KEY = (Tensor.KV, Tensor.DKV)


def lower_forward(low: Lowering) -> ProgramSet:
    """The forward programs of all ranks."""
    asm, ops = Assembler(low.ranks), Operands(low.ranks)
    q, o = ops.number((Tensor.Q, Tensor.O), low.space, low.query_ranges)
    (kv,) = ops.number((Tensor.KV,), low.space, low.key_ranges)
    (tiles,) = ops.number((Tensor.KV,), Space.WORK, low.fetched_ranges) if len(low.edges) else (_NONE,)
    home = _homes(ops, low, (Tensor.Q, Tensor.KV, Tensor.O))
    _bring_in(asm, low, [(home.get(Tensor.Q), q[QUERY_SHUFFLE]), (home.get(Tensor.KV), kv[KEY_SHUFFLE])])
    _clear(asm, asm.step(Op.CLEAR), low.rows.home[low.query_openers.cleared], o[QUERY_CLEARED])

    launches = [asm.launch(FETCH_CHANNEL) for _ in range(min(low.slots.buffers, low.slots.rounds))]
    stages = [asm.step(Op.ATTEND)]
    for fetch in range(low.slots.rounds):
        asm.wait(launches[fetch])
        stages.append(asm.step(Op.ATTEND))
        if len(launches) < low.slots.rounds:
            launches.append(asm.launch(FETCH_CHANNEL))

    _send_tiles(asm, low, launches, kv, tiles)
    tasks = low.tasks
    asm.rows(
        "tasks",
        tasks.exec,
        np.array(stages)[low.stage],
        q[QUERIES],
        low.keys(kv, tiles),
        o[QUERIES],
        tasks.dmin,
        tasks.dmax,
        low.query_openers.flags(len(tasks)),
    )
    _take_out(asm, low, [(o[QUERY_SHUFFLE], home.get(Tensor.O))])
    rank, result = _whole(low, o, home.get(Tensor.O))
    asm.rows("rowops", rank, asm.step(Op.FINISH), 0, 0, result, 0, 0)
    return asm.build(ops, low.heads)


def lower_backward(low: Lowering) -> ProgramSet:
    """The backward programs of all ranks."""
    asm, ops = Assembler(low.ranks), Operands(low.ranks)
    of_query = _numbers(ops, OF_QUERY, low.space, low.query_ranges)
    of_key = _numbers(ops, OF_KEY, low.space, low.key_ranges)
    home = _homes(ops, low, (*OF_QUERY, *OF_KEY))
    _delta(asm, ops, low, of_query, home)
    _bring_in(
        asm,
        low,
        [(home.get(t), of_query[t][QUERY_SHUFFLE]) for t in (Tensor.Q, Tensor.DO, Tensor.DELTA)]
        + [(home.get(Tensor.KV), of_key[Tensor.KV][KEY_SHUFFLE])],
    )
    clear = asm.step(Op.CLEAR)
    _clear(asm, clear, low.rows.home[low.query_openers.cleared], of_query[Tensor.DQ][QUERY_CLEARED])
    _clear(asm, clear, low.rows.home[low.key_openers.cleared], of_key[Tensor.DKV][KEY_CLEARED])
    _grads(asm, ops, low, of_query, of_key)
    _take_out(
        asm,
        low,
        [
            (of_query[Tensor.DQ][QUERY_SHUFFLE], home.get(Tensor.DQ)),
            (of_key[Tensor.DKV][KEY_SHUFFLE], home.get(Tensor.DKV)),
        ],
    )
    return asm.build(ops, low.heads)


def _grads(
    asm: Assembler,
    ops: Operands,
    low: Lowering,
    of_query: dict[Tensor, Numbers],
    of_key: dict[Tensor, Numbers],
) -> None:
    """The pipeline of the backward: fetch, compute, return, add."""
    rounds, depth = low.slots.rounds, low.slots.buffers
    fetches = [asm.launch(FETCH_CHANNEL) for _ in range(min(depth, rounds))]
    stages, clears, returns, adds = [asm.step(Op.ATTEND_GRAD)], [], [], []
    for fetch in range(rounds):
        asm.wait(fetches[fetch])
        clears.append(asm.step(Op.CLEAR))
        stages.append(asm.step(Op.ATTEND_GRAD))
        returns.append(asm.launch(RETURN_CHANNEL))
        if len(fetches) < rounds:
            fetches.append(asm.launch(FETCH_CHANNEL))
        if fetch:
            asm.wait(returns[fetch - 1])
            adds.append(asm.step(Op.ADD))
    if rounds:
        asm.wait(returns[-1])
        adds.append(asm.step(Op.ADD))

    tiles = outgoing = _NONE
    if rounds:
        (tiles,) = ops.number((Tensor.KV,), Space.WORK, low.fetched_ranges)
        outgoing = _return_tiles(asm, ops, low, of_key[Tensor.DKV], np.array(returns), np.array(adds))
        at = np.array(clears)[low.slots.round]
        cleared = low.tile_openers.cleared
        _clear(asm, at[cleared], low.edges.dst[cleared], outgoing[TILE][cleared])
    _send_tiles(asm, low, fetches, of_key[Tensor.KV], tiles)
    tasks = low.tasks
    opened_keys = low.key_openers.flags(len(tasks)) | low.tile_openers.flags(len(tasks))
    asm.rows(
        "grads",
        tasks.exec,
        np.array(stages)[low.stage],
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


def _return_tiles(
    asm: Assembler, ops: Operands, low: Lowering, home: Numbers, returns: Ints, adds: Ints
) -> Numbers:
    """Send each tile's gradient back to where the tile came from and add it there."""
    edges, turn = low.edges, low.slots.round
    (outgoing,) = ops.number((Tensor.DKV,), Space.WORK, low.tile_ranges(RETURN_DEPTH))
    (incoming,) = ops.number((Tensor.DKV,), Space.WORK, low.returned_ranges(RETURN_DEPTH))
    asm.rows("transfers", edges.dst, returns[turn], 1, edges.src, outgoing[TILE])
    asm.rows("transfers", edges.src, returns[turn], 0, edges.dst, incoming[0])
    asm.rows("rowops", edges.src, adds[turn], incoming[0], 0, home[SENT_KEYS], 0, 0)
    return outgoing


def _send_tiles(asm: Assembler, low: Lowering, launches: list[int], home: Numbers, tiles: Numbers) -> None:
    edges = low.edges
    if not len(edges):
        return
    at = np.array(launches)[low.slots.round]
    asm.rows("transfers", edges.src, at, 1, edges.dst, home[SENT_KEYS])
    asm.rows("transfers", edges.dst, at, 0, edges.src, tiles[TILE])


def _clear(asm: Assembler, at: Ints | int, rank: Ints, operands: Ints) -> None:
    asm.rows("rowops", rank, at, 0, 0, operands, 0, 0)


def _delta(
    asm: Assembler, ops: Operands, low: Lowering, of_query: dict[Tensor, Numbers], home: dict[Tensor, Numbers]
) -> None:
    """Row statistics of all home rows; O is needed for nothing else and never travels."""
    rank, do = _whole(low, of_query[Tensor.DO], home.get(Tensor.DO))
    _, delta = _whole(low, of_query[Tensor.DELTA], home.get(Tensor.DELTA))
    rows = low.rows if low.reshuffle is None else low.reshuffle.loader
    (o,) = ops.number((Tensor.O,), Space.HOME, range_set(whole_ranges(rows)))
    asm.rows("rowops", rank, asm.step(Op.DELTA), do, o[0], delta, 0, 0)


_NO_ROWS = np.zeros(0, np.int64)
_NONE = Numbers(_NO_ROWS, (_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS))


def _numbers(
    ops: Operands, tensors: tuple[Tensor, ...], space: Space, ranges: RangeSet
) -> dict[Tensor, Numbers]:
    return dict(zip(tensors, ops.number(tensors, space, ranges), strict=True))


def _homes(ops: Operands, low: Lowering, tensors: tuple[Tensor, ...]) -> dict[Tensor, Numbers]:
    """Operands of the loader's rows, where the program reshuffles."""
    if low.reshuffle is None:
        return {}
    return _numbers(ops, tensors, Space.HOME, low.reshuffle.loader_ranges)


def _bring_in(asm: Assembler, low: Lowering, tensors: list[tuple[Numbers | None, Ints]]) -> None:
    if low.reshuffle is not None:
        low.reshuffle.bring_in(asm, [(home[PIECE], kept) for home, kept in tensors if home is not None])


def _take_out(asm: Assembler, low: Lowering, tensors: list[tuple[Ints, Numbers | None]]) -> None:
    if low.reshuffle is not None:
        low.reshuffle.take_out(asm, [(kept, home[PIECE]) for kept, home in tensors if home is not None])


def _whole(low: Lowering, attention: Numbers, home: Numbers | None) -> tuple[Ints, Ints]:
    """The ranks that have home rows, and the operand of all of these."""
    rows = low.rows if low.reshuffle is None else low.reshuffle.loader
    rank = np.flatnonzero(rows.per_rank)
    return rank, attention[QUERY_WHOLE] if home is None or low.reshuffle is None else home[WHOLE]
