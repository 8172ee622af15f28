"""Sequential homes (DistCA, section 4.1 and Appendix B): ranks are filled one after another; if a causal sequence is
cut, each of its ranks holds a part of the head and its mirror image.

    walk      0 2 4 6 8 ..             .. 9 7 5 3 1      steps of the walk along a causal sequence: first, last, ...
    ranks     |  0  |  1  |   2   |   2   |  1  |  0  |  steps 2i and 2i + 1 see length + 1 keys together

All other sequences are walked from first to last token. Ranges [a, b) below are steps of a sequence's walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Bools, Ints, offsets
from apportion.planner.problem import Problem

# With home_ranks and no cap, either end of a rank's share may shift by 1/SLACK of the fullest rank's tokens.
SLACK = 100


@dataclass(frozen=True)
class Ranges:
    """Steps [a, b) of the walk along sequence `seq`, on `rank`: columns int64 [ranges]."""

    seq: Ints
    a: Ints
    b: Ints
    rank: Ints

    def take(self, order: Ints) -> Ranges:
        return Ranges(self.seq[order], self.a[order], self.b[order], self.rank[order])


def causal_sequences(problem: Problem, kind: str) -> Bools:
    """bool [sequences]: True if the kind's mask is plain causal."""
    bands, starts = problem.bands[kind], problem.batch.starts
    begin, end = starts[:-1], starts[1:]
    seq = np.searchsorted(starts, bands[:, 0], "right") - 1
    is_single = np.bincount(seq, minlength=len(begin)) == 1
    rows = (bands[:, 0] == begin[seq]) & (bands[:, 1] == end[seq])
    keys = (bands[:, 2] == begin[seq]) & (bands[:, 3] == end[seq])
    diagonal = (bands[:, 4] == 0) & (bands[:, 5] >= end[seq] - begin[seq] - 1)
    plain = np.zeros(len(begin), np.bool_)
    plain[seq[rows & keys & diagonal]] = True
    result: Bools = plain & is_single
    return result


def sequential_homes(problem: Problem, folded: Bools, granularity: int) -> Ranges:
    """Every sequence's home ranges, in the order of sequences and steps.

    folded: bool [sequences], True to walk from both ends. Ranks share the tokens that they may hold in proportion to
    their caps, so equal ranks get equal shares. A share's end moves to a nearby sequence end, else to a multiple of
    `granularity` rows, if the caps leave room. Sequences with few `home_ranks` are placed before those with more;
    the ratio of tokens to caps is as even as that order allows.
    """
    counts, parts = np.zeros(problem.ranks, np.int64), []
    for members, ranks in _groups(problem):
        lengths = problem.batch.lengths[members]
        share = _water_fill(counts[ranks], int(lengths.sum()), problem.token_caps[ranks])
        slack = _slack(problem, counts[ranks] + share, problem.token_caps[ranks])
        cuts = _move_cuts(
            np.cumsum(share)[:-1], lengths, slack, granularity * np.where(folded[members], 2, 1)
        )
        part = _parts(lengths, cuts)
        parts.append(Ranges(members[part.seq], part.a, part.b, ranks[part.rank]))
        np.add.at(counts, parts[-1].rank, part.b - part.a)
    seq, a, b, rank = (
        np.concatenate([getattr(p, name) for p in parts]) for name in ("seq", "a", "b", "rank")
    )
    ranges = Ranges(seq, a, b, rank)
    return ranges if len(parts) == 1 else ranges.take(np.lexsort((a, seq)))


def _groups(problem: Problem) -> Iterator[tuple[Ints, Ints]]:
    """(sequences, their allowed ranks), fewest ranks first."""
    all_ranks, homes = tuple(range(problem.ranks)), problem.batch.home_ranks
    if not homes:
        yield np.arange(len(problem.batch.lengths)), np.arange(problem.ranks)
        return
    members: dict[tuple[int, ...], list[int]] = {}
    for sequence in range(len(problem.batch.lengths)):
        members.setdefault(tuple(sorted(homes.get(sequence, all_ranks))), []).append(sequence)
    for ranks in sorted(members, key=lambda ranks: (len(ranks), ranks)):
        yield np.array(members[ranks]), np.array(ranks)


