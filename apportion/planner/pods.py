"""Pods: assigns documents to groups of ranks and plans each group separately, which takes time linear in the ranks.

    ranks   0 .. 1023 | 1024 .. 2047 | 2048 .. 4095        pods are whole, consecutive nodes
    docs    a  b  c   | d  e  f      | g (too long for a pod: two joined), h

Every sequence stays inside one pod, so sharding, placement and, if no rows move before or after attention, scheduling
and lowering treat the pod as a separate cluster. The price: balance between pods is limited by whole sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from apportion.ir.arrays import Floats, Ints, offsets
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.tensors import PHASES
from apportion.ir.threads import spread
from apportion.planner.options import Count
from apportion.planner.problem import (
    Departure,
    Execution,
    Pass,
    Placement,
    PlacePass,
    Problem,
    ShardPass,
    Shards,
)
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.use import PartitionSolver
from apportion.planner.tasks.cells import Cells, cut_cells

#: ranks of a pod under `auto`: smaller pods hardly speed up planning and are less even
POD_RANKS = 1024


class PodsPass(Pass, Protocol):
    """Shards and places parts of the cluster separately. members: number of real ranks per rank of the problem, more
    than 1 if groups split heads."""

    @abstractmethod
    def __call__(
        self, problem: Problem, members: int, shard: ShardPass, place: PlacePass, threads: int
    ) -> tuple[Shards, Placement]:
        """Returns the blocks of the whole batch and their homes. Raises ConfigError, CapacityError."""
        ...

    @abstractmethod
    def isolated_parts(self, problem: Problem, placement: Placement) -> list[IsolatedPart]:
        """The parts of a placement (made by this step or another) between which no tiles travel."""
        ...


@dataclass(frozen=True)
class IsolatedPart:
    """Ranks from `first` on that share no sequence with others."""

    first: int
    problem: Problem
    placement: Placement


@dataclass(frozen=True)
class Documents(PodsPass):
    """Assigns whole sequences to pods, balanced by pairs, with at most half of the slack of the pods' token caps; the
    other half is for imbalance inside pods. Pods are joined for a sequence larger than a pod's share. If sequences do
    not fit, or are too few, the pod size is doubled, up to all ranks.

    ranks: maximum ranks of a pod, but at least a node; "auto": 1024. solver: of kind partition.
    """

    ranks: Count | Literal["auto"] = "auto"
    solver: PartitionSolver = PartitionSolver("lpt")

    def __call__(
        self, problem: Problem, members: int, shard: ShardPass, place: PlacePass, threads: int
    ) -> tuple[Shards, Placement]:
        """Returns the blocks of the whole batch and their homes. Raises ConfigError, CapacityError."""
        if problem.batch.home_ranks:
            rule = "cannot be kept where pods choose their own sequences"
            remedy = "drop `pods` or the home_ranks"
            raise ConfigError("batch.home_ranks", len(problem.batch.home_ranks), rule, remedy)
        for first in self._pods(problem, members):
            pod_of = self._assign(problem, first) if len(first) > 2 else None
            if pod_of is None:
                continue
            try:
                shards, placement = _plan_pods(problem, first, pod_of, shard, place, threads)
            except CapacityError:  # larger pods have more room
                continue
            return shards, self._with_departures(problem, placement, int(np.diff(first).max()), members)
        shards = shard(problem)
        return shards, self._with_departures(problem, place(problem, shards), problem.ranks, members)

    def _with_departures(
        self, problem: Problem, placement: Placement, largest: int, members: int
    ) -> Placement:
        """Adds a departure if pods are larger than requested. largest: ranks of the largest pod."""
        limit = max(self._max_ranks, problem.cluster.ranks_per_node * members)
        if largest * members <= limit or next(self._pods(problem, members), None) is None:
            return placement
        reason = "whole sequences do not fit pods this small, or are too few"
        departure = Departure("recipe.pods.documents.ranks", limit, largest * members, reason)
        return replace(placement, departures=(*placement.departures, departure))

    def isolated_parts(self, problem: Problem, placement: Placement) -> list[IsolatedPart]:
        """Splits the placement into the smallest pods such that no sequence spans two."""
        first = next(self._pods(problem, 1), None)
        if first is None or placement.groups is not None:
            return []
        lowest, highest = _reach(problem, placement)
        coverage = np.zeros(problem.ranks + 1, np.int64)
        np.add.at(coverage, lowest + 1, 1)
        np.add.at(coverage, highest + 1, -1)
        first = first[np.cumsum(coverage)[first] == 0]
        pod_of = np.searchsorted(first, lowest, "right") - 1
        if len(first) < 3 or not np.bincount(pod_of, minlength=len(first) - 1).all():
            return []
        return _split_parts(problem, placement, first, pod_of)

    @property
    def _max_ranks(self) -> int:
        return POD_RANKS if self.ranks == "auto" else self.ranks

    def _pods(self, problem: Problem, members: int) -> Iterator[Ints]:
        """Yields int64 [pods + 1]: first ranks and the end; fewer pods each time, one if long sequences need more."""
        cluster = problem.cluster
        pods = -(-cluster.nodes // max(1, self._max_ranks // (cluster.ranks_per_node * members)))
        while pods > 1:
            yield _join_pods(problem, np.arange(pods + 1) * cluster.nodes // pods * cluster.ranks_per_node)
            pods //= 2

    def _assign(self, problem: Problem, first: Ints) -> Ints | None:
        """int64 [sequences]: the pod of each; None if they do not fit, or leave a pod empty."""
        caps = np.add.reduceat(problem.token_caps, first[:-1])
        limits = np.minimum(caps, (caps + _shares(problem, first)) / 2)
        weights, sizes = row_weights(problem, problem.batch.starts), problem.batch.lengths
        speeds = np.add.reduceat(problem.speeds, first[:-1])
        bins = self.solver(PartitionProblem(weights, sizes, limits.astype(np.int64), speeds)).bin
        counts = np.bincount(bins[bins >= 0], minlength=len(speeds))
        return None if (bins < 0).any() or not counts.all() else bins


def _shares(problem: Problem, first: Ints) -> Floats:
    """float64 [pods]: each pod's share of the tokens, by the rates of its ranks."""
    shares: Floats = np.add.reduceat(problem.token_shares, first[:-1])
    return shares


