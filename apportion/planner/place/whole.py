"""Whole sequences: data parallelism over ranks, or over groups of ranks that split heads (Ulysses)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import refuse_home_ranks
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.partition.lpt import makespan_bound
from apportion.planner.solvers.use import PartitionSolver

# Without an explicit cap, caps are the smallest of these multiples of a rank's share (at least the longest sequence)
# that the solver can keep.
SLACKS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class Whole(PlacePass):
    """Places whole sequences with LPT (or another solver of kind partition), balancing work over speed; never cuts one.

    An explicit token_cap is obeyed or refused; without one, tokens are as even as the solver can keep them (`SLACKS`).
    Raises ConfigError, CapacityError.
    """

    solver: PartitionSolver = PartitionSolver("lpt")
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "whole")
        starts, lengths = problem.batch.starts, problem.batch.lengths
        _refuse_longer_than_cap(problem)
        weight = row_weights(problem, starts)
        nothing_placed = np.zeros(problem.ranks, np.int64)
        home = spread(problem, weight, lengths, nothing_placed, nothing_placed, self.solver)
        return Placement(starts, home, weight, makespan_bound(weight, problem.speeds))


def _refuse_longer_than_cap(problem: Problem) -> None:
    cap, lengths = problem.policy.token_cap, problem.batch.lengths
    longest = int(lengths.argmax())
    if cap is not None and lengths[longest] > cap:
        raise CapacityError(
            f"sequence {longest} has {lengths[longest]} tokens, more than the token_cap of {cap}, and place pass whole "
            f"cuts no sequence: raise token_cap to {lengths[longest]}, give its ranks a larger group (ulysses degree), "
            f"or use a recipe that cuts sequences, such as usp or fcp"
        )


def spread(
    problem: Problem, weights: Ints, sizes: Ints, load: Ints, used: Ints, solver: PartitionSolver
) -> Ints:
    """int64 [items]: the rank of each whole item, on ranks with existing loads.

    weights, sizes: int64 [items], pairs and tokens; load, used: int64 [ranks], the pairs and tokens already there.
    Raises CapacityError if neither balancing by work nor balancing by tokens meets the policy's token cap.
    """
    cap = problem.policy.token_cap
    if cap is None:
        return _solve_with_least_slack(problem, weights, sizes, load, used, solver)
    for key in (weights, sizes):
        home = _solve_under_caps(
            problem, key, sizes, load if key is weights else used, used, problem.token_caps, solver
        )
        if (home >= 0).all():
            return home
    rest = home < 0
    raise CapacityError(
        f"{rest.sum()} of {len(sizes)} whole sequences ({sizes[rest].sum()} tokens) found no room on {problem.ranks} "
        f"ranks of at most {cap} tokens: raise token_cap (the mean is {problem.batch.tokens / problem.ranks:.0f}) or "
        f"use a recipe that cuts sequences, such as fcp"
    )


def _solve_with_least_slack(
    problem: Problem, weights: Ints, sizes: Ints, load: Ints, used: Ints, solver: PartitionSolver
) -> Ints:
    minimum = int(max(used.max(), sizes.max(initial=0)))
    shares = [np.maximum((slack * problem.token_shares).astype(np.int64), minimum) for slack in SLACKS]
    shares.append(np.full(problem.ranks, problem.batch.tokens + minimum))
    for caps in {option.tobytes(): option for option in shares}.values():
        home = _solve_under_caps(problem, weights, sizes, load, used, caps, solver)
        if (home >= 0).all():
            break
    return home


def _solve_under_caps(
    problem: Problem, weights: Ints, sizes: Ints, load: Ints, used: Ints, caps: Ints, solver: PartitionSolver
) -> Ints:
    """The solver's answer under the ranks' caps, -1 for items that do not fit. Existing loads enter as items with one
    allowed rank."""
    if not used.any():
        return solver(PartitionProblem(weights, sizes, caps, problem.speeds)).bin
    columns = np.concatenate([load, weights]), np.concatenate([used, sizes])
    allowed = [*((rank,) for rank in range(problem.ranks)), *[None] * len(weights)]
    return solver(PartitionProblem(*columns, caps, problem.speeds, allowed)).bin[problem.ranks :]
