"""Token homes of DCP: common to all kinds and both phases, chosen for the kind with the most work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError
from apportion.planner.place.dcp.cells import Heads, Pairs, hyperedges
from apportion.planner.place.dcp.links import link_gbs, swap_homes
from apportion.planner.problem import Problem, Shards, exact_sums
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.contracts import HypergraphProblem, PartitionProblem, caps_of
from apportion.planner.solvers.hypergraph import solver as hypergraph
from apportion.planner.solvers.hypergraph.tokens import SPREAD, place_tokens
from apportion.planner.solvers.partition.lpt import solve_near
from apportion.planner.solvers.status import Budget
from apportion.planner.solvers.use import HypergraphSolver
from apportion.planner.tasks.cells import cut_cells

#: candidate weights of compute against bytes, see `place_tokens`
SPREADS = (SPREAD, SPREAD * 2, SPREAD / 2)
# Approximate limit on block pairs per rank, and a total that is always allowed; beyond both, blocks are joined. Of the
# limits 32 to 256, 64 moved the fewest bytes on 32 and 64 ranks; solving takes about 3 ms per thousand pairs.
PAIRS, FEW_PAIRS = 64, 5120
# heavy blocks are cut at multiples of the kernels' tile, or, if they are short, of 16 rows or 1
_STEPS = (128, 16, 1)


@dataclass(frozen=True)
class Blocks:
    """Blocks and their homes. starts: int64 [blocks + 1]; home: int64 [blocks], -1: not yet assigned."""

    starts: Ints
    home: Ints

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    def cut(self, at: Ints) -> Blocks:
        """The blocks, also cut at these tokens; parts inherit the home."""
        starts = np.union1d(self.starts, at)
        return Blocks(starts, self.home[np.searchsorted(self.starts, starts[:-1], "right") - 1])

    def halve_heaviest(self, pairs: Sequence[Pairs]) -> Blocks:
        """In pairs with more than half of the heaviest pair's work, halves each block more than half as long as the
        other; returns the same blocks if none can be cut."""
        heaviest = max((int(kind_pairs.work.max()) for kind_pairs in pairs if len(kind_pairs)), default=0)
        if heaviest <= 1:
            return self
        is_cut = np.zeros(len(self.home), bool)
        for kind_pairs in pairs:
            index = np.flatnonzero(2 * kind_pairs.work > heaviest)
            q, k = kind_pairs.q[index], kind_pairs.k[index]
            is_cut[q[2 * self.lengths[q] > self.lengths[k]]] = True
            is_cut[k[2 * self.lengths[k] > self.lengths[q]]] = True
        return self.cut(_middles(self.starts, self.lengths, np.flatnonzero(is_cut & (self.lengths > 1))))

    def pairs(self, bands: Ints) -> Pairs:
        """The block pairs of one kind's mask."""
        return Pairs.of(cut_cells(bands, self.starts), len(self.home))

    def case(
        self,
        problem: Problem,
        pairs: Pairs,
        heads: Heads,
        phase: str,
        compute: tuple[float, float],
        tokens: tuple[float, float],
    ) -> HypergraphProblem:
        """The hypergraph of one kind and phase, with no homes fixed."""
        edges = hyperedges(pairs, self.lengths, heads, heads.bytes_of(problem.model, phase))
        no_work, work = np.zeros(len(self.home), np.int64), np.tile(pairs.work, heads.groups)
        return HypergraphProblem(
            np.concatenate([no_work, work]),
            np.concatenate([self.lengths, np.zeros(len(work), np.int64)]),
            edges.ptr,
            edges.pins,
            edges.price,
            problem.cluster.nodes,
            problem.cluster.ranks_per_node,
            compute,
            _capped_tolerances(problem, tokens),
            speeds=problem.speeds,
            room=problem.token_caps / problem.token_cap,
        )


