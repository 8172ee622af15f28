"""Groups of unequal size, each with its own sequences; heads are split inside a group (FlexSP, section 4).

ranks    0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13 | 14 | 15
groups   the longest     |  long     | ...   |    |        powers of two, largest first, so each starts at a multiple
                                                           of its size and small ones stay in a node
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from apportion.ir.arrays import Floats, Ints, offsets
from apportion.ir.errors import CapacityError
from apportion.ir.request.cluster import Cluster
from apportion.ir.tensors import PHASES, SIDES, TRAVELLING
from apportion.planner.pack import LINEAR_FORWARDS
from apportion.planner.problem import MOST_TOKENS, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_areas, row_weights
from apportion.planner.shard.refusals import refuse_home_ranks
from apportion.planner.solvers.contracts import Grouping, GroupingProblem
from apportion.planner.solvers.use import GroupingSolver

# Default capacity of a rank, a multiple of the mean: uncut sequences need room. FlexSP derives the limit from the
# activation memory of all layers, which a plan of attention does not know.
_ROOM = 2


@dataclass(frozen=True)
class FlexSp(PlacePass):
    """Group sizes and sequences by a solver of kind `grouping`, minimizing the slowest group's time: attention and the
    all-to-all of its heads, forward and backward.

    capacity: largest number of tokens per rank, so that a group of P ranks holds P times as many; default the policy's
    token cap, else twice the mean, or more if the longest sequence needs it. linear: include the linear layers' time,
    as in FlexSP's cost model: groups are then balanced by whole layers instead of attention. solver: its `steps` are
    nodes of a search tree. The solver assumes equal ranks; if speeds differ, of the groups of one size those with the
    longest times get the fastest ranks. Raises ConfigError, CapacityError, MissingDependencyError, UnknownNameError.
    """

    capacity: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None
    linear: bool = False
    solver: GroupingSolver = GroupingSolver("ilp")
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "flexsp")
        axis = problem.batch.starts
        case = grouping_problem(problem, self.capacity, linear=self.linear)
        mix = self.solver(case)
        if not mix.termination.solved:
            raise _no_mix_error(case, mix)
        group, first = _lay_out(problem, mix)
        weight = row_weights(problem, axis)
        return Placement(axis, group, weight, _bound(problem, weight, case.degrees), first, mix.termination)


def grouping_problem(
    problem: Problem, capacity: int | None = None, *, linear: bool = False
) -> GroupingProblem:
    """Builds the solver's problem; times are microseconds over all layers, forward and backward."""
    degrees, lengths = feasible_degrees(problem), problem.batch.lengths
    times = sum(
        problem.layers[kind] * _sequence_us(problem, lengths, row_areas(bands, problem.batch.starts), degrees)
        for kind, bands in problem.bands.items()
    )
    if linear:
        layers = sum(problem.layers.values())
        times = times + layers * LINEAR_FORWARDS * problem.cost.linear_us(lengths)[:, None] / degrees
    cap = capacity or problem.policy.token_cap or _default_capacity(problem, int(degrees[-1]))
    if problem.policy.token_cap is not None:
        cap = min(cap, problem.policy.token_cap)
    return GroupingProblem(np.asarray(times), lengths, degrees, problem.ranks, cap)


def feasible_degrees(problem: Problem) -> Ints:
    """int64 [degrees]: the powers of two that divide the query heads and do not straddle node boundaries: they divide
    the ranks of a node, or are larger than a node."""
    cluster, heads = problem.cluster, problem.model.q_heads
    powers = [1 << i for i in range(problem.ranks.bit_length()) if 1 << i <= problem.ranks]
    local = cluster.ranks_per_node
    return np.array([p for p in powers if heads % p == 0 and (local % p == 0 or p > local)], np.int64)


def _default_capacity(problem: Problem, largest: int) -> int:
    mean, longest = problem.batch.tokens / problem.ranks, int(problem.batch.lengths.max())
    return max(int(_ROOM * mean), -(-longest // largest), 1)


def _sequence_us(problem: Problem, lengths: Ints, pairs: Ints, degrees: Ints) -> Floats:
    """float64 [sequences, degrees]: microseconds per layer of each sequence in a group of each degree. Fixed costs of
    instructions (launches, latencies) are omitted: a group pays them once for all its sequences."""
    model, cost = problem.model, problem.cost
    times = np.zeros((len(lengths), len(degrees)))
    for c, degree in enumerate(degrees.tolist()):
        q_heads, kv_heads = model.q_heads // degree, max(1, model.kv_heads // degree)
        for phase in PHASES:
            times[:, c] += cost.attention_us(phase, lengths, lengths, np.maximum(pairs, 1), q_heads, kv_heads)
            times[:, c] += lengths / degree * _row_us(problem, phase, degree, q_heads, kv_heads)
    return times


def _row_us(problem: Problem, phase: str, degree: int, q_heads: int, kv_heads: int) -> float:
    """Microseconds of all-to-all in a group, per row of a rank; transfers inside and between nodes overlap."""
    heads = {"query": q_heads, "key": kv_heads}
    row = sum(
        problem.model.sent_bytes(tensor, heads[side]) for side in SIDES for tensor in TRAVELLING[side, phase]
    )
    cluster = problem.cluster
    local = min(degree, cluster.ranks_per_node)
    return max(
        (local - 1) * row / (cluster.intra_gbs * 1e3), (degree - local) * row / _inter_bytes_per_us(cluster)
    )


def _inter_bytes_per_us(cluster: Cluster) -> float:
    """A rank's share of its node's NICs, bytes per microsecond."""
    return cluster.inter_gbs * 1e3 * cluster.nics_per_node / cluster.ranks_per_node


def _lay_out(problem: Problem, mix: Grouping) -> tuple[Ints, Ints]:
    """(group of each sequence, first rank of each group and the end), with idle ranks in groups of one at the end."""
    idle = problem.ranks - int(mix.degree.sum())
    sizes = np.append(mix.degree, np.ones(idle, np.int64))
    first = offsets(sizes)
    if problem.cluster.speeds is None:
        return mix.group, first
    slowest = np.minimum.reduceat(problem.speeds, first[:-1])
    time = np.append(mix.time, np.zeros(idle))
    slots, order = np.lexsort((-slowest, -sizes)), np.lexsort((-time, -sizes))
    slot = np.empty(len(sizes), np.int64)
    slot[order] = slots
    return slot[mix.group], first


def _bound(problem: Problem, weight: Ints, degrees: Ints) -> float:
    """Bound on the busiest rank's pairs over its speed: the mean, or the heaviest sequence in the largest group."""
    mean = float(weight.sum()) / float(problem.speeds.sum())
    return max(mean, float(weight.max(initial=0)) / (int(degrees[-1]) * float(problem.speeds.max())))


def _no_mix_error(case: GroupingProblem, mix: Grouping) -> CapacityError:
    return CapacityError(
        f"no groups found for {len(case.sizes)} sequences of {int(case.sizes.sum())} tokens on {case.ranks} ranks of "
        f"at most {case.cap} tokens each, with degrees {case.degrees.tolist()} ({mix.termination}): raise "
        f"token_cap or capacity, give more nodes, or use a recipe that cuts sequences, such as fcp"
    )