def _join_pods(problem: Problem, first: Ints) -> Ints:
    """Joins pods, from the first on, so that each sequence with more than a pod's share of pairs or of tokens, the
    longest first, has its own pod; joins all pods if there are too few for that."""
    batch, weights = problem.batch, row_weights(problem, problem.batch.starts)
    pods = len(first) - 1
    pod_counts = pods * np.maximum(weights / max(weights.sum(), 1), batch.lengths / batch.tokens)
    sizes = np.sort(np.ceil(pod_counts[pod_counts > 1]))[::-1].astype(np.int64)
    ends = np.cumsum(sizes)
    if not len(ends) or ends[-1] > pods:
        return first if not len(ends) else first[[0, -1]]
    index = np.concatenate([[0], ends, np.arange(ends[-1] + 1, pods + 1)])
    return np.take(first, index)


def _plan_pods(
    problem: Problem, first: Ints, pod_of: Ints, shard: ShardPass, place: PlacePass, threads: int
) -> tuple[Shards, Placement]:
    """Plans each pod and merges blocks and homes. pod_of: int64 [sequences], the pod of each."""

    def plan_pod(pod: int) -> _Pod:
        index = np.flatnonzero(pod_of == pod)
        part = _part(problem, int(first[pod]), int(first[pod + 1]), index)
        shards = shard(part)
        return _Pod(part, index, int(first[pod]), shards, place(part, shards))

    pods = spread(plan_pod, range(len(first) - 1), threads)
    return _all_shards(problem, pods), _all_homes(problem, pods)


def _part(problem: Problem, begin: int, end: int, index: Ints) -> Problem:
    """The subproblem of sequences `index` on the ranks from begin to end, with their caps."""
    cluster, speeds = problem.cluster, problem.cluster.speeds
    part_cluster = replace(
        cluster,
        nodes=(end - begin) // cluster.ranks_per_node,
        speeds=None if speeds is None else speeds[begin:end],
    )
    return replace(
        problem,
        batch=problem.batch.take(index),
        cluster=part_cluster,
        rates=None if problem.rates is None else problem.rates[begin:end],
        caps=tuple(problem.token_caps[begin:end].tolist()),
    )


