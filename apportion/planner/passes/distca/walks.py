"""Masks as the greedy migration of DistCA sees them: exact work and key rows along each sequence's walk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.planner.passes.distca.board import Walks
from apportion.planner.passes.distca.homes import Ranges, token_ranges
from apportion.planner.passes.shard import row_areas
from apportion.planner.problem import exact_sums

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]


def find_walks(bands: Ints, starts: Ints, folded: Bools, cuts: Ints, granularity: int) -> Walks:
    """The sequences under one kind's bands (int64 [bands, 6]).

    starts: int64 [sequences + 1] tokens; folded: bool [sequences], which are causal and walked from both ends; the
    others get grains of `granularity` rows, cut also at the tokens `cuts`.
    """
    length = np.diff(starts)
    if folded.all():
        none = np.zeros(1, np.int64)
        return Walks(folded, length, none, none, none, none, none, none)
    grain = np.unique(np.concatenate([starts, cuts, _multiples(starts, ~folded, granularity)]))
    seq = np.searchsorted(starts, grain[:-1], "right") - 1
    seen, outside, low, high = _keys(bands[_of(bands, starts, ~folded)], grain)
    return Walks(
        folded,
        length,
        grain,
        np.append(0, np.cumsum(row_areas(bands, grain))),
        np.append(0, np.cumsum(seen)),
        np.append(0, np.cumsum(outside)),
        _backward(np.minimum, np.minimum(low, starts[seq + 1]), seq),
        _forward(np.maximum, np.maximum(high, starts[seq]), seq),
    )


def _multiples(starts: Ints, cut: Bools, granularity: int) -> Ints:
    """Every `granularity` tokens of the sequences that are to be cut."""
    count = np.where(cut, -(-np.diff(starts) // granularity), 0)
    index = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found: Ints = np.repeat(starts[:-1], count) + index * granularity
    return found


def _of(bands: Ints, starts: Ints, chosen: Bools) -> Ints:
    """The bands of the chosen sequences."""
    return np.flatnonzero(chosen[np.searchsorted(starts, bands[:, 0], "right") - 1])


def _keys(bands: Ints, grain: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(keys, outside, low, high), int64 [grains]: key rows seen, each once for every band but no more than their hull
    [low, high), which is empty, high < low, where nothing is seen; outside: those beyond the grain's own rows."""
    first = np.searchsorted(grain, bands[:, 0], "right") - 1
    counts = np.maximum(np.searchsorted(grain, bands[:, 1], "left") - first, 0)
    part = bands[np.repeat(np.arange(len(bands)), counts)]
    at = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    q0, q1 = np.maximum(part[:, 0], grain[at]), np.minimum(part[:, 1], grain[at + 1])
    k0, k1 = np.maximum(part[:, 2], q0 - part[:, 5]), np.minimum(part[:, 3], q1 - part[:, 4])
    some = np.flatnonzero(k0 < k1)
    at, k0, k1 = at[some], k0[some], k1[some]
    own = np.maximum(np.minimum(k1, grain[at + 1]) - np.maximum(k0, grain[at]), 0)
    grains = len(grain) - 1
    keys, outside = (exact_sums(at, count, grains) for count in (k1 - k0, k1 - k0 - own))
    low, high = np.full(grains, grain[-1]), np.zeros(grains, np.int64)
    np.minimum.at(low, at, k0)
    np.maximum.at(high, at, k1)
    most = np.maximum(high - low, 0)
    return np.minimum(keys, most), np.minimum(outside, most), low, high


def _forward(operation: np.ufunc, values: Ints, seq: Ints) -> Ints:
    """Running `operation` (maximum) within each sequence: offsets keep sequences apart, tokens being below 2**31."""
    apart = seq.astype(np.int64) << 32
    running: Ints = operation.accumulate(values + apart) - apart
    return running


def _backward(operation: np.ufunc, values: Ints, seq: Ints) -> Ints:
    """The same from the end of each sequence (minimum)."""
    apart = seq.astype(np.int64) << 32
    running: Ints = operation.accumulate((values + apart)[::-1])[::-1] - apart
    return running


def on_walks(walks: Walks, starts: Ints, by_both_ends: Bools, homes: Ranges) -> Ranges:
    """Homes in the steps of `walks`, in order of sequence: ranges of sequences that homes fold and this kind does not
    are two each, or one where they touch. by_both_ends: bool [sequences], which the homes fold."""
    straight = ~walks.folded[homes.seq]
    if not straight.any():
        return homes
    low, high, rank = token_ranges(starts, by_both_ends, homes.take(np.flatnonzero(straight)))
    seq = np.searchsorted(starts, low, "right") - 1
    rows = Ranges(seq, np.searchsorted(walks.grain, low), np.searchsorted(walks.grain, high), rank)
    kept = homes.take(np.flatnonzero(~straight))
    joined = Ranges(
        *(np.concatenate([getattr(kept, c), getattr(rows, c)]) for c in ("seq", "a", "b", "rank"))
    )
    return joined.take(np.lexsort((joined.a, joined.seq)))


def in_tokens(walks: Walks, starts: Ints, ranges: Ranges) -> tuple[Ints, Ints, Ints]:
    """(low, high, rank): the global tokens of ranges of steps of `walks`, sorted."""
    straight = ~walks.folded[ranges.seq]
    begin = starts[ranges.seq]
    last = len(walks.grain) - 1
    a = np.where(straight, walks.grain[np.minimum(ranges.a, last)] - begin, ranges.a)
    b = np.where(straight, walks.grain[np.minimum(ranges.b, last)] - begin, ranges.b)
    return token_ranges(starts, walks.folded, Ranges(ranges.seq, a, b, ranges.rank))