def homes(
    problem: Problem,
    shards: Shards,
    compute: tuple[float, float],
    tokens: tuple[float, float],
    tries: int,
    groups: int,
    solver: HypergraphSolver,
) -> Blocks:
    """A home for every block of the shards, which are cut if no rank has room for a whole one. The best of several
    candidates, each refined together with compute: one per weight of compute against bytes (the first `tries` of
    SPREADS), LPT's, and the solver's unless it is `greedy`. compute, tokens: tolerances of (nodes, ranks) over their
    share; groups: head groups. Raises CapacityError."""
    kind = max(problem.bands, key=lambda name: problem.layers[name] * problem.batch.area(name))
    starts = coarse_starts(problem, shards.starts, groups)
    blocks, room = Blocks(starts, np.full(len(starts) - 1, -1, np.int64)), _Room(problem, tokens)
    if problem.batch.home_ranks:
        blocks = _restricted_homes(problem, blocks, room)

    def case(trial: Blocks) -> HypergraphProblem:
        pairs = trial.pairs(problem.bands[kind])
        free = np.full(len(pairs), -1, np.int64)
        unfixed = trial.case(problem, pairs, Heads(1, 1), "backward", compute, tokens)
        return replace(unfixed, fixed=np.concatenate([trial.home, free]))

    start, count = case(blocks), len(blocks.home)
    assignments = [place_tokens(start, spread)[:count] for spread in SPREADS[:tries]]
    assignments.append(_lpt_homes(problem, blocks, room))
    if solver.name != "greedy":
        assignments.append(solver(start).rank[:count])
    candidates = [_fill_ranks(Blocks(blocks.starts, home), room, None) for home in assignments]
    return min((_refine(problem, option, case(option)) for option in candidates), key=itemgetter(0))[1]


def _lpt_homes(problem: Problem, blocks: Blocks, room: _Room) -> Ints:
    """int64 [blocks]: homes by LPT, which balances compute if no queries travel; -1 if no rank has room."""
    sequence = np.searchsorted(problem.batch.starts, blocks.starts[:-1], "right") - 1
    weights = row_weights(problem, blocks.starts)
    zones = np.arange(problem.ranks) // problem.cluster.ranks_per_node
    case = PartitionProblem(
        weights, blocks.lengths, room.ranks, problem.speeds, families=sequence, zones=zones
    )
    return np.where(blocks.home < 0, solve_near(case, Budget()).bin, blocks.home)


def _refine(problem: Problem, blocks: Blocks, case: HypergraphProblem) -> tuple[float, Blocks]:
    """Refines homes together with compute; returns their cost (lower is better) and the homes. The cost is the longest
    plus the mean link time of the ranks, after exchanges of blocks; infinite if the initial ranks break a limit."""
    rank, free = hypergraph.initial_ranks(case), movable(problem, blocks.starts)
    if not hypergraph.is_valid(case, rank):
        return float("inf"), blocks
    fixed = case.required.copy()
    fixed[: len(free)][free] = -1
    rank = hypergraph.refine_jointly(replace(case, fixed=fixed), rank)
    _, times = swap_homes([(case, rank, len(free))], free, link_gbs(problem))
    return float(times.max() + times.mean()), Blocks(blocks.starts, rank[: len(free)])


def movable(problem: Problem, starts: Ints) -> Bools:
    """bool [blocks]: True for blocks whose sequence has no home_ranks."""
    sequence = np.searchsorted(problem.batch.starts, starts[:-1], "right") - 1
    return ~np.isin(sequence, [*problem.batch.home_ranks])