@dataclass(frozen=True)
class _Pod:
    """A pod with its shards and homes. index: int64, its sequences in the batch; first: its first rank."""

    problem: Problem
    index: Ints
    first: int
    shards: Shards
    placement: Placement

    @property
    def bins(self) -> int:
        """Number of placement bins: ranks, or groups of ranks."""
        groups = self.placement.groups
        return self.problem.ranks if groups is None else len(groups) - 1

    def cut(self, batch: Batch, starts: Ints) -> tuple[Ints, Ints]:
        """Cuts the blocks between `starts`, int64 [blocks + 1], also at sequence boundaries, since a pod's sequences
        need not be adjacent in the batch. Returns each part's block, and its first token in the whole `batch`."""
        pod_starts = self.problem.batch.starts
        cuts = np.union1d(starts, pod_starts)[:-1]
        sequence = np.searchsorted(pod_starts, cuts, "right") - 1
        token = batch.starts[self.index[sequence]] + cuts - pod_starts[sequence]
        return np.searchsorted(starts, cuts, "right") - 1, token

    def sequences(self, cells: Cells) -> Ints:
        """int64 [cells]: the sequence of each cell, as an index in the batch."""
        return self.index[np.searchsorted(self.problem.batch.starts, cells.q0, "right") - 1]

    def execution(self, kind: str, phase: str, cells: Cells) -> Execution:
        """The rank of each cell: by default the home of its query block."""
        if self.placement.execution is not None:
            return self.placement.execution[kind, phase]
        return Execution(np.tile(self.placement.home[cells.q], (self.placement.head_groups, 1)))


def _all_shards(problem: Problem, pods: list[_Pod]) -> Shards:
    first, piece, pieces = [], [], 0
    for pod in pods:
        block, token = pod.cut(problem.batch, pod.shards.starts)
        first.append(token)
        piece.append(pod.shards.piece[block] + pieces)
        pieces += pod.shards.pieces
    starts, order = _merge_starts(problem, first)
    limit = next((pod.shards.limit for pod in pods if pod.shards.limit is not None), None)
    block_tokens = max(pod.shards.block_tokens for pod in pods)
    return Shards(starts, np.concatenate(piece)[order], row_weights(problem, starts), block_tokens, limit)


def _merge_starts(problem: Problem, first: list[Ints]) -> tuple[Ints, Ints]:
    """int64 [blocks + 1], the merged starts of all pods' blocks; and int64 [blocks], their order."""
    tokens = np.concatenate(first)
    order = np.argsort(tokens, kind="stable")
    return np.append(tokens[order], problem.batch.tokens), order


def _all_homes(problem: Problem, pods: list[_Pod]) -> Placement:
    """Merges placements. The bound is only the mean load, since sequences may go to any pod."""
    first, home = list[Ints](), list[Ints]()
    groups: list[Ints] = [np.zeros(1, np.int64)]
    bases = np.cumsum([0, *(pod.bins for pod in pods)])
    for pod, base in zip(pods, bases.tolist(), strict=False):
        block, token = pod.cut(problem.batch, pod.placement.starts)
        first.append(token)
        home.append(pod.placement.home[block] + base)
        if pod.placement.groups is not None:
            groups.append(pod.placement.groups[1:] + pod.first)
    starts, order = _merge_starts(problem, first)
    weight = row_weights(problem, starts)
    return Placement(
        starts,
        np.concatenate(home)[order],
        weight,
        bound=float(weight.sum() / problem.speeds.sum()),
        groups=np.concatenate(groups) if len(groups) > 1 else None,
        execution=_all_executions(pods),
        head_groups=pods[0].placement.head_groups,
        departures=tuple(dict.fromkeys(departure for pod in pods for departure in pod.placement.departures)),
    )


