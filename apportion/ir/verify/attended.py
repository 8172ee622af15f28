"""What tasks attend to, as bands of tokens, and how bands are held against each other: areas and overlaps, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.loops.jit import jit, lean
from apportion.ir.loops.sorting import stable_order
from apportion.ir.verify.homes import Homes

MOST = 16  # overlaps that are told
_FREE_STEPS = 2**26  # comparisons of two bands: a tenth of a second
_STEPS_PER_BAND = 512
_FREE_PIECES, _PIECES_PER_TASK = 2**22, 64
_MANY = 2**19  # bands


@dataclass(frozen=True, eq=False)
class Tasks:
    """The pieces of attention of a program, in global tokens.

    bands: int64 [6, pieces], clipped; task: int64 [pieces], the row of the task list of each; heads: int64 [pieces],
    the head set of its queries. complete: whether the tokens of all tasks are known (a fault of the dataflow hides
    some). times: int64 [lists, heads] where pieces are of lists instead of tasks, as many as heads have (`lists.py`),
    how often; then `heads` names the list, and no task is named.
    """

    bands: Ints
    task: Ints
    heads: Ints
    complete: bool
    times: Ints | None = None


def cut_bands(bands: Ints, homes: Homes, tasks: int) -> Ints:
    """Bands of addresses, integers [bands, 8], cut into runs of tokens: int64 [8, pieces]; behind each two numbers that
    its pieces keep. Raises CapacityError where they are too many for so many tasks."""
    most, room = _FREE_PIECES + _PIECES_PER_TASK * tasks, 2 * len(bands)
    if len(bands) > _MANY:  # counted first, so that no room is left over, nor a copy without it made
        room = min(_cut(bands, homes.starts, homes.tokens, np.empty((8, 0), np.int64), most), most)
    found = np.empty((8, room), np.int64)
    count = _cut(bands, homes.starts, homes.tokens, found, most)
    if count > most:
        raise CapacityError(f"the tasks fall into more than {most} runs of tokens: too many to verify")
    if count > room:
        found = np.empty((8, count), np.int64)
        _cut(bands, homes.starts, homes.tokens, found, most)
    return np.ascontiguousarray(found[:, :count])


def areas_inside(bands: Ints, mask: Ints) -> tuple[Ints, Ints]:
    """int64 [tasks] twice: the pairs of each task, and those of them that the mask allows."""
    areas, inside = np.empty(bands.shape[1], np.int64), np.empty(bands.shape[1], np.int64)
    ends = np.maximum.accumulate(mask[1])
    budget = _FREE_STEPS + _STEPS_PER_BAND * (bands.shape[1] + mask.shape[1])
    if _measure(bands, mask, ends, areas, inside, budget) < 0:
        raise CapacityError(f"tasks and mask meet in more than {budget} pairs of bands: too many to verify")
    return areas, inside


def by_corner(bands: Ints) -> Ints:
    """The order of bands by (q0, k0)."""
    return stable_order(bands[0] * (int(bands[3].max(initial=0)) + 1) + bands[2])


def overlaps(bands: Ints) -> Ints:
    """int64 [found, 3] (piece, later piece, shared pairs) of pieces that share a pair; at most a few."""
    found = np.zeros((MOST, 3), np.int64)
    if bands.shape[1] < 2:
        return found[:0]
    order = by_corner(bands)
    budget = _FREE_STEPS + _STEPS_PER_BAND * bands.shape[1]
    count = _sweep(bands, order, budget, found)
    if count < 0:
        raise CapacityError(f"the tasks meet in more than {budget} pairs of bands: too many to verify")
    return found[:count]


def is_exact(bands: Ints, mask: Ints, area: int) -> bool:
    """Whether bands, int64 [6, pieces], cover a mask, int64 [6, bands] of that area, exactly. Raises CapacityError."""
    areas, inside = areas_inside(bands, mask)
    return bool(np.array_equal(areas, inside)) and int(areas.sum()) == area and not len(overlaps(bands))


@lean
def _cut(parts: Ints, starts: Ints, tokens: Ints, bands: Ints, most: int) -> int:
    """Cuts bands of addresses into runs of tokens, as `cut_bands` says; those without an allowed pair drop out. Their
    number, as far as `most`; they are written down as far as there is room. starts, tokens: as in `Homes`."""
    count, run, other = 0, 0, 0
    for part in range(len(parts)):
        q, q_end, k, k_end = parts[part, 0], parts[part, 1], parts[part, 2], parts[part, 3]
        dmin, dmax = parts[part, 4], parts[part, 5]
        run = _run_of(starts, q, run)
        while starts[run] < q_end:
            q0, q1 = max(starts[run], q), min(starts[run + 1], q_end)
            # keys that these queries see, by address
            k0, k1 = max(k, q0 - dmax), min(k_end, q1 - dmin)
            other = _run_of(starts, k0, other) if k0 < k1 else other
            while k0 < k1 and starts[other] < k1:
                count += 1
                if count <= bands.shape[1]:
                    shift = tokens[run] - starts[run]
                    move = shift - (tokens[other] - starts[other])
                    bands[0, count - 1], bands[1, count - 1] = q0 + shift, q1 + shift
                    bands[2, count - 1] = max(starts[other], k) + shift - move
                    bands[3, count - 1] = min(starts[other + 1], k_end) + shift - move
                    bands[4, count - 1] = max(dmin + move, bands[0, count - 1] - bands[3, count - 1] + 1)
                    bands[5, count - 1] = min(dmax + move, bands[1, count - 1] - bands[2, count - 1] - 1)
                    bands[6, count - 1], bands[7, count - 1] = parts[part, 6], parts[part, 7]
                elif count > most:
                    return count
                other += 1
            run += 1
    return count


@lean
def _run_of(starts: Ints, address: int, near: int) -> int:
    """The run that an address is in, sought from `near` on in growing steps: mostly it is the same or the next."""
    low, high, step = min(near, len(starts) - 2), min(near, len(starts) - 2) + 1, 1
    while starts[low] > address:
        low, high, step = max(low - step, 0), low, 2 * step
    while starts[high] <= address:
        low, high, step = high, min(high + step, len(starts) - 1), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= address:
            low = middle
        else:
            high = middle
    return low


@lean
def pairs(q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int) -> int:
    """The number of pairs of a band: rows of the triangle below each diagonal, counted from the top right corner."""
    rows, keys = q1 - q0, k1 - k0
    if rows <= 0 or keys <= 0:
        return 0
    low, high = max(dmin, q0 - k1 + 1), min(dmax, q1 - 1 - k0)
    if low > high:
        return 0
    upper, lower = low - (q0 - k1 + 1), (q1 - 1 - k0) - high  # cut off: diagonals of the two corners
    return rows * keys - _corner(rows, keys, upper) - _corner(rows, keys, lower)


@lean
def _corner(rows: int, keys: int, diagonals: int) -> int:
    """Pairs on the first `diagonals` diagonals of a corner of a rectangle: a triangle less what sticks out."""
    count = diagonals * (diagonals + 1) // 2
    if diagonals > rows:
        count -= (diagonals - rows) * (diagonals - rows + 1) // 2
    if diagonals > keys:
        count -= (diagonals - keys) * (diagonals - keys + 1) // 2
    return count


@lean
def _shared(a: Ints, i: int, b: Ints, j: int) -> int:
    return pairs(
        max(a[0, i], b[0, j]),
        min(a[1, i], b[1, j]),
        max(a[2, i], b[2, j]),
        min(a[3, i], b[3, j]),
        max(a[4, i], b[4, j]),
        min(a[5, i], b[5, j]),
    )


@lean
def _measure(bands: Ints, mask: Ints, ends: Ints, areas: Ints, inside: Ints, budget: int) -> int:
    """Fills `areas` and `inside`. ends: the running maximum of the mask's q1. Negative where `budget` ran out."""
    steps = budget
    for i in range(bands.shape[1]):
        q0, q1, k0, k1 = bands[0, i], bands[1, i], bands[2, i], bands[3, i]
        areas[i] = pairs(q0, q1, k0, k1, bands[4, i], bands[5, i])
        total = 0
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if ends[middle] <= q0:
                low = middle + 1
            else:
                high = middle
        while low < len(ends) and mask[0, low] < q1:
            if mask[2, low] < k1 and mask[3, low] > k0 and mask[1, low] > q0:
                total += _shared(bands, i, mask, low)
            low += 1
            steps -= 1
            if steps < 0:
                return steps
        inside[i] = total
    return steps


