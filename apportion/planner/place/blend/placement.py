"""Blend placement: balances work and tokens together by mixing dense and sparse rows on every rank.

Documents are sorted by density, pairs per token. Ranks take from both ends in turn: the densest and the sparsest
remaining tokens, in amounts that give the rank exactly its share of tokens and of pairs.

    sparse  │a a a│b b b b│c c c c . . . │ . . d d│c c│b b│a│  dense      four ranks a, b, c, d

Sparse documents are taken whole, except for a part of the last one's head, whose rows need no remote keys. Dense
documents are taken whole too, except for a part of the last one's tail. A document with too much work for one rank is
spread over as few consecutive ranks as possible, each with a part of its tail and of its head:

    │ a │ b │ c │ . . . . d . . . . │ c │ b │ a │      head: 0.5, as much head as tail; 0, tails only

Most ranks need the head's keys; as these are spread over the document's ranks, all send about the same amount.
Exchanges of rows even out what this procedure (`core/planner/blend.cpp`) leaves uneven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from apportion._core import blend as core
from apportion.ir.arrays import Floats, Ints, changes, group_of
from apportion.ir.masks.bands import area
from apportion.ir.masks.profile import Profile, profile
from apportion.ir.tensors import PHASES
from apportion.planner.cost import bands_us
from apportion.planner.options import Count, Natural, Share
from apportion.planner.place.lpt import lightest_placement
from apportion.planner.problem import Departure, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import refuse_home_ranks

#: the cheapest pair's time in integer units; less if sums would overflow
RESOLUTION = 256
#: relative excess of a rank's work above which rows are exchanged
UNEVEN = 0.002


@dataclass(frozen=True)
class Blend(PlacePass):
    """Mixes the densest and the sparsest documents on each rank.

    Unless `align` moves cuts, tokens are exact: in proportion to speed, rounded to whole tokens, within token_cap. Work
    is proportional to speed up to rounding; with several attention kinds the sum over kinds of layers x busiest rank is
    minimized heuristically. Ignores the cuts of the shards. head: if a document is too heavy for one rank, the fraction
    (0 to 1) of each rank's share that comes from its head, if later rows see more keys. grain: maximum rows of a
    block (0: no limit). weigh: what to balance: pairs, or their time on the request's hardware, where short and
    sparse bands cost more. align: cut documents at multiples of this many rows, halved repeatedly if token caps require
    it, because kernels take as long for a partial tile as for a full one. Raises ConfigError, CapacityError.
    """

    head: Share = 0.5
    grain: Natural = 0
    weigh: Literal["pairs", "time"] = "pairs"
    align: Count = 1
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "blend")
        best = lightest_placement(problem, lambda factor: self._place_weighted(problem, factor))
        if len(problem.bands) == 1 and self.weigh == "pairs":
            return best
        weight = row_weights(problem, best.starts)
        return replace(best, weight=weight, bound=float(weight.sum() / problem.speeds.sum()))

    def _place_weighted(self, problem: Problem, factor: Mapping[str, int]) -> Placement:
        """The placement for pairs of each kind weighted by `factor`."""
        documents, speeds = problem.batch.starts, problem.speeds
        if self.weigh == "pairs":
            rows = _rows(problem, problem.bands, factor)
        else:
            rows = _rows(problem, problem.joined_bands, pair_times(problem, factor))
        caps = None if problem.policy.token_cap is None else problem.token_caps
        tokens = token_shares(problem.batch.tokens, problem.token_rates, caps)
        pairs, speed = int(rows.below[-1]), speeds.sum()
        widest, targets = float(pairs * speeds.max() / speed), pairs * (speeds / speed)
        pieces = core.mix(documents, rows.columns, tokens, speeds, targets, widest, self.head, UNEVEN)
        starts, home = _join_pieces(documents, pieces)
        starts, home, grid = _align_cuts(documents, starts, home, self.align, problem.token_caps)
        departure = Departure("recipe.place.blend.align", self.align, grid, "coarser cuts break token caps")
        starts, home = _split_to_grain(starts, home, self.grain)
        weight = np.diff(rows.pairs_before(starts))
        bound = float(weight.sum() / speeds.sum())
        return Placement(starts, home, weight, bound, departures=(departure,) if grid < self.align else ())


def _rows(problem: Problem, bands: Mapping[str, Ints], factor: Mapping[str, int | Ints]) -> Profile:
    """The work of rows: pairs times the kind's factor (a number, or one per band); kinds that choose keys at run time
    count at most the chosen number of keys per row."""
    rows = profile(
        {kind: band_set for kind, band_set in bands.items() if kind not in problem.chosen_keys}, factor
    )
    for kind, picked in problem.chosen_keys.items():
        rows = rows.plus(picked, int(np.max(factor[kind], initial=1)))
    return rows


def pair_times(problem: Problem, factor: Mapping[str, int]) -> dict[str, Ints]:
    """kind -> int64 [joined bands]: time per pair of each band, run as one task with all heads, both phases, times the
    kind's `factor`. Kinds that choose keys at run time have one time for all bands. The unit keeps all sums exact."""
    model, cost, times, total = problem.model, problem.cost, {}, 1.0
    for kind, bands in problem.joined_bands.items():
        pairs = np.maximum(area(bands), 1)
        durations = sum((bands_us(cost, model, phase, bands) for phase in PHASES), np.zeros(len(bands)))
        if kind in problem.chosen_keys:
            durations = pairs * (durations.sum() / pairs.sum())
        times[kind] = factor[kind] * durations / pairs
        total += float((times[kind] * pairs).sum())
    smallest = min((float(time.min()) for time in times.values() if len(time)), default=1.0)
    unit = min(2**61 / total, RESOLUTION / max(smallest, 1e-12))
    return {kind: np.maximum(np.rint(unit * time), 1).astype(np.int64) for kind, time in times.items()}


