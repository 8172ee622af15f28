"""The shares that DistCA's migration may take rows from, in the order in which it looks at them, and what is known of
their price before."""

from __future__ import annotations

from typing import NamedTuple

from apportion.ir.arrays import Floats, Ints
from apportion.ir.loops.jit import lean
from apportion.planner.place.distca.board import Rules, Servers
from apportion.planner.place.distca.pairs import Pairs, Shares, keys_of


class Candidates(NamedTuple):
    """Shares of surplus servers, int64 [candidates], those with the largest `most_e` first: the E that a share has as a
    whole, whose work is `work`. A server that has nothing of its pair pays for its last rows at least `once + a_pair *`
    their work in bytes; 0 where that is not known. most_e, work, once, a_pair: float64 [candidates]. place: int64
    [shares], where each share is among these, or -1. last: int64 [1], the share that was the best of them last, or -1.
    """

    share: Ints
    most_e: Floats
    work: Floats
    once: Floats
    a_pair: Floats
    place: Ints
    last: Ints


@lean
def note_price(pairs: Pairs, shares: Shares, rules: Rules, candidates: Candidates, place: int) -> None:
    """Fill in what a candidate costs at least: the keys of its last row, and rows in proportion to work less one, as
    they are rounded. Nothing is said of shares other than a pair's first: what servers have of these is not looked at
    beforehand."""
    share = candidates.share[place]
    candidates.work[place] = shares.work[share]
    candidates.once[place], candidates.a_pair[place] = 0.0, 0.0
    if share >= len(pairs.q) or shares.work[share] == 0:
        return
    pair, high, seen = shares.pair[share], shares.high[share], 0
    rows = high - shares.low[share]
    first, last = keys_of(pairs, pair, high - 1, high)
    for c in range(pairs.first[pair], pairs.first[pair + 1]):
        if pairs.q0[c] < high <= pairs.q1[c]:
            seen = max(seen, high - pairs.q0[c])
    a_row = (0.5 if pairs.length[pair] > 0 else 1.0) * rules.priced_q
    once = (last - first) * rules.kv_bytes - a_row
    if seen >= rows and once > 0:
        candidates.once[place], candidates.a_pair[place] = once, a_row * rows / shares.work[share]


@lean
def sweep(at: Ints, servers: Servers, rules: Rules, candidates: Candidates, count: int) -> int:
    """Keeps of the first `count` candidates those whose server has a surplus yet; at: int64, the server of each share.
    Returns how many these are."""
    share, kept = candidates.share, 0
    columns = candidates.most_e, candidates.work, candidates.once, candidates.a_pair
    for place in range(count):
        one = share[place]
        candidates.place[one] = -1
        if servers.load[at[one]] > (1 + rules.excess) * servers.target[at[one]]:
            share[kept], candidates.place[one] = one, kept
            for column in columns:
                column[kept] = column[place]
            kept += 1
    return kept
