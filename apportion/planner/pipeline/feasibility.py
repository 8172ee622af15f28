"""What no recipe can plan is refused before planning, and a plan that breaks a promise of its policy after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError, ConfigError, gib
from apportion.ir.isa import Op
from apportion.ir.plan.tables import Layout, ProgramSet
from apportion.ir.request.model import Model
from apportion.ir.tensors import FETCHED, HEADLESS, RETURNED, SIDES, Tensor
from apportion.planner.pipeline.headers import home_layout
from apportion.planner.problem import Problem, exact_sums


def check_request(problem: Problem) -> None:
    """Refuses what no recipe can plan. Raises ConfigError, CapacityError."""
    problem.cluster.check_ranks()
    for kind in problem.batch.kinds:
        problem.model.layers_of(kind)
    if problem.model.recurrent:
        problem.model.check_recurrent(problem.batch.kinds)
        problem.batch.branches()
    for kind in () if isinstance(problem.model.layers, Mapping) else problem.model.balance:
        problem.batch.bands(kind)
    ranks = problem.ranks
    for sequence, homes in problem.batch.home_ranks.items():
        if max(homes) >= ranks:
            raise ConfigError(
                f"batch.sequences[{sequence}].home_ranks",
                homes,
                f"must be ranks below {ranks}",
                "correct the ranks",
            )
    _check_memory(problem)


def _check_memory(problem: Problem) -> None:
    """Refuses before planning what cannot fit: the home rows of the fullest rank, which holds at least the mean."""
    rows = min(problem.token_cap, -(-problem.batch.tokens // problem.ranks))
    cap = problem.policy.memory_cap_gib or problem.cluster.memory_gib
    inner = problem.policy.recipe.step("inner")
    projects = inner is not None and inner.params.get("project") is True
    need = rows * _home_row_bytes(problem.model, "backward", projects)
    if need > cap * 2**30:
        raise CapacityError(
            f"{rows} tokens, the least that the fullest rank can hold, need {gib(need)} of home rows for "
            f"one attention call, the cap is {cap} GiB: use more ranks, a shorter sequence or a higher memory_cap_gib"
        )


def check_promises(
    problem: Problem,
    report: Mapping[str, Any],
    programs: Mapping[tuple[str, str], ProgramSet],
    layouts: Mapping[str, Layout],
) -> None:
    """A promise of the policy that this plan cannot keep is an error here, with the numbers."""
    tolerance, found = problem.policy.tolerance, report["imbalance"]["compute"]
    if tolerance is not None and found > tolerance:
        raise CapacityError(
            f"compute imbalance {found:.4f} is above the tolerance {tolerance}: the heaviest piece is "
            f"{report['heaviest_piece_over_mean']:.2f} of the mean load and no plan of these pieces is below "
            f"{report['imbalance_bound'] - 1:.4f}; use smaller blocks where the recipe "
            f"has any, another recipe, or a higher policy.tolerance"
        )
    check_call_memory(problem, programs, layouts)


def check_call_memory(
    problem: Problem, programs: Mapping[tuple[str, str], ProgramSet], layouts: Mapping[str, Layout]
) -> None:
    """Raises CapacityError where a call needs more than a rank has."""
    cap = problem.policy.memory_cap_gib or problem.cluster.memory_gib
    rows = layouts[home_layout(layouts)].rows_per_rank
    for (kind, phase), program in programs.items():
        peak = int(_call_bytes(problem.model, rows, phase, program).max())
        if peak > cap * 2**30:
            raise CapacityError(
                f"the {phase} of kind {kind} needs {gib(peak)} of home and work rows on its fullest rank, "
                f"the cap is {cap} GiB: use more ranks, smaller blocks, fewer buffers or a higher memory_cap_gib"
            )


def _home_row_bytes(model: Model, phase: str, projects: bool) -> int:
    """Bytes of one home row of all tensors that the phase takes and gives."""
    made = {tensor for side in SIDES for tensor in (*FETCHED[side, "forward"], *RETURNED[side, "backward"])}
    absent = made if projects else HEADLESS
    named = (tensor for tensor in Tensor if phase in tensor.contents.phases)
    return sum(model.row_bytes(tensor) for tensor in named if tensor not in absent)


def attention_bytes(plan: Plan) -> int:
    """Bytes of home and work rows of one call, of the kind, phase and rank that need most."""
    rows = plan.layouts[plan.header.home_layout].rows_per_rank
    return max(
        int(_call_bytes(plan.request.model, rows, phase, program).max())
        for (_, phase), program in plan.programs.items()
    )


def _call_bytes(model: Model, rows: Ints, phase: str, program: ProgramSet) -> Ints:
    """int64 [ranks]: bytes of home rows, `rows` on each rank, and of all work arenas."""
    projects = bool((program["instructions"]["op"] == Op.PROJECT).any())
    arenas = program["arenas"]
    of_head = np.array([model.row_bytes(tensor, 1) for tensor in Tensor], np.int64)
    size = arenas["rows"].astype(np.int64) * arenas["heads"] * of_head[arenas["tensor"]]
    return rows * _home_row_bytes(model, phase, projects) + exact_sums(arenas.rank_of_row(), size, len(rows))
