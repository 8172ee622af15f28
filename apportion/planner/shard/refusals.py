"""Refusals shared by placements."""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.planner.problem import Problem, exact_sums


def refuse_home_ranks(problem: Problem, name: str) -> None:
    """Raises ConfigError for sequences with home_ranks, which the pass `name` does not keep."""
    homes = problem.batch.home_ranks
    if homes:
        raise ConfigError(
            "batch.home_ranks",
            dict(list(homes.items())[:3]),
            f"cannot be kept by the place pass {name}, which does not support home_ranks",
            "leave home_ranks out or use recipe fcp, distca or dcp",
        )


def obey_token_cap(problem: Problem, starts: Ints, home: Ints, name: str) -> None:
    """Raises CapacityError if the policy has a token cap and a rank exceeds it.

    starts: int64 [blocks + 1], home: int64 [blocks].
    """
    if problem.policy.token_cap is None:
        return
    tokens, caps = exact_sums(home, np.diff(starts), problem.ranks), problem.token_caps
    fullest = int((tokens - caps).argmax())
    if tokens[fullest] > caps[fullest]:
        suffix = " in addition to its lone sequences" if problem.caps is not None else ""
        raise CapacityError(
            f"place pass {name} puts {tokens[fullest]} tokens on rank {fullest}{suffix}, but token_cap is "
            f"{caps[fullest]}: raise token_cap to {tokens[fullest]}, leave it out, or use a recipe that plans under "
            f"it, such as fcp"
        )
