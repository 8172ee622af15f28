"""Steps `route` and `schedule`: from placed blocks to tasks and the rounds of their tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.tensors import PHASES
from apportion.planner.inner.groups import Groups, HeadSets, check_groups
from apportion.planner.inner.lone import LoneSequences
from apportion.planner.lower.exchange import Exchange, plan_exchange
from apportion.planner.lower.inputs import LoneTasks, Lowered, Lowering
from apportion.planner.lower.overlap import overlapped
from apportion.planner.lower.stages import program_order
from apportion.planner.pipeline.checks import Checks
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.pipeline.steps import Passes
from apportion.planner.problem import Problem
from apportion.planner.route.gateways import Node
from apportion.planner.route.routes import Routes, Site, depths
from apportion.planner.route.trees import KeyRoutes, Star
from apportion.planner.tasks.cells import HeadGroups, check_tasks, cut_cells
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, Tasks, find_tasks, placed_tasks


def schedule(placed: PlacedProblem) -> Lowered:
    """The tasks of every kind and phase, and the rounds of their tiles. Raises ConfigError, CapacityError."""
    problem, passes, placement, groups = placed.inner, placed.passes, placed.placement, placed.groups
    if placement.execution is not None and passes.route.rings:
        rule = "the placement assigns computation to ranks, and partial results cannot travel around rings"
        remedy = "use schedule matchings, gather or divisions, with route star, node or tree"
        raise ConfigError("recipe.route", "ring", rule, remedy)
    rows = Rows(placement.starts, placement.home, len(groups))
    heads = HeadGroups.of(problem.model, placement.head_groups)
    sets = _head_sets(problem, passes, groups) if len(heads) == 1 else _head_group_sets(passes, heads, rows)
    exchange = _exchange(placed, rows, sets)
    site = Site(rows, problem.batch, problem.cluster)
    home = None if exchange is None else exchange.home
    if home is not None and placed.lone is not None:
        home = placed.lone.with_others(home)
    split_kinds = problem.bands if passes.inner is None else passes.inner.split_kinds(placed.problem)
    lowered: Lowered = {}
    for kind, bands in problem.bands.items():
        if home is not None and kind not in split_kinds:
            low = _single_rank_tasks(placed, home, placed.problem.batch, kind)
            lowered |= {(kind, phase): low for phase in PHASES}
            continue
        lone = None if home is None or placed.lone is None else _lone_tasks(placed, placed.lone, home, kind)
        if placement.execution is None:
            tasks_and_edges = find_tasks(bands, rows)
            Checks(passes).tasks(bands, rows.starts, *tasks_and_edges, len(heads))
            if placement.groups is not None:
                check_groups(groups, len(tasks_and_edges[1]))
            kind_passes = _passes_of(passes, problem, kind)
            low = _schedule(kind_passes, site, tasks_and_edges, None, groups, (sets, heads), exchange, lone)
            lowered |= {(kind, phase): low for phase in PHASES}
            continue
        cells = cut_cells(bands, rows.starts)
        for phase in PHASES:
            execution = placement.execution[kind, phase]
            if phase == PHASES[1] and execution is placement.execution[kind, PHASES[0]]:
                lowered[kind, phase] = lowered[kind, PHASES[0]]
                continue
            tasks_and_edges = placed_tasks(cells, execution, rows, heads)
            Checks(passes).tasks(bands, rows.starts, *tasks_and_edges, len(heads))
            division = None if execution.division is None else execution.division.reshape(-1)
            low = _schedule(passes, site, tasks_and_edges, division, groups, (sets, heads), exchange, lone)
            lowered[kind, phase] = low
    return lowered


def _passes_of(passes: Passes, problem: Problem, kind: str) -> Passes:
    """The passes for a kind; if it chooses keys at run time, the route sends rows to each node once."""
    needs_node = kind in problem.chosen_keys and isinstance(passes.route, Star) and problem.cluster.nodes > 1
    return replace(passes, route=Node()) if needs_node else passes


def _exchange(placed: PlacedProblem, rows: Rows, sets: HeadSets) -> Exchange | None:
    """The exchange between home rows and those of groups; lone sequences stay on their home rows."""
    passes, lone, shares, first = placed.passes, placed.lone, placed.problem.member_shares, None
    tokens = placed.inner.batch.tokens
    if lone is not None:
        first = lone.rows.per_rank
        shares = _remaining_room(placed.problem, placed.groups, first, rows.per_rank)
    return plan_exchange(
        tokens, rows, placed.groups, shares, sets, passes.schedule.exchange, passes.reshuffle, first
    )


def _remaining_room(problem: Problem, groups: Groups, first: Ints, counts: Ints) -> Ints:
    """int64 [ranks] > 0: proportions in which members share the `counts` rows of their group, int64 [groups], in
    addition to `first` rows of their own: the room that default caps leave or, if a group has more rows than that, the
    room that the explicit cap leaves."""
    shares: Ints = np.maximum(problem.member_room - first, 1)
    if problem.policy.token_cap is None:
        return shares
    is_full = counts > np.add.reduceat(shares, groups.first[:-1])
    result: Ints = np.where(is_full[groups.of_rank], np.maximum(problem.policy.token_cap - first, 1), shares)
    return result


def _lone_tasks(placed: PlacedProblem, lone: LoneSequences, home: Rows, kind: str) -> LoneTasks:
    """Tasks of one kind that single ranks run while rows of groups travel. home: all home rows."""
    low = _single_rank_tasks(placed, lone.rows, lone.lone_batch, kind)
    return LoneTasks(low, home, lone.early[low.tasks.k])


def _single_rank_tasks(placed: PlacedProblem, rows: Rows, batch: Batch, kind: str) -> Lowering:
    """Tasks of one kind on single ranks, with all heads, for the sequences of a batch on their rows."""
    cluster, model, bands = placed.problem.cluster, placed.problem.model, batch.bands(kind)
    tasks_and_edges, single = find_tasks(bands, rows), Groups.single(cluster.ranks)
    sets, heads = HeadSets.of(model, single), HeadGroups.of(model, 1)
    passes = replace(_passes_of(placed.passes, placed.problem, kind), inner=None)
    Checks(passes).tasks(bands, rows.starts, *tasks_and_edges, 1)
    return _schedule(passes, Site(rows, batch, cluster), tasks_and_edges, None, single, (sets, heads))


def _schedule(
    passes: Passes,
    site: Site,
    tasks_and_edges: tuple[Tasks, Edges],
    division: Ints | None,
    groups: Groups,
    heads: tuple[HeadSets, HeadGroups],
    exchange: Exchange | None = None,
    lone: LoneTasks | None = None,
) -> Lowering:
    """Schedules tasks in program order, with the rounds of their tiles. division: int32 [tasks], as in `Execution`."""
    tasks, edges = tasks_and_edges
    if groups.split:  # every rank of a group runs them
        check_tasks(int(groups.sizes[tasks.exec].sum()))
    routes, checks = _route_tiles(passes, edges, site), Checks(passes)
    checks.routed(edges, routes, len(groups))
    if division is not None:
        routes = replace(routes, division=_first_needed(tasks, routes, division))
    schedule = passes.schedule(routes, len(groups))
    overlap = passes.inner is not None and passes.inner.overlap
    checks.schedule(routes, schedule)
    if overlap:
        schedule = replace(schedule, local="even", beside_exchange=int(groups.sizes[0]))
    tasks = tasks.with_routed_edges(schedule.routed.arrives)
    tasks, parts, stage = program_order(tasks, schedule, site.rows, division)
    low = Lowering(site.rows, tasks, parts, stage, schedule, exchange, groups, *heads, lone)
    checks.lowering(low)
    return overlapped(low) if overlap else low


def _first_needed(tasks: Tasks, routes: Routes, division: Ints) -> Ints:
    """int32 [edges]: the first division with a task that needs the edge's rows."""
    first = np.full(len(routes.edges), np.iinfo(np.int32).max, np.int32)
    for edge in (tasks.edge, tasks.query_edge):
        remote = np.flatnonzero(edge >= 0)
        np.minimum.at(first, routes.arrives[edge[remote]], division[remote])
    depth, parent = depths(routes.edges.parent), routes.edges.parent
    for level in range(int(depth.max(initial=0)), 0, -1):  # rows must arrive before they are relayed
        relays = np.flatnonzero(depth == level)
        np.minimum.at(first, parent[relays], first[relays])
    return first