@jit
def _sweep(bands: Ints, order: Ints, budget: int, found: Ints) -> int:
    """Pieces that share a pair, the first few; their number, negative where `budget` ran out.

    `order` sorts by (q0, k0). Pieces whose query ranges hang together form a group; inside it they are taken by k0,
    and each is compared with those whose key range has not ended: none, where tasks tile their queries by key.
    """
    count, number = 0, len(order)
    active = np.empty(number, np.int64)
    begin = 0
    while begin < number:
        end, reach, rising = begin + 1, bands[1, order[begin]], True
        while end < number and bands[0, order[end]] < reach:
            reach = max(reach, bands[1, order[end]])
            rising = rising and bands[2, order[end]] >= bands[2, order[end - 1]]
            end += 1
        group = order[begin:end]
        if not rising:
            keys = np.empty(end - begin, np.int64)
            for i in range(end - begin):
                keys[i] = bands[2, group[i]]
            group = group[np.argsort(keys, kind="mergesort")]
        alive = 0
        for j in group:
            kept = 0
            for slot in range(alive):
                i = active[slot]
                if bands[3, i] > bands[2, j]:
                    active[kept] = i
                    kept += 1
                    if bands[0, i] < bands[1, j] and bands[0, j] < bands[1, i]:
                        shared = _shared(bands, i, bands, j)
                        if shared > 0 and count < len(found):
                            found[count, 0], found[count, 1], found[count, 2] = min(i, j), max(i, j), shared
                            count += 1
            budget -= alive
            if budget < 0:
                return budget
            active[kept] = j
            alive = kept + 1
        begin = end
    return count
