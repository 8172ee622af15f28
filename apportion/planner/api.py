"""From a batch to a verified plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from apportion.ir import codec
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.isa import PHASES, Tensor
from apportion.ir.model import Model
from apportion.ir.plan import Header, Layout, Plan, ProgramSet, Request
from apportion.ir.policy import Policy, Recipe
from apportion.ir.verify import verify as verify_plan
from apportion.ir.version import __version__
from apportion.planner.passes.layouts import Rows
from apportion.planner.passes.lower import lower_backward, lower_forward
from apportion.planner.passes.lowering import Lowering, program_order
from apportion.planner.passes.reshuffle import plan_reshuffle
from apportion.planner.passes.tasks import find_tasks
from apportion.planner.problem import Ints, Placement, Problem, exact_sums
from apportion.planner.recipes import Pipeline, find_recipe, pipeline
from apportion.planner.report import build_report


def plan(
    batch: Batch,
    cluster: Cluster,
    model: Model,
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    seed: int | None = None,
    policy: Policy | None = None,
    *,
    verify: bool = True,
    timings: dict[str, float] | None = None,
) -> Plan:
    """The plan of one microbatch: equal arguments give equal bytes.

    recipe: a name (default "fcp"), a mapping or a Recipe; seed: default 0. `policy` brings its own recipe and seed,
    and adds caps and tolerance.
    verify: check the finished plan (design, "Verify"). timings: filled with milliseconds per step.
    Raises ConfigError, CapacityError, VerifyError.
    """
    policy = _policy(recipe, seed, policy)
    problem = Problem(batch, cluster, model, policy)
    watch = _Watch(timings)
    passes = pipeline(policy.recipe)
    _check_request(problem)
    with watch("shard"):
        shards = passes.shard(problem)
    with watch("place"):
        placement = passes.place(problem, shards)
    with watch("schedule"):
        lowered = _schedule(problem, passes, placement)
    with watch("lower"):
        programs = _lower(lowered)
        layouts = _layouts(problem, lowered)
    with watch("encode"):
        parts = codec.encode_parts(layouts, programs, (), problem.ranks)
    with watch("report"):
        report = build_report(problem, shards, placement, lowered, parts)
    _check_promises(problem, report, programs, layouts)
    with watch("seal"):
        header = _header(problem, layouts)
        sealed = codec.seal(
            Plan(header, Request(batch, cluster, model, policy), layouts, programs, (), report), parts
        )
    if verify:
        with watch("verify"):
            verify_plan(sealed)
    return sealed


def _policy(
    recipe: str | Mapping[str, Any] | Recipe | None, seed: int | None, policy: Policy | None
) -> Policy:
    if policy is None:
        return Policy(find_recipe("fcp" if recipe is None else recipe), seed=0 if seed is None else seed)
    for name, value in (("recipe", recipe), ("seed", seed)):
        if value is not None:
            raise ConfigError(
                name, value, "is given beside a policy, which has its own", "put it into the policy"
            )
    return policy


class _Watch:
    """Milliseconds per step, where somebody wants them."""

    def __init__(self, timings: dict[str, float] | None) -> None:
        self._timings = timings

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._timings is not None:
            self._timings[step] = (time.perf_counter() - start) * 1e3


def _check_request(problem: Problem) -> None:
    for kind in problem.batch.kinds:
        problem.model.layers_of(kind)
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
    need = rows * _home_row_bytes(problem.model, "backward")
    if need > cap * 2**30:
        raise CapacityError(
            f"{rows} tokens, the least that the fullest rank can hold, need {need / 2**30:.2f} GiB of home rows for "
            f"one attention call, the cap is {cap} GiB: use more ranks, a shorter sequence or a higher memory_cap_gib"
        )


def _schedule(problem: Problem, passes: Pipeline, placement: Placement) -> dict[str, Lowering]:
    rows = Rows(placement.starts, placement.home, problem.ranks)
    shuffle = plan_reshuffle(problem.batch.tokens, rows, passes.schedule) if passes.reshuffle else None
    heads = _head_columns(problem.model)
    lowered = {}
    for kind, bands in problem.bands.items():
        tasks, members, edges = find_tasks(bands, rows)
        slots = passes.schedule(edges.src, edges.dst, edges.rows, problem.ranks)
        tasks, members = program_order(tasks, members, slots, problem.ranks)
        lowered[kind] = Lowering(rows, tasks, members, edges, slots, shuffle, heads)
    return lowered


def _head_columns(model: Model) -> dict[int, int]:
    """Head columns of the work arenas when every tile has all heads."""
    queries = {int(t): model.q_heads for t in (Tensor.Q, Tensor.O, Tensor.DQ, Tensor.DO, Tensor.DELTA)}
    return queries | {int(t): model.kv_heads for t in (Tensor.KV, Tensor.DKV)}


def _lower(lowered: Mapping[str, Lowering]) -> dict[tuple[str, str], ProgramSet]:
    lower = dict(zip(PHASES, (lower_forward, lower_backward), strict=True))
    return {(kind, phase): lower[phase](low) for kind, low in lowered.items() for phase in PHASES}


def _layouts(problem: Problem, lowered: Mapping[str, Lowering]) -> dict[str, Layout]:
    low = next(iter(lowered.values()))
    layouts = {"attention": low.rows.layout("attention", problem.batch)}
    if low.reshuffle is not None:
        layouts["loader"] = low.reshuffle.loader.layout("loader", problem.batch)
    return layouts


def _home_layout(layouts: Mapping[str, Layout]) -> str:
    return "loader" if "loader" in layouts else "attention"


def _header(problem: Problem, layouts: Mapping[str, Layout]) -> Header:
    model = problem.model
    return Header(
        ranks=problem.ranks,
        kinds=problem.batch.kinds,
        recipe=problem.policy.recipe.name,
        seed=problem.policy.seed,
        home_layout=_home_layout(layouts),
        layouts=tuple(layouts),
        head_sets=(),
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.value_dim,
        dtype=model.dtype,
        engines={"apportion": __version__},
    )


def _check_promises(
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
            f"{report['imbalance_bound'] - 1:.4f}; use smaller blocks or raise policy.tolerance"
        )
    cap = problem.policy.memory_cap_gib or problem.cluster.memory_gib
    rows = layouts[_home_layout(layouts)].rows_per_rank
    for (kind, phase), program in programs.items():
        peak = int((rows * _home_row_bytes(problem.model, phase) + _arena_bytes(problem, program)).max())
        if peak > cap * 2**30:
            raise CapacityError(
                f"the {phase} of kind {kind} needs {peak / 2**30:.2f} GiB of home and work rows on its fullest rank, "
                f"the cap is {cap} GiB: use more ranks, smaller blocks, fewer buffers or a higher memory_cap_gib"
            )


def _home_row_bytes(model: Model, phase: str) -> int:
    """Bytes of one home row of all tensors that the phase takes and gives."""
    forward = (Tensor.Q, Tensor.KV, Tensor.O)
    backward = (*forward, Tensor.DO, Tensor.DELTA, Tensor.DQ, Tensor.DKV)
    return sum(model.row_bytes(tensor) for tensor in (forward if phase == "forward" else backward))


def _arena_bytes(problem: Problem, program: ProgramSet) -> Ints:
    """int64 [ranks]: bytes of all work arenas."""
    arenas = program["arenas"]
    per_row = np.array([problem.model.row_bytes(tensor) for tensor in Tensor], np.int64)
    return exact_sums(arenas.rank_of_row(), arenas["rows"] * per_row[arenas["tensor"]], problem.ranks)