def _all_executions(pods: list[_Pod]) -> dict[tuple[str, str], Execution] | None:
    """Merges executions. Cells are sorted by band, hence by sequence; a sequence's cells keep the order of its pod."""
    if all(pod.placement.execution is None for pod in pods):
        return None
    executions: dict[tuple[str, str], Execution] = {}
    for kind in pods[0].problem.batch.kinds:
        cells = [cut_cells(pod.problem.batch.bands(kind), pod.placement.starts) for pod in pods]
        sequence = np.concatenate([pod.sequences(parts) for pod, parts in zip(pods, cells, strict=True)])
        order, previous = np.argsort(sequence, kind="stable"), list[Execution]()
        for phase in PHASES:
            parts = [pod.execution(kind, phase, piece) for pod, piece in zip(pods, cells, strict=True)]
            if previous and all(
                part is other or pod.placement.execution is None
                for part, other, pod in zip(parts, previous, pods, strict=True)
            ):
                executions[kind, phase] = executions[kind, PHASES[0]]
            else:
                executions[kind, phase] = _merge_execution(pods, parts, order)
            previous = parts
    return executions


def _merge_execution(pods: list[_Pod], items: list[Execution], order: Ints) -> Execution:
    rank = np.concatenate([item.rank + pod.first for item, pod in zip(items, pods, strict=True)], 1)
    division = None
    if any(item.division is not None for item in items):
        parts = [np.zeros_like(item.rank) if item.division is None else item.division for item in items]
        division = np.concatenate(parts, 1)[:, order]
    return Execution(rank[:, order].astype(np.int32), division)


# ---------------------------------------------------------------------------------------------- splitting into parts


def _reach(problem: Problem, placement: Placement) -> tuple[Ints, Ints]:
    """int64 [sequences] twice: the first and the last rank that holds or computes part of each."""
    starts = problem.batch.starts
    cuts = np.union1d(placement.starts, starts)[:-1]
    home = placement.home[np.searchsorted(placement.starts, cuts, "right") - 1]
    first = np.searchsorted(cuts, starts[:-1])
    lowest, highest = np.minimum.reduceat(home, first), np.maximum.reduceat(home, first)
    for (kind, _), execution in (placement.execution or {}).items():
        cells = cut_cells(problem.batch.bands(kind), placement.starts)
        sequence = np.searchsorted(starts, cells.q0, "right") - 1
        np.minimum.at(lowest, sequence, execution.rank.min(0))
        np.maximum.at(highest, sequence, execution.rank.max(0))
    return lowest, highest


def _split_parts(problem: Problem, placement: Placement, first: Ints, pod_of: Ints) -> list[IsolatedPart]:
    """Splits a placement into the pods' parts. pod_of: int64 [sequences], the pod of each."""
    pod_of_block = np.searchsorted(first, placement.home, "right") - 1
    executions = _split_executions(problem, placement, first)
    parts = []
    for pod, (begin, end) in enumerate(zip(first[:-1].tolist(), first[1:].tolist(), strict=True)):
        blocks = np.flatnonzero(pod_of_block == pod)
        local = replace(
            placement,
            starts=offsets(placement.lengths[blocks]),
            home=placement.home[blocks] - begin,
            weight=placement.weight[blocks],
            execution=executions[pod],
        )
        parts.append(IsolatedPart(begin, _part(problem, begin, end, np.flatnonzero(pod_of == pod)), local))
    return parts


def _split_executions(
    problem: Problem, placement: Placement, first: Ints
) -> list[dict[tuple[str, str], Execution] | None]:
    """The execution of each pod, None if the placement has none."""
    pods = len(first) - 1
    if placement.execution is None:
        return [None] * pods
    result: list[dict[tuple[str, str], Execution] | None] = []
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        parts, pod_executions = dict[int, Execution](), dict[tuple[str, str], Execution]()
        for key, execution in placement.execution.items():
            if id(execution) not in parts:
                in_part = (execution.rank[0] >= begin) & (execution.rank[0] < end)
                division = None if execution.division is None else execution.division[:, in_part]
                parts[id(execution)] = Execution(execution.rank[:, in_part] - np.int32(begin), division)
            pod_executions[key] = parts[id(execution)]
        result.append(pod_executions)
    return result
