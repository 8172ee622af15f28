"""Cuts the token axis into blocks and ties blocks into pieces (FCP, section 4.1).

sequence   |------------------------------|      |--| |-| |----|
blocks     |   0   |   1   |   2   |  3   |      |    one      |     short neighbours share a block
pieces         A       B       B      A                C             zig-zag pairs if later rows see more keys
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from apportion._core import blocks as core
from apportion.ir.arrays import Floats, Ints, group_of, index_in_group, offsets
from apportion.ir.request.batch import Batch
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner.cost import bands_us
from apportion.planner.options import Count
from apportion.planner.problem import Problem, ShardPass, Shards, exact_sums
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.status import Limit
from apportion.planner.solvers.use import PartitionSolver

# The largest block that `auto` tries: kernels gain little from longer ones (FCP, section 7: 2K on its GPUs).
LARGEST_AUTO_BLOCK = 2048
# Smaller sizes are multiples of the kernels' tile.
AUTO_STEP = 128
# `auto` limits the heaviest piece to this share of the mean load,
AUTO_SHARE = 0.5
# and the excess of LPT's busiest rank over the mean to AUTO_IMBALANCE; otherwise the block shrinks by AUTO_SHRINK,
# until it is at most a step and ranks have AUTO_BLOCKS blocks: further imbalance is not due to large blocks.
AUTO_IMBALANCE, AUTO_SHRINK, AUTO_BLOCKS = 0.01, 0.75, 16
# Limits on a plan's tasks, in total or per rank, whichever is more (half the block makes four times the tasks). At the
# limit `auto` also tries the steps it skipped, and reports remaining imbalance (Limit.TASKS).
AUTO_TASKS, AUTO_TASKS_PER_RANK = 2**20, 2**12


@dataclass(frozen=True)
class Blocks(ShardPass):
    """Fixed blocks of `block` tokens, or (`auto`) the largest for which no piece is heavier than half the mean load and
    LPT's busiest rank is within 1 % of the mean.

    zigzag: tie block i and block m-1-i of a sequence whose last rows see at least twice as many keys as its first.
    solver: of kind partition, to predict the busiest rank.
    """

    block: Count | Literal["auto"] = "auto"
    zigzag: bool = True
    solver: PartitionSolver = PartitionSolver("lpt")

    def __call__(self, problem: Problem) -> Shards:
        if self.block != "auto":
            return cut(problem, self.block, self.zigzag)
        block = LARGEST_AUTO_BLOCK
        while True:
            shards = cut(problem, block, self.zigzag)
            factor, partition = _shrinkage(problem, shards, self.solver)
            if factor == 1 or block == 1:
                return shards if partition is None else replace(shards, solved=(self.solver, partition))
            block = _smaller_block(block, factor)
            if not _affordable(problem, block):
                return self._best_affordable(problem, shards)

    def _best_affordable(self, problem: Problem, last: Shards) -> Shards:
        """The best blocks within the task limit: among the steps, the largest that balance after cutting leftover
        pieces; else the least uneven, with the limit recorded."""
        best, lowest = last, _imbalance(problem, last, self.solver)
        for block in range(LARGEST_AUTO_BLOCK, 0, -AUTO_STEP):
            if not _affordable(problem, block):
                break
            shards = cut(problem, block, self.zigzag)
            imbalance = _imbalance(problem, shards, self.solver)
            if imbalance <= AUTO_IMBALANCE:
                return shards
            if imbalance < lowest:
                best, lowest = shards, imbalance
        return best if lowest <= AUTO_IMBALANCE else replace(best, limit=Limit.TASKS)


def pieces_to_ranks(problem: Problem, shards: Shards, balanced_weight: Ints) -> PartitionProblem:
    """The problem of assigning pieces to ranks, with pieces of a sequence preferably on few nodes. balanced_weight:
    int64 [blocks], the balanced quantity."""
    weights = shards.piece_weights if balanced_weight is shards.weight else shards.per_piece(balanced_weight)
    sizes = shards.per_piece(shards.lengths)
    sequences = np.empty(shards.pieces, np.int64)
    # neighbours that share a block have equal home_ranks (see `_home_groups`), so the first sequence decides
    sequences[shards.piece] = np.searchsorted(problem.batch.starts, shards.starts[:-1], "right") - 1
    homes, nodes = problem.batch.home_ranks, np.arange(problem.ranks) // problem.cluster.ranks_per_node
    allowed = [homes.get(sequence) for sequence in sequences.tolist()] if homes else None
    return PartitionProblem(weights, sizes, problem.token_caps, problem.speeds, allowed, sequences, nodes)


def _imbalance(problem: Problem, shards: Shards, solver: PartitionSolver) -> float:
    """Relative excess of the busiest rank over the mean. `place lpt` fills leftover pieces into the room of the
    lightest ranks; here they count by the mean weight per token of each block."""
    case = pieces_to_ranks(problem, shards, shards.weight)
    weights, sizes, bins = case.weights, case.sizes, solver(case).bin
    is_placed = bins >= 0
    load = exact_sums(bins[is_placed], weights[is_placed], problem.ranks).astype(np.float64)
    free = problem.token_caps - exact_sums(bins[is_placed], sizes[is_placed], problem.ranks)
    missing = np.flatnonzero(~is_placed[shards.piece])
    order = np.argsort(load / problem.speeds, kind="stable")
    ends, edges = np.cumsum(shards.lengths[missing]), offsets(free[order])
    for block, end in zip(missing.tolist(), ends.tolist(), strict=True):
        begin, size = end - int(shards.lengths[block]), int(shards.lengths[block])
        part = np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin)
        load[order] += np.maximum(part, 0) * (float(shards.weight[block]) / size)
    return float((load / problem.speeds).max() * problem.speeds.sum() / max(1, int(weights.sum()))) - 1


def _shrinkage(problem: Problem, shards: Shards, solver: PartitionSolver) -> tuple[float, Partition | None]:
    """The factor by which the block should shrink, 1 if it need not; and the solver's answer, if it ran."""
    case = pieces_to_ranks(problem, shards, shards.weight)
    weights = case.weights
    mean, heaviest = float(weights.sum() / problem.speeds.sum()), float(weights.max())
    if heaviest > AUTO_SHARE * mean:
        return AUTO_SHARE * mean / heaviest, None
    if shards.block_tokens <= min(AUTO_STEP, problem.batch.tokens // (AUTO_BLOCKS * problem.ranks)):
        return 1.0, None
    solution = solver(case)
    bins, is_placed = solution.bin, solution.bin >= 0
    load = exact_sums(bins[is_placed], weights[is_placed], problem.ranks)
    busiest, missing_weight = float((load / problem.speeds).max()), float(weights[~is_placed].sum())
    even = busiest <= (1 + AUTO_IMBALANCE) * mean and missing_weight <= AUTO_IMBALANCE * mean
    return 1.0 if even else AUTO_SHRINK, solution


def _smaller_block(block: int, factor: float) -> int:
    """The block times `factor` (a piece's weight is roughly proportional to its block), in whole steps, and smaller."""
    target = int(block * factor)
    step = next(step for step in (AUTO_STEP, 16, 1) if target >= step or step == 1)
    return max(1, min(target // step * step, block - 1))


def _affordable(problem: Problem, block: int) -> bool:
    pairs = max(problem.batch.area(kind) for kind in problem.batch.kinds)
    return pairs // block**2 <= max(AUTO_TASKS, AUTO_TASKS_PER_RANK * problem.ranks)


def cut(problem: Problem, block: int, zigzag: bool) -> Shards:
    """Blocks of `block` tokens of every sequence; neighbours shorter than a block share one."""
    batch = problem.batch
    starts, owner = core.cut_axis(batch.starts, _home_groups(batch), block)
    weight = row_weights(problem, starts)
    piece = core.tie(owner, weight, np.diff(starts)) if zigzag else np.arange(len(owner))
    return Shards(starts, piece, weight, block)


def _home_groups(batch: Batch) -> Ints:
    """int64 [sequences]: equal numbers for equal `home_ranks`; only sequences with equal ones may share a block."""
    group = np.zeros(len(batch.lengths), np.int64)
    numbers: dict[tuple[int, ...], int] = {}
    for sequence, homes in batch.home_ranks.items():
        group[sequence] = 1 + numbers.setdefault(homes, len(numbers))
    return group


def row_weights(problem: Problem, starts: Ints) -> Ints:
    """int64 [blocks]: `kind_weights` of each kind times its number of layers, summed over kinds."""
    weight = np.zeros(len(starts) - 1, np.int64)
    for kind in problem.bands:
        weight += problem.layers[kind] * kind_weights(problem, kind, starts)
    return weight


def kind_weights(problem: Problem, kind: str, starts: Ints) -> Ints:
    """int64 [blocks]: visible pairs of a kind for the queries of each block, or keys chosen at run time."""
    if kind in problem.chosen_keys:
        return problem.chosen_keys[kind].between(starts[:-1], starts[1:])
    return row_areas(problem.bands[kind], starts)


def row_areas(bands: Ints, starts: Ints) -> Ints:
    """int64 [blocks]: number of pairs of `bands` with queries in each block."""
    return core.row_areas(np.ascontiguousarray(bands), starts)


def row_times(problem: Problem, starts: Ints) -> Ints:
    """int64 [blocks]: nanoseconds at speed 1 of each block: its queries, each band as one task with all heads, and the
    statistics of its home rows; both phases, summed over kinds, each weighted by its number of layers. Kinds that
    choose keys count only the share of the pairs that they choose."""
    model, cost, lengths = problem.model, problem.cost, np.diff(starts)
    statistics = (
        model.row_bytes(Tensor.DO) + model.q_heads * model.output_bytes + model.row_bytes(Tensor.DELTA)
    )
    time = sum(problem.layers.values()) * cost.moved_us(statistics * lengths)
    for kind, bands in problem.joined_bands.items():
        block, part = rows_of_blocks(bands, starts)
        share: Floats | float = 1.0
        if kind in problem.chosen_keys:
            share = kind_weights(problem, kind, starts) / np.maximum(row_areas(bands, starts), 1)
        for phase in PHASES:
            durations = bands_us(cost, model, phase, part)
            time = time + problem.layers[kind] * np.bincount(block, durations, len(lengths)) * share
    return np.rint(1e3 * time).astype(np.int64)


def rows_of_blocks(bands: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """(block, band): every band, int64 [n, 6], cut by query block."""
    first = np.searchsorted(starts, bands[:, 0], "right") - 1
    last = np.searchsorted(starts, bands[:, 1], "left")
    counts = np.maximum(last - first, 0)
    band = group_of(counts)
    block = index_in_group(counts) + first[band]
    part = bands[band]
    part[:, 0] = np.maximum(part[:, 0], starts[block])
    part[:, 1] = np.minimum(part[:, 1], starts[block + 1])
    return block, part