def token_shares(tokens: int, rates: Floats, cap: Ints | int | None = None) -> Ints:
    """int64 [ranks]: tokens of each rank in proportion to its rate, at most `cap` (common, or per rank); the excess of
    capped ranks goes to the others."""
    share, free = rates * (tokens / rates.sum()), np.ones(len(rates), bool)
    caps = np.broadcast_to(np.asarray(tokens if cap is None else cap), rates.shape)
    while cap is not None and free.any():
        share[free] = rates[free] * ((tokens - share[~free].sum()) / rates[free].sum())
        exceeds = free & (share > caps)
        if not exceeds.any():
            break
        share[exceeds], free = caps[exceeds], free & ~exceeds
    ends = np.floor(np.round(np.cumsum(share), 6) + 0.5).astype(np.int64)
    ends[-1] = tokens
    return np.diff(ends, prepend=0)


def _join_pieces(documents: Ints, pieces: Ints) -> tuple[Ints, Ints]:
    """Starts int64 [blocks + 1] and homes int64 [blocks]: adjacent pieces of one document on one rank become one block.
    pieces: int64 [3, n], first row, end and rank."""
    low, high, rank = pieces.take(np.argsort(pieces[0]), 1)
    is_first = changes(rank)
    is_first |= documents[np.searchsorted(documents, low)] == low
    return np.append(low[is_first], high[-1]), rank[is_first]


def _align_cuts(documents: Ints, starts: Ints, home: Ints, rows: int, caps: Ints) -> tuple[Ints, Ints, int]:
    """Moves every cut to the nearest multiple of `rows` within its document, with `rows` halved until the caps hold;
    returns starts, homes and the multiple used."""
    document = np.searchsorted(documents, starts, "right") - 1
    offset, end = starts - documents[document], np.append(documents, documents[-1])[document + 1]
    while rows > 1:
        aligned = np.minimum(starts + (offset + rows // 2) // rows * rows - offset, end)
        lengths = np.diff(aligned)
        if (np.bincount(home, lengths, len(caps)) <= caps).all():
            return np.append(aligned[:-1][lengths > 0], aligned[-1]), home[lengths > 0], rows
        rows //= 2
    return starts, home, 1


def _split_to_grain(starts: Ints, home: Ints, grain: int) -> tuple[Ints, Ints]:
    """Splits blocks into parts of at most `grain` rows; parts of one block differ by at most one row."""
    if not grain:
        return starts, home
    lengths = np.diff(starts)
    parts = -(-lengths // grain)
    block = group_of(parts)
    nth = np.arange(len(block)) - (np.cumsum(parts) - parts)[block]
    return np.append(starts[block] + lengths[block] * nth // parts[block], starts[-1]), home[block]