def _head_sets(problem: Problem, passes: Passes, groups: Groups) -> HeadSets:
    """The heads of every rank, all at once or in stages."""
    make = HeadSets.of if passes.inner is None else passes.inner.head_sets
    return make(problem.model, groups)


def _head_group_sets(passes: Passes, heads: HeadGroups, rows: Rows) -> HeadSets:
    """The heads of work rows if each task has only some of the heads; equally many in all tiles of a side."""
    if passes.inner is not None or passes.reshuffle:
        step = "reshuffle" if passes.inner is None else "inner"
        rule = "cannot be used where the placement splits heads"
        raise ConfigError(f"recipe.{step}", "on", rule, "leave it out or use one head group")
    zero, ones = np.zeros(rows.ranks, np.int64), np.ones(rows.ranks, np.int64)
    q, kv = (max(len(heads.sets[number - 1]) for number in side) for side in (heads.query, heads.key))
    return HeadSets(heads.sets, zero, zero, q * ones, kv * ones, np.zeros(rows.ranks, bool))


def _route_tiles(passes: Passes, edges: Edges, site: Site) -> Routes:
    """Routes the tiles that the schedule makes from the edges. Only KV rows are shared, so only they are routed."""
    route = passes.route if not (edges.lane & 1).any() else KeyRoutes(passes.route)
    star = None if passes.route.by_block else passes.schedule.tiles(edges, passes.route.relays)
    if star is None:
        return route(edges, site)
    routes = route(star.edges, site)
    return replace(routes, arrives=routes.arrives[star.arrives])
