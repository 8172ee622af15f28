"""From a batch to a verified plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from apportion.ir import codec
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.hardware import Hardware
from apportion.ir.isa import PHASES, Tensor
from apportion.ir.model import Model
from apportion.ir.plan import Header, Layout, Plan, ProgramSet, Request
from apportion.ir.policy import Policy, Recipe
from apportion.ir.verify import verify as verify_plan
from apportion.ir.version import __version__
from apportion.planner.passes.exchange import plan_exchange
from apportion.planner.passes.groups import Groups, HeadSets, check_groups, virtual_problem
from apportion.planner.passes.layouts import Rows
from apportion.planner.passes.lower import lower_backward, lower_forward
from apportion.planner.passes.lowering import Lowering, program_order
from apportion.planner.passes.route import Routed, Site
from apportion.planner.passes.schedule import Matchings
from apportion.planner.passes.tasks import Edges, find_tasks
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
    hardware: Hardware | str | None = None,
    verify: bool = True,
    timings: dict[str, float] | None = None,
) -> Plan:
    """The plan of one microbatch: equal arguments give equal bytes.

    recipe: a name (default "fcp"), a mapping or a Recipe; seed: default 0. `policy` brings its own recipe and seed,
    and adds caps and tolerance. hardware: what recipes that compare times price with, by default the built-in H100.
    verify: check the finished plan (design, "Verify"). timings: filled with milliseconds per step.
    Raises ConfigError, CapacityError, VerifyError.
    """
    policy = policy_of(recipe, seed, policy)
    hardware = Hardware.named(hardware)
    problem = Problem(batch, cluster, model, policy, hardware)
    watch = _Watch(timings)
    passes = pipeline(policy.recipe)
    _check_request(problem)
    groups = Groups.single(problem.ranks) if passes.inner is None else passes.inner.groups(problem)
    inner = virtual_problem(problem, groups)
    with watch("shard"):
        shards = passes.shard(inner)
    with watch("place"), _in_groups(groups):
        placement = passes.place(inner, shards)
    if placement.groups is not None:
        groups = _unequal_groups(passes, placement.groups)
    with watch("schedule"):
        lowered = _schedule(inner, passes, placement, groups)
    problem = _with_own_cap(problem, passes, lowered)
    with watch("lower"):
        programs = _lower(lowered)
        layouts = _layouts(problem, lowered, passes.reshuffle)
    with watch("encode"):
        parts = codec.encode_parts(layouts, programs, (), problem.ranks)
    with watch("report"):
        report = build_report(problem, shards, placement, lowered, parts)
    _check_promises(problem, report, programs, layouts)
    with watch("seal"):
        sets = next(iter(lowered.values())).sets
        header = _header(problem, layouts, sets)
        request = Request(
            batch, cluster, model, problem.policy, "" if hardware is None else hardware.digest()
        )
        sealed = codec.seal(Plan(header, request, layouts, programs, (), report), parts)
    if verify:
        with watch("verify"):
            verify_plan(sealed)
    return sealed


def policy_of(
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


@contextmanager
def _in_groups(groups: Groups) -> Iterator[None]:
    """Says of a refusal that ranks are groups where they are."""
    try:
        yield
    except CapacityError as error:
        if not groups.split:
            raise
        raise CapacityError(
            f"{error} (heads are split: each rank here is a group of {groups.sizes[0]}, with their tokens and caps)"
        ) from error


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


def _unequal_groups(passes: Pipeline, first: Ints) -> Groups:
    if passes.inner is not None:
        rule = "the placement makes groups of its own"
        raise ConfigError("recipe.steps.inner", "ulysses", rule, "leave `inner` out")
    return Groups(first)


def _with_own_cap(problem: Problem, passes: Pipeline, lowered: Mapping[str, Lowering]) -> Problem:
    """Strategies without a token cap promise what they came to, unless the policy names one."""
    if problem.policy.token_cap is not None or not getattr(passes.place, "own_cap", False):
        return problem
    low = next(iter(lowered.values()))
    rows = low.home if low.groups.split else low.rows
    cap = max(int(rows.per_rank.max()), problem.token_cap)
    return replace(problem, policy=replace(problem.policy, token_cap=cap))


def _schedule(
    problem: Problem, passes: Pipeline, placement: Placement, groups: Groups
) -> dict[str, Lowering]:
    """The tasks of every kind and when their tiles move; `problem` has groups for ranks."""
    rows = Rows(placement.starts, placement.home, len(groups))
    sets = HeadSets.of(problem.model, groups)
    matchings = passes.schedule if isinstance(passes.schedule, Matchings) else Matchings()
    exchange = plan_exchange(problem.batch.tokens, rows, groups, sets, matchings, passes.reshuffle)
    site, lowered = Site(rows, problem.batch, problem.cluster), {}
    for kind, bands in problem.bands.items():
        tasks, members, edges = find_tasks(bands, rows)
        check_groups(groups, len(edges))
        schedule = passes.schedule(_routed(passes, edges, site), len(groups))
        tasks = tasks.arriving(schedule.routed.arrives)
        tasks, members, stage = program_order(tasks, members, schedule, len(groups))
        lowered[kind] = Lowering(rows, tasks, members, stage, schedule, exchange, groups, sets)
    return lowered


def _routed(passes: Pipeline, edges: Edges, site: Site) -> Routed:
    """How the tiles travel that the schedule makes of the edges."""
    tiles = getattr(passes.schedule, "tiles", None)
    if tiles is None or getattr(passes.route, "by_block", False):
        return passes.route(edges, site)
    star = tiles(edges)
    routed = passes.route(star.edges, site)
    return replace(routed, arrives=routed.arrives[star.arrives])


def _lower(lowered: Mapping[str, Lowering]) -> dict[tuple[str, str], ProgramSet]:
    lower = dict(zip(PHASES, (lower_forward, lower_backward), strict=True))
    return {(kind, phase): lower[phase](low) for kind, low in lowered.items() for phase in PHASES}


def _layouts(problem: Problem, lowered: Mapping[str, Lowering], reshuffle: bool) -> dict[str, Layout]:
    """Home rows; beside the loader's also the attention layout, where one rank has each of its rows."""
    low = next(iter(lowered.values()))
    layouts = {}
    if not (reshuffle and low.groups.split):
        rows = low.rows if reshuffle else low.home
        layouts["attention"] = rows.layout("attention", problem.batch)
    if reshuffle:
        layouts["loader"] = low.home.layout("loader", problem.batch)
    return layouts


def _home_layout(layouts: Mapping[str, Layout]) -> str:
    return "loader" if "loader" in layouts else "attention"


def _header(problem: Problem, layouts: Mapping[str, Layout], sets: HeadSets) -> Header:
    model = problem.model
    return Header(
        ranks=problem.ranks,
        kinds=problem.batch.kinds,
        recipe=problem.policy.recipe.name,
        seed=problem.policy.seed,
        home_layout=_home_layout(layouts),
        layouts=tuple(layouts),
        head_sets=sets.sets,
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
            f"{report['imbalance_bound'] - 1:.4f}; use smaller blocks where the recipe "
            f"has any, another recipe, or a higher policy.tolerance"
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
    of_head = np.array([problem.model.row_bytes(tensor, 1) for tensor in Tensor], np.int64)
    size = arenas["rows"].astype(np.int64) * arenas["heads"] * of_head[arenas["tensor"]]
    return exact_sums(arenas.rank_of_row(), size, problem.ranks)
