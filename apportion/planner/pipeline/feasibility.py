"""Feasibility: refuses unsatisfiable requests before planning, and plans that break the policy afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError, ConfigError, gib
from apportion.ir.isa import Op
from apportion.ir.plan.fusion import find_complete_rows
from apportion.ir.plan.tables import Layout, ProgramSet
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor
from apportion.planner.pipeline.headers import home_layout
from apportion.planner.problem import Problem, exact_sums

#: bytes per LSE in home rows (decision 0022)
LSE_BYTES = 8


def check_request(problem: Problem) -> None:
    """Refuses requests that no recipe can plan. Raises ConfigError, CapacityError."""
    problem.cluster.check_ranks()
    for kind in problem.batch.kinds:
        problem.model.layers_of(kind)
    if problem.model.recurrent:
        problem.model.check_recurrent(problem.batch.kinds)
        problem.batch.branches()
    for kind in () if isinstance(problem.model.layers, Mapping) else problem.model.balance:
        problem.batch.bands(kind)
    if problem.model.latent is not None and _projects(problem):
        rule = "does not support latent rows: hidden states would be projected again for every stage"
        raise ConfigError(
            "recipe.inner.project", True, rule, "leave project out, or plan expanded keys and values"
        )
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
    """Refuses batches whose home rows cannot fit the fullest rank, which holds at least the mean."""
    rows = min(problem.token_cap, -(-problem.batch.tokens // problem.ranks))
    cap = problem.policy.memory_cap_gib or problem.cluster.memory_gib
    home_bytes = rows * _home_row_bytes(problem.model, "backward", _projects(problem))
    if home_bytes > cap * 2**30:
        raise CapacityError(
            f"{rows} tokens, a lower bound for the fullest rank, need {gib(home_bytes)} of home rows for one "
            f"attention call, but the cap is {cap} GiB: use more ranks, a shorter sequence or a higher memory_cap_gib"
        )


def _projects(problem: Problem) -> bool:
    inner = problem.policy.recipe.step("inner")
    return inner is not None and inner.params.get("project") is True


def check_policy_limits(
    problem: Problem,
    report: Mapping[str, Any],
    programs: Mapping[tuple[str, str], ProgramSet],
    layouts: Mapping[str, Layout],
) -> None:
    """Raises CapacityError, with the numbers, for a plan that breaks a limit of its policy."""
    tolerance, imbalance = problem.policy.tolerance, report["imbalance"]["compute"]
    if tolerance is not None and imbalance > tolerance:
        raise CapacityError(
            f"compute imbalance {imbalance:.4f} is above the tolerance {tolerance}: the heaviest piece is "
            f"{report['heaviest_piece_over_mean']:.2f} of the mean load and no plan of these pieces is below "
            f"{report['imbalance_bound'] - 1:.4f}; use smaller blocks where the recipe "
            f"has any, another recipe, or a higher policy.tolerance"
        )
    check_call_memory(problem, programs, layouts)


def check_call_memory(
    problem: Problem, programs: Mapping[tuple[str, str], ProgramSet], layouts: Mapping[str, Layout]
) -> None:
    """Raises CapacityError if a call needs more memory than a rank has."""
    cap = problem.policy.memory_cap_gib or problem.cluster.memory_gib
    rows = layouts[home_layout(layouts)].rows_per_rank
    for (kind, phase), program in programs.items():
        arguments = problem.model, rows, phase, program
        peak = int(_max_bytes(*arguments).max())
        if peak > cap * 2**30 and (peak := int(_call_bytes(*arguments).max())) > cap * 2**30:
            raise CapacityError(
                f"the {phase} of kind {kind} needs {gib(peak)} of home and work rows on its fullest rank, "
                f"but the cap is {cap} GiB: use more ranks, smaller blocks, fewer buffers or a higher memory_cap_gib"
            )


def _home_row_bytes(model: Model, phase: str, projects: bool) -> int:
    """Bytes of one home row of all inputs and outputs of a phase; the phase's sums (O; dQ, dKV) count as results in the
    model's dtype, without accumulators. In programs that project, dX reuses the memory of O if O is released."""
    outputs, queries, keys = _row_elements(model)
    size, hidden = model.element_bytes, projects * model.hidden
    inputs = (hidden or queries + keys) * size
    output = outputs * size + model.q_heads * LSE_BYTES
    if phase == "forward":
        return inputs + output
    statistics = outputs * size + 2 * model.q_heads * model.accumulator_bytes  # dO and row statistics
    return inputs + statistics + (queries + keys) * size + max(output, hidden * size)


def _row_elements(model: Model) -> tuple[int, int, int]:
    """Elements per row: of O, of Q, and of K and V together; their gradients have as many."""
    q_heads, width, value_dim = model.q_heads, model.head_dim, model.value_dim
    return q_heads * value_dim, q_heads * width, model.kv_heads * (width + value_dim)


def attention_bytes(plan: Plan) -> int:
    """Bytes of home and work rows of one call, for the kind, phase and rank that need the most."""
    rows = plan.layouts[plan.header.home_layout].rows_per_rank
    return max(
        int(_call_bytes(plan.request.model, rows, phase, program).max())
        for (_, phase), program in plan.programs.items()
    )


def _call_bytes(model: Model, rows: Ints, phase: str, program: ProgramSet) -> Ints:
    """int64 [ranks]: bytes of home rows, `rows` on each rank, and of all work arenas. A sum also has accumulators on
    ranks where not all of its home rows arrive as results."""
    result = _max_bytes(model, rows, phase, program)
    numbers = dict(zip(("o", "dq", "dkv"), _row_elements(model), strict=True))
    for column, complete in find_complete_rows(program, phase).items():
        counts = exact_sums(complete.arrived.of, complete.arrived.row1 - complete.arrived.row0, len(rows))
        result -= rows * numbers[column] * model.accumulator_bytes * (counts == rows)
    return result


def _max_bytes(model: Model, rows: Ints, phase: str, program: ProgramSet) -> Ints:
    """Like `_call_bytes`, but with accumulators for all sums."""
    projects = bool((program["instructions"]["op"] == Op.PROJECT).any())
    arenas = program["arenas"]
    head_bytes = np.array([model.row_bytes(tensor, 1) for tensor in Tensor], np.int64)
    size = arenas["rows"].astype(np.int64) * arenas["heads"] * head_bytes[arenas["tensor"]]
    outputs, queries, keys = _row_elements(model)
    wide = (outputs if phase == "forward" else queries + keys) * model.accumulator_bytes
    home = rows * (_home_row_bytes(model, phase, projects) + wide)
    return home + exact_sums(arenas.rank_of_row(), size, len(rows))
