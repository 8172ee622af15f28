"""Work, keys and prices of parts of items, and the cheapest part of an item (DistCA, Appendix B)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import lean
from apportion.planner.passes.distca.board import Near, Rules, Walks, hull

Ints = NDArray[np.integer[Any]]

# Bytes of a move that costs nothing: its E is beyond any other's.
FREE = 1e-30


@lean
def step_pairs(length: int, step: int) -> int:
    """Pairs of the first `step` steps of a causal walk."""
    half = step // 2
    return half * (length + 1) + (step % 2) * (half + 1)


@lean
def work_of(walks: Walks, seq: int, a: int, b: int) -> int:
    """Pairs of steps [a, b)."""
    if walks.folded[seq]:
        return step_pairs(walks.length[seq], b) - step_pairs(walks.length[seq], a)
    work: int = walks.work[b] - walks.work[a]
    return work


@lean
def rows_of(walks: Walks, seq: int, a: int, b: int) -> int:
    if walks.folded[seq]:
        return b - a
    rows: int = walks.grain[b] - walks.grain[a]
    return rows


@lean
def _within(low: int, high: int, a: int, b: int) -> int:
    return max(0, min(high, b) - max(low, a))


@lean
def home_keys(walks: Walks, seq: int, a: int, b: int, low: int, high: int) -> int:
    """Keys of home steps [a, b) in [low, high)."""
    if not walks.folded[seq]:
        return _within(low, high, walks.grain[a], walks.grain[b])
    head = _within(low, high, (a + 1) // 2, (b + 1) // 2)
    length = walks.length[seq]
    return head + _within(low, high, length - b // 2, length - a // 2)


@lean
def new_keys(walks: Walks, near: Near, kv_free: bool, seq: int, a: int, b: int) -> int:
    """Key rows that must come for steps [a, b), at most."""
    low, high = hull(walks, seq, a, b)
    seen = high - low
    if not walks.folded[seq]:
        at_home = kv_free and near.a[seq] <= a and b <= near.b[seq]
        column = walks.outside if at_home else walks.keys
        seen = min(seen, column[b] - column[a])
    if not kv_free:
        return seen
    missing = high - low - _within(low, high, near.low[seq], near.high[seq])
    if near.a[seq] < near.b[seq]:
        left = home_keys(walks, seq, near.a[seq], near.b[seq], low, min(high, near.low[seq]))
        right = home_keys(walks, seq, near.a[seq], near.b[seq], max(low, near.high[seq]), high)
        missing -= left + right
    return min(missing, seen)


@lean
def price_of(walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, foreign: bool) -> float:
    """Bytes of a move of steps [a, b); foreign: its rows do not live at the destination."""
    rows = rows_of(walks, seq, a, b) if foreign else 0
    return max(
        FREE, float(rows * rules.priced_q + new_keys(walks, near, rules.kv_free, seq, a, b) * rules.kv_bytes)
    )


@lean
def _innermost(walks: Walks, rules: Rules, seq: int, a: int, b: int, work: float, spare: float) -> int:
    """The step x for which [x, b) has about `work` pairs, at most `spare` more, on a multiple of the grain; b: none."""
    length = walks.length[seq]
    wanted = 2.0 * work / (length + 1)
    x = int((b - wanted) / rules.grain + 0.5) * rules.grain
    if x >= b:
        x = (b - 1) // rules.grain * rules.grain
    x = max(x, a)
    if work_of(walks, seq, x, b) > work + spare:
        x = (x // rules.grain + 1) * rules.grain
    return min(x, b)


@lean
def _first_at_least(work: Ints, a: int, b: int, value: float) -> int:
    """The first x in [a, b] with work[x] >= value, b where there is none."""
    while a < b:
        middle = (a + b) // 2
        if work[middle] < value:
            a = middle + 1
        else:
            b = middle
    return b


@lean
def _last_rows(walks: Walks, a: int, b: int, work: float, spare: float) -> int:
    """The grain x for which [x, b) has about `work` pairs, at most `spare` more; b: none."""
    x = _first_at_least(walks.work, a, b, walks.work[b] - work)
    if x > a and walks.work[b] - walks.work[x - 1] <= work + spare:
        less, more = work - (walks.work[b] - walks.work[x]), walks.work[b] - walks.work[x - 1] - work
        return x - 1 if more < less or x == b else x
    return x


@lean
def _first_rows(walks: Walks, a: int, b: int, work: float, spare: float) -> int:
    """The grain y for which [a, y) has about `work` pairs, at most `spare` more; a: none."""
    y = _first_at_least(walks.work, a, b, walks.work[a] + work)
    if walks.work[y] - walks.work[a] <= work + spare:
        return y
    return y - 1


@lean
def cheapest(
    walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, work: float, spare: float, foreign: bool
) -> tuple[int, int]:
    """The cheapest steps [x, y) of the item [a, b) with about `work` pairs; empty where there are none."""
    whole = work_of(walks, seq, a, b)
    if whole <= work:
        return a, b
    if walks.folded[seq]:
        return _innermost(walks, rules, seq, a, b, work, spare), b
    x, y = _last_rows(walks, a, b, work, spare), _first_rows(walks, a, b, work, spare)
    if x >= b or y <= a:
        return (x, b) if x < b else (a, y)
    last = price_of(walks, near, rules, seq, x, b, foreign) * (walks.work[y] - walks.work[a])
    first = price_of(walks, near, rules, seq, a, y, foreign) * (walks.work[b] - walks.work[x])
    return (a, y) if first < last else (x, b)


@lean
def estimate(
    walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, whole: int, work: float, foreign: bool
) -> float:
    """E of a head-tail item before its cut is rounded; `whole`: its work. paper: only the rows of the head are counted,
    and keys as if they saw the whole document."""
    length, start = walks.length[seq], float(a)
    if work < whole:
        start = b - 2.0 * work / (length + 1)
    rows, reach = (b - start) * foreign, max(length - start * 0.5, b * 0.5)
    if rules.paper:
        rows, reach = rows * 0.5, float(length)
    if rules.kv_free:
        missing = reach - near.high[seq]
        if near.a[seq] < near.b[seq]:
            missing -= home_keys(walks, seq, near.a[seq], near.b[seq], near.high[seq], int(reach))
        reach = max(0.0, missing)
    price: float = rows * rules.priced_q + reach * rules.kv_bytes
    return work / max(price, FREE)
