"""Lower bounds: what no plan can beat, each with what it holds for, and void where nothing is proven.

Foreign KV, queries at home. A rank that holds rows of a band needs the keys that these rows see; those that it does not
hold itself are foreign. Let `reach` be the end of its last row (counted from the band's first key), n the keys of the
band that it holds below that, C the most tokens of a rank and w the most pairs that it computes.

    stair   rows see all keys up to their own      foreign = reach - n
    window  … the last W of them                   foreign >= min(reach - n, W - 1): a key below `reach` that no row
                                                   sees has W foreign ones before the rank's next row, which sees W - 1
    block   rows see all keys                      foreign = keys - n

The ranks that reach furthest: rows beyond the reach of the j-th (j = 0, 1, ...) are held by the j before it, so they
are at most j * C tokens of at most j * w pairs. That bounds each reach from below; the sums are over ranks, and over
bands whose keys are apart. Speeds do not matter (w is the largest of all ranks), and home_ranks only forbid placements.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import MAX_RANKS
from apportion.ir.loops.jit import jit, lean
from apportion.ir.masks.areas import area_of
from apportion.ir.masks.bands import INF
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.tensors import FETCHED, PHASES, RETURNED, TRAVELLING

#: a ratio to a bound of fewer tokens than this share of the batch says nothing
LEAST_SHARE = 0.01
#: tokens; keeps what is rounded below the true bound: pairs err by 1,024 at most, and where they err at all, a row has
#: millions of them or is their root
_SLACK = 1e-3
#: rounding of sums and roots, relative
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """No plan of the same promises has less than `bound`, this one has `value`; None where there is no such number.

    void: why the ratio of the two says nothing, None where it does.
    """

    name: str
    bound: float | None
    value: float | None
    void: str | None = None

    @property
    def gap(self) -> float | None:
        """value / bound, at least 1; None where void."""
        if self.void is not None or not self.bound or self.value is None:
            return None
        ratio = self.value / self.bound
        return 1.0 if abs(ratio - 1) < _ROUNDING else ratio

    def to_data(self) -> dict[str, Any]:
        """Plain data: bound, value, gap, and `void` where there is no gap."""
        data: dict[str, Any] = {"bound": self.bound, "value": self.value, "gap": self.gap}
        return data if self.gap is not None else data | {"void": self.void or "the bound is 0"}


def makespan(placed: float, loads: Ints | Floats, speeds: Floats) -> Bound:
    """The busiest rank's load over its speed. placed: the placement's bound (of what it cannot split, by
    `solvers.partition.lpt.makespan_bound`); loads: [ranks] pairs; speeds: [ranks]. The mean by speed holds for any
    split, so at least that."""
    mean = float(loads.sum()) / float(speeds.sum())
    return Bound("makespan", max(placed, mean), float((loads / speeds).max()))


def slots(degrees: Iterable[int], used: Iterable[int]) -> Bound:
    """Slots of all exchanges, of the tiles and routes that they have: a rank sends and receives at most one tile in a
    slot, so an exchange has no fewer than its busiest rank sends or receives. degrees: these numbers, of each exchange.
    used: the slots of each."""
    least, total = sum(degrees), sum(used)
    return Bound("slots", float(least), float(total), None if least else "nothing is exchanged")


def kv_bytes(
    batch: Batch,
    model: Model,
    token_cap: int,
    load_caps: Mapping[str, int],
    value: float | None,
    queries_move: bool = False,
) -> Bound:
    """Bytes of KV that must go out, forward and backward, and of its gradient that must come back, for one call of each
    attention kind, in any plan in which queries stay home and no rank is fuller or busier.

    token_cap: most tokens of a rank; load_caps: kind -> most pairs that a rank computes; where groups of ranks share
    tokens (Ulysses), both are of a group. value: the same bytes of this plan. queries_move: whether a task runs away
    from the home of its queries: nothing is proven then.
    """
    if queries_move:
        return Bound("kv_bytes", None, value, "queries move: nothing is proven")
    tokens = sum(foreign_kv_tokens(batch, kind, token_cap, load_caps[kind]) for kind in batch.kinds)
    per_token = sum(model.sent_bytes(tensor) for phase in PHASES for tensor in TRAVELLING["key", phase])
    small = tokens < LEAST_SHARE * batch.tokens
    void = f"the bound is below {LEAST_SHARE:.0%} of the tokens" if small else None
    return Bound("kv_bytes", float(tokens * per_token), value, void)


def remote_pairs_bytes(
    model: Model, remote: Iterable[tuple[str, Ints]], value: float | None, heads_split: bool = False
) -> Bound:
    """Bytes for pairs computed where neither their query nor their key is at home. A rank that fetches q query rows and
    k key rows covers at most q * k of them, so w pairs cost at least 2 sqrt(w * KV * (Q + O)) bytes, O as a result.

    remote: (phase, int64 [ranks] such pairs on each rank) of each attention call. value: the bytes of this plan for the
    rows of these pairs. heads_split: whether tasks have some of the heads: a pair then needs part of its rows.
    """
    least = sum(float(remote_bytes(model, phase, pairs).sum()) for phase, pairs in remote)
    if heads_split:
        return Bound("remote_pairs_bytes", None, value, "tasks split heads: nothing is proven")
    void = None if least else "no task has both its queries and its keys away from home"
    return Bound("remote_pairs_bytes", least, value, void)


def remote_bytes(model: Model, phase: str, pairs: Ints) -> Floats:
    """float64, shaped like `pairs`: bytes that a rank moves at least for so many pairs with query and key remote."""
    keys = sum(model.sent_bytes(tensor) for tensor in TRAVELLING["key", phase])
    queries = sum(model.sent_bytes(tensor) for tensor in FETCHED["query", phase])
    for tensor in RETURNED["query", phase]:  # a result where the rank computes all of a row
        queries += min(model.sent_bytes(tensor), model.q_heads * model.sent_result_bytes(tensor))
    least: Floats = 2.0 * np.sqrt(pairs.astype(np.float64) * keys * queries)
    return least


# ---------------------------------------------------------------------------------------------- foreign KV


def foreign_kv_tokens(batch: Batch, kind: str, token_cap: int, load_cap: int) -> int:
    """KV tokens that must leave home where queries stay home: no plan in which a rank holds at most `token_cap`
    tokens and computes at most `load_cap` pairs of this kind moves fewer. 0 where nothing is proven."""
    return foreign_tokens(batch.bands(kind), token_cap, load_cap)


def foreign_tokens(bands: Ints, token_cap: int, load_cap: int) -> int:
    """As `foreign_kv_tokens`, of bands int64 [n, 6] sorted by q0."""
    found, count = _foreign(np.ascontiguousarray(bands), token_cap, load_cap)
    return _most_apart(*found[:, :count])


@jit
def _foreign(bands: Ints, token_cap: int, load_cap: int) -> tuple[Ints, int]:
    """int64 [3, n] (first key, end, foreign tokens), and how many of these ranges of keys have any: of the bands whose
    rows one rank cannot hold or compute alone. Bands whose rows see all keys from the same one up to their own at
    least, one below the other, are one stair."""
    found, count, first = np.zeros((3, 2 * len(bands)), np.int64), 0, 0
    for band in range(len(bands)):
        q0, q1, k0, k1, dmin, dmax = bands[band]
        if _is_wide(q0, q1, k0, k1, dmin, dmax, token_cap, load_cap):
            found[0, count], found[1, count] = k0, k1
            found[2, count] = _of_block(q0, q1, k0, k1, dmin, dmax, token_cap, load_cap)
            count += found[2, count] > 0
        if band + 1 < len(bands) and _joins(bands[band], bands[band + 1]):
            continue
        if first < band:
            q0, k1, dmin, dmax = bands[first, 0], q1, 0, INF
        if _is_wide(q0, q1, k0, k1, dmin, dmax, token_cap, load_cap):
            low, end, tokens = _of_stair(q0, q1, k0, k1, dmin, dmax, token_cap, load_cap)
            found[0, count], found[1, count], found[2, count] = low, end, tokens
            count += tokens > 0
        first = band + 1
    return found, count


@lean
def _is_wide(q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int, token_cap: int, load_cap: int) -> bool:
    return bool(q1 - q0 > token_cap or area_of(q0, q1, k0, k1, dmin, dmax) > load_cap)


@lean
def _joins(upper: Ints, lower: Ints) -> bool:
    return bool(_is_stair(upper) and _is_stair(lower) and upper[2] == lower[2] and lower[0] == upper[1])


@lean
def _is_stair(band: Ints) -> bool:
    q0, q1, k0, k1, dmin, dmax = band
    return bool(dmin <= 0 and dmax >= q1 - 1 - k0 and k1 >= q1 and k0 <= q0)


@lean
def _of_stair(
    q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int, token_cap: int, load_cap: int
) -> tuple[int, int, int]:
    """(first key, end, foreign tokens) of the part of a band whose rows see up to their own key. `reach`: of one rank
    after another, how far it reaches at least, as long as that is beyond the first row."""
    start, end = max(q0, k0), min(q1, k1)
    plain = dmax >= end - 1 - k0
    low, window = (k0, INF) if plain else (start, dmax + 1)
    size, skip = end - low, start - low
    if size <= 0 or dmin > 0 or window <= 1:
        return low, end, 0
    window = min(window, size)
    total, load = _pairs_of(size, window), float(load_cap)
    ranks = max(-(-(size - skip) // token_cap), math.ceil(total / max(load_cap, 1)))
    most_held = min(token_cap, math.floor(_rows_of(load, window) + _SLACK))
    holders, reached, strip = 0, 0, 0
    for before in range(1 + min(max(ranks, 0), MAX_RANKS)):
        by_load = _rows_of(max(total - before * load, 0.0), window)
        reach = max(size - before * token_cap, math.ceil(by_load - _SLACK))
        if reach > skip:
            holders += 1
            reached += reach
            strip += min(max(reach - most_held, 0), window - 1)
    return low, end, reached - min(size, token_cap * holders) if plain else strip


@lean
def _pairs_of(rows: int, window: int) -> float:
    """Pairs of the first rows of a stair under a window (no longer than the stair)."""
    held, rest = float(min(rows, window)), float(max(rows - window, 0))
    return held * (held + 1) / 2 + rest * float(window)


@lean
def _rows_of(pairs: float, window: int) -> float:
    """The inverse of `_pairs_of`: how many of the first rows have so many pairs."""
    corner = window * (window + 1.0) / 2
    inside = (math.sqrt(1 + 8 * min(pairs, corner)) - 1) / 2
    return inside + max(pairs - corner, 0.0) / window


@lean
def _of_block(q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int, token_cap: int, load_cap: int) -> int:
    """Foreign tokens of the rows of a band that see all of its keys: every rank but one that has some of these rows
    lacks, summed up, all keys."""
    keys = k1 - k0
    rows = min(q1, k0 + min(dmax, INF // 2) + 1) - max(q0, k1 - 1 + max(dmin, -INF // 2))
    per_rank = min(token_cap, max(load_cap // max(keys, 1), 1))
    return max(-(-max(rows, 0) // per_rank) - 1, 0) * keys


def _most_apart(low: Ints, high: Ints, tokens: Ints) -> int:
    """The largest sum of `tokens` over ranges [low, high) that do not overlap: interval scheduling."""
    order = np.lexsort((low, high))
    ends, best = [0], [0]
    for start, end, count in zip(*(column[order].tolist() for column in (low, high, tokens)), strict=True):
        taken = best[bisect_right(ends, start) - 1] + count
        ends.append(end)
        best.append(max(best[-1], taken))
    return int(best[-1])