def coarse_starts(problem: Problem, starts: Ints, groups: int) -> Ints:
    """The remaining starts, int64 [n], after joining neighbouring blocks of a sequence, so that the block pairs of all
    head groups stay, if possible, within the larger of PAIRS per rank and FEW_PAIRS in total."""
    limit = max(FEW_PAIRS, PAIRS * problem.ranks) // groups
    area = max(int(problem.batch.area(kind)) for kind in problem.bands)
    size = max(1, int((area / max(1, limit)) ** 0.5) // int(np.diff(starts).max()))
    while True:
        merged = _join_blocks(problem, starts, size)
        blocks = Blocks(merged, np.full(len(merged) - 1, -1, np.int64))
        if max(len(blocks.pairs(bands)) for bands in problem.bands.values()) <= limit or size >= len(starts):
            return merged
        size += max(1, size // 4)


def _join_blocks(problem: Problem, starts: Ints, size: int) -> Ints:
    """The starts after joining up to `size` blocks of one sequence, as evenly as possible."""
    if size == 1:
        return starts
    edges, blocks = problem.batch.starts, len(starts) - 1
    first = np.searchsorted(edges, starts[:-1], "right") - 1
    is_mixed = starts[1:] > edges[first + 1]  # blocks with several sequences
    is_first = is_mixed | np.append(True, (first[1:] != first[:-1]) | is_mixed[:-1])
    begin = np.flatnonzero(is_first)
    run = np.cumsum(is_first) - 1
    count = np.diff(np.append(begin, blocks))
    parts = -(-count // size)[run]
    index, count = np.arange(blocks) - begin[run], count[run]
    is_start = is_first | (index * parts // count != (index - 1) * parts // count)
    return np.append(starts[:-1][is_start], starts[-1])


def _capped_tolerances(problem: Problem, slack: tuple[float, float]) -> tuple[float, float]:
    """The tolerances of tokens, limited by the policy's cap."""
    if problem.policy.token_cap is None:
        return slack
    limit = max(0.0, problem.token_cap * problem.ranks / problem.batch.tokens - 1)
    node = min(slack[0], limit)
    return node, min(slack[1], (1 + limit) / (1 + node) - 1)


class _Room:
    """Token capacity of nodes and ranks."""

    def __init__(self, problem: Problem, slack: tuple[float, float]) -> None:
        slack, room = _capped_tolerances(problem, slack), problem.token_caps / problem.token_cap
        self.nodes, self.ranks = caps_of(problem.batch.tokens, slack, room, problem.cluster.nodes)
        self.per_node = problem.cluster.ranks_per_node

    def remaining(self, blocks: Blocks) -> Ints:
        """int64 [ranks]: room of each rank in tokens, ignoring its node's limit."""
        is_placed = blocks.home >= 0
        return self.ranks - exact_sums(blocks.home[is_placed], blocks.lengths[is_placed], len(self.ranks))

    def limited_by_node(self, free: Ints) -> Ints:
        """int64 [ranks]: room of each rank in tokens: `free`, but no more than the room of its node."""
        node_tokens = (self.ranks - free).reshape(-1, self.per_node).sum(1)
        result: Ints = np.minimum(free, np.repeat(self.nodes - node_tokens, self.per_node))
        return result


def _restricted_homes(problem: Problem, blocks: Blocks, room: _Room) -> Blocks:
    """Homes for the blocks of sequences with home_ranks, the most restricted first."""
    sequence = np.searchsorted(problem.batch.starts, blocks.starts[:-1], "right") - 1
    allowed = sorted(set(problem.batch.home_ranks.values()), key=lambda ranks: (len(ranks), ranks))
    for ranks in allowed:
        is_bound = np.isin(sequence, [s for s, home in problem.batch.home_ranks.items() if home == ranks])
        blocks = _fill_ranks(blocks, room, ranks, blocks.starts[:-1][is_bound])
        sequence = np.searchsorted(problem.batch.starts, blocks.starts[:-1], "right") - 1
    return blocks


def _fill_ranks(
    blocks: Blocks, room: _Room, allowed: tuple[int, ...] | None, starts: Ints | None = None
) -> Blocks:
    """Assigns blocks without a home to the emptiest ranks first, cutting blocks that exceed the room.

    allowed: the ranks to use, None: all; starts: int64 [n], first tokens of the blocks to assign, None: all.
    """
    free = room.remaining(blocks)
    ranks = np.arange(len(free)) if allowed is None else np.array(allowed)
    rest = np.flatnonzero(blocks.home < 0) if starts is None else np.searchsorted(blocks.starts, starts)
    cuts: list[tuple[int, int]] = []
    for block in rest.tolist():
        token, end = int(blocks.starts[block]), int(blocks.starts[block + 1])
        while token < end:
            limits = room.limited_by_node(free)[ranks]
            best = int(np.argmax(limits))
            if limits[best] <= 0:
                raise CapacityError(
                    f"{end - token} tokens found no room on ranks {ranks.tolist()[:8]}, which take "
                    f"{room.ranks[ranks].tolist()[:8]}: raise token_cap or epsilon_tokens, or widen home_ranks"
                )
            step = min(end - token, int(limits[best]))
            cuts.append((token, int(ranks[best])))
            token, free[ranks[best]] = token + step, free[ranks[best]] - step
    if not cuts:
        return blocks
    cut = blocks.cut(np.array([token for token, _ in cuts], np.int64))
    home = cut.home.copy()
    home[np.searchsorted(cut.starts, [token for token, _ in cuts])] = [rank for _, rank in cuts]
    return Blocks(cut.starts, home)


def _middles(starts: Ints, lengths: Ints, blocks: Ints) -> Ints:
    """int64 [n]: cut positions that halve these blocks, at a multiple of the largest step of at most a quarter
    block."""
    half = lengths[blocks] // 2
    step = np.select([half >= 2 * size for size in _STEPS[:-1]], _STEPS[:-1], _STEPS[-1])
    return np.asarray(starts[blocks] + half // step * step, np.int64)