def _water_fill(used: Ints, tokens: int, caps: Ints) -> Ints:
    """int64 [ranks]: shares of `tokens` that level the ratio of tokens to caps (water-filling)."""
    fill = used / caps
    order = np.argsort(fill, kind="stable")
    sums, capacity = np.cumsum(used[order]), np.cumsum(caps[order])
    level = (tokens + sums) / capacity  # the level if only the first ranks received any
    count = int(np.flatnonzero(level >= fill[order])[-1]) + 1
    ranks = np.sort(order[:count])
    total = tokens + int(sums[count - 1])
    share = np.zeros(len(used), np.int64)
    share[ranks] = np.maximum(total * caps[ranks] // int(capacity[count - 1]) - used[ranks], 0)
    share[ranks[: tokens - int(share.sum())]] += 1
    return share


def _slack(problem: Problem, tokens: Ints, caps: Ints) -> int:
    """Largest shift of a share's end in either direction: half the least room of a rank, or, with home_ranks and no
    cap, 1/SLACK of the fullest rank's tokens."""
    if problem.policy.token_cap is None and problem.batch.home_ranks:
        return int(tokens.max()) // SLACK
    return max(0, int((caps - tokens).min()) // 2)


def _move_cuts(cuts: Ints, lengths: Ints, slack: int, grain: Ints) -> Ints:
    """The cuts of concatenated sequences, each moved by at most `slack`; grain: int64 [sequences] steps."""
    edges = offsets(lengths)
    seq = np.minimum(np.searchsorted(edges, cuts, "right") - 1, len(lengths) - 1)
    edge = np.where(cuts - edges[seq] <= edges[seq + 1] - cuts, edges[seq], edges[seq + 1])
    rounded = edges[seq] + np.rint((cuts - edges[seq]) / grain[seq]).astype(np.int64) * grain[seq]
    result = np.where(np.abs(rounded - cuts) <= slack, np.minimum(rounded, edges[seq + 1]), cuts)
    result = np.where(np.abs(edge - cuts) <= slack, edge, result)
    return np.maximum.accumulate(result)


def _parts(lengths: Ints, cuts: Ints) -> Ranges:
    """The ranges between cuts; `rank` numbers the shares."""
    edges = offsets(lengths)
    starts = np.union1d(edges[:-1], cuts[cuts < edges[-1]])
    seq = np.searchsorted(edges, starts, "right") - 1
    a = starts - edges[seq]
    return Ranges(
        seq,
        a,
        np.minimum(np.append(starts[1:], edges[-1]) - edges[seq], lengths[seq]),
        np.searchsorted(cuts, starts, "right"),
    )


def token_ranges(starts: Ints, folded: Bools, ranges: Ranges) -> tuple[Ints, Ints, Ints]:
    """(low, high, rank): global tokens [low, high), one or two intervals for each range, sorted.

    starts: int64 [sequences + 1], the first token of each sequence; folded: bool [sequences].
    """
    begin, end, fold = starts[ranges.seq], starts[ranges.seq + 1], folded[ranges.seq]
    low = begin + np.where(fold, (ranges.a + 1) // 2, ranges.a)
    high = begin + np.where(fold, (ranges.b + 1) // 2, ranges.b)
    tail_low, tail_high = (end - ranges.b // 2)[fold], (end - ranges.a // 2)[fold]
    lows, highs = np.concatenate([low, tail_low]), np.concatenate([high, tail_high])
    ranks = np.concatenate([ranges.rank, ranges.rank[fold]])
    nonempty = np.flatnonzero(lows < highs)
    order = nonempty[np.argsort(lows[nonempty], kind="stable")]
    return lows[order], highs[order], ranks[order]
