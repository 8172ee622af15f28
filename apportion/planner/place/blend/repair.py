"""What the walk leaves uneven, made even: two ranks exchange as many rows, dense ones for sparse ones."""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.loops.jit import jit
from apportion.planner.place.blend.profile import pairs_between

# Pieces of a rank that are looked at, and exchanges a rank at most.
LOOKED_AT, EXCHANGES = 32, 8


@jit
def repair(table: Ints, pieces: Ints, count: int, wanted: Floats, tolerance: float) -> int:
    """Exchange rows until no rank has more than 1 + `tolerance` times the pairs wanted of it, or nothing helps.

    table: the columns of a profile; pieces: int64 [room, 3], first row, end and rank, `count` of them, in place;
    wanted: float64 [ranks]. Returns how many pieces there are now: an exchange adds two at most.
    """
    over = -wanted
    for piece in range(count):
        over[pieces[piece, 2]] += pairs_between(table, pieces[piece, 0], pieces[piece, 1])
    scale = np.maximum(wanted, 1.0)
    for _ in range(EXCHANGES * len(wanted)):
        busy, idle = int(np.argmax(over / scale)), int(np.argmin(over / scale))
        if over[busy] <= tolerance * scale[busy] or count + 2 > len(pieces):
            break
        goal = min(over[busy], -over[idle])
        mine, other, rows = _best(table, pieces, count, busy, idle, goal)
        if rows == 0:
            break
        moved = _gain(table, pieces, mine, other, rows)
        if moved < tolerance / 2 * scale[busy]:
            break
        count = _exchange(pieces, count, mine, other, rows)
        over[busy] -= moved
        over[idle] += moved
    return count


@jit
def _best(table: Ints, pieces: Ints, count: int, busy: int, idle: int, goal: float) -> tuple[int, int, int]:
    """(piece of the busy rank, piece of the idle one, rows): the exchange of the fewest rows that moves `goal` pairs,
    else the one that moves most."""
    best, fewest, most = (0, 0, 0), 2**62, 0.0
    ours, theirs = _held(pieces, count, busy), _held(pieces, count, idle)
    for mine in ours:
        for other in theirs:
            rows = min(pieces[mine, 1] - pieces[mine, 0], pieces[other, 1] - pieces[other, 0])
            gain = _gain(table, pieces, mine, other, rows)
            if gain >= goal:
                rows = _enough(table, pieces, mine, other, rows, goal)
                if rows < fewest:
                    best, fewest = (mine, other, rows), rows
            elif fewest == 2**62 and gain > most:
                best, most = (mine, other, rows), gain
    return best


@jit
def _held(pieces: Ints, count: int, rank: int) -> Ints:
    return np.flatnonzero(pieces[:count, 2] == rank)[:LOOKED_AT]


@jit
def _gain(table: Ints, pieces: Ints, mine: int, other: int, rows: int) -> int:
    """Pairs that leave with the last `rows` of one piece for the first of another."""
    end, begin = pieces[mine, 1], pieces[other, 0]
    return pairs_between(table, end - rows, end) - pairs_between(table, begin, begin + rows)


@jit
def _enough(table: Ints, pieces: Ints, mine: int, other: int, most: int, goal: float) -> int:
    """The fewest rows, up to `most`, which are enough, that move `goal` pairs."""
    least = 0
    while most - least > 1:
        rows = (least + most) // 2
        if _gain(table, pieces, mine, other, rows) >= goal:
            most = rows
        else:
            least = rows
    return most


@jit
def _exchange(pieces: Ints, count: int, mine: int, other: int, rows: int) -> int:
    low, high, busy = pieces[mine]
    begin, end, idle = pieces[other]
    pieces[mine, 0], pieces[mine, 2] = high - rows, idle
    pieces[other, 1], pieces[other, 2] = begin + rows, busy
    if low < high - rows:
        pieces[count, 0], pieces[count, 1], pieces[count, 2] = low, high - rows, busy
        count += 1
    if begin + rows < end:
        pieces[count, 0], pieces[count, 1], pieces[count, 2] = begin + rows, end, idle
        count += 1
    return count
