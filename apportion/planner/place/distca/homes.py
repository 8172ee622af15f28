"""Sequential homes (DistCA, section 4.1 and Appendix B): ranks are filled one after another, and hold a head and its
mirror image of a causal sequence that is cut.

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

# Slack of homes beyond the fullest rank's share without a cap: 1 %, on either side of its range.
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
    alone = np.bincount(seq, minlength=len(begin)) == 1
    rows = (bands[:, 0] == begin[seq]) & (bands[:, 1] == end[seq])
    keys = (bands[:, 2] == begin[seq]) & (bands[:, 3] == end[seq])
    diagonal = (bands[:, 4] == 0) & (bands[:, 5] >= end[seq] - begin[seq] - 1)
    plain = np.zeros(len(begin), np.bool_)
    plain[seq[rows & keys & diagonal]] = True
    found: Bools = plain & alone
    return found


def sequential_homes(problem: Problem, folded: Bools, granularity: int) -> Ranges:
    """Every sequence's home ranges, in the order of sequences and steps.

    folded: bool [sequences], True to walk from both ends. Ranks get shares of their allowed tokens in proportion to
    their caps, equal for equal ranks. A share's end moves to the end of a sequence, else to a multiple of `granularity`
    rows, if the caps leave room. Sequences with `home_ranks` are placed first, those with the fewest ranks before
    others; the ratio of tokens to caps is as even as that order allows.
    """
    used, parts = np.zeros(problem.ranks, np.int64), []
    for members, ranks in _groups(problem):
        lengths = problem.batch.lengths[members]
        share = _water_filled(used[ranks], int(lengths.sum()), problem.token_caps[ranks])
        slack = _slack(problem, used[ranks] + share, problem.token_caps[ranks])
        cuts = _move_cuts(
            np.cumsum(share)[:-1], lengths, slack, granularity * np.where(folded[members], 2, 1)
        )
        part = _parts(lengths, cuts)
        parts.append(Ranges(members[part.seq], part.a, part.b, ranks[part.rank]))
        np.add.at(used, parts[-1].rank, part.b - part.a)
    seq, a, b, rank = (
        np.concatenate([getattr(p, name) for p in parts]) for name in ("seq", "a", "b", "rank")
    )
    ranges = Ranges(seq, a, b, rank)
    return ranges if len(parts) == 1 else ranges.take(np.lexsort((a, seq)))


def _groups(problem: Problem) -> Iterator[tuple[Ints, Ints]]:
    """(sequences, their allowed ranks), fewest ranks first."""
    everywhere, homes = tuple(range(problem.ranks)), problem.batch.home_ranks
    if not homes:
        yield np.arange(len(problem.batch.lengths)), np.arange(problem.ranks)
        return
    members: dict[tuple[int, ...], list[int]] = {}
    for sequence in range(len(problem.batch.lengths)):
        members.setdefault(tuple(sorted(homes.get(sequence, everywhere))), []).append(sequence)
    for ranks in sorted(members, key=lambda ranks: (len(ranks), ranks)):
        yield np.array(members[ranks]), np.array(ranks)


def _water_filled(used: Ints, tokens: int, caps: Ints) -> Ints:
    """int64 [ranks]: shares of `tokens` that level the ratio of tokens to caps (water-filling)."""
    full = used / caps
    order = np.argsort(full, kind="stable")
    sums, room = np.cumsum(used[order]), np.cumsum(caps[order])
    level = (tokens + sums) / room  # the level if only the first ranks received any
    filled = int(np.flatnonzero(level >= full[order])[-1]) + 1
    chosen = np.sort(order[:filled])
    total = tokens + int(sums[filled - 1])
    share = np.zeros(len(used), np.int64)
    share[chosen] = np.maximum(total * caps[chosen] // int(room[filled - 1]) - used[chosen], 0)
    share[chosen[: tokens - int(share.sum())]] += 1
    return share


def _slack(problem: Problem, held: Ints, caps: Ints) -> int:
    """Largest shift of a share's end either way; depends only on given homes, if there are any."""
    if problem.policy.token_cap is None and problem.batch.home_ranks:
        return int(held.max()) // SLACK
    return max(0, int((caps - held).min()) // 2)


def _move_cuts(cuts: Ints, lengths: Ints, slack: int, grain: Ints) -> Ints:
    """The cuts of concatenated sequences, each moved by at most `slack`; grain: int64 [sequences] steps."""
    edges = offsets(lengths)
    seq = np.minimum(np.searchsorted(edges, cuts, "right") - 1, len(lengths) - 1)
    edge = np.where(cuts - edges[seq] <= edges[seq + 1] - cuts, edges[seq], edges[seq + 1])
    whole = edges[seq] + np.rint((cuts - edges[seq]) / grain[seq]).astype(np.int64) * grain[seq]
    moved = np.where(np.abs(whole - cuts) <= slack, np.minimum(whole, edges[seq + 1]), cuts)
    moved = np.where(np.abs(edge - cuts) <= slack, edge, moved)
    return np.maximum.accumulate(moved)


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
    """(low, high, rank): the global tokens [low, high) of the ranges, one or two each, sorted.

    starts: int64 [sequences + 1], the first token of each sequence; folded: bool [sequences].
    """
    begin, end, fold = starts[ranges.seq], starts[ranges.seq + 1], folded[ranges.seq]
    low = begin + np.where(fold, (ranges.a + 1) // 2, ranges.a)
    high = begin + np.where(fold, (ranges.b + 1) // 2, ranges.b)
    tail_low, tail_high = (end - ranges.b // 2)[fold], (end - ranges.a // 2)[fold]
    lows, highs = np.concatenate([low, tail_low]), np.concatenate([high, tail_high])
    ranks = np.concatenate([ranges.rank, ranges.rank[fold]])
    some = np.flatnonzero(lows < highs)
    order = some[np.argsort(lows[some], kind="stable")]
    return lows[order], highs[order], ranks[order]
