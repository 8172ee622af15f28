"""The steps of a plan in their order, each of which takes what the one before it made.

    Problem ──shard──► Shards ──place──► Placed ──schedule──► Lowered ──lower, remap──► Draft ──seal──► Plan

A search runs them for one recipe after another; `api` runs them once.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import codec
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.isa import FETCHED, HEADLESS, PHASES, RETURNED, SIDES, TABLES, Op, Tensor
from apportion.ir.loops.threads import spread
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Request, Table, joined
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.version import __version__
from apportion.planner.inner.groups import Groups, HeadSets, check_groups, virtual_problem
from apportion.planner.inner.lone import Lone
from apportion.planner.lower.exchange import Exchange, plan_exchange
from apportion.planner.lower.head_stages import lower_stages
from apportion.planner.lower.inputs import Beside, Lowered, Lowering, held_tokens, leading
from apportion.planner.lower.overlap import overlapped
from apportion.planner.lower.programs import lower_backward, lower_forward
from apportion.planner.lower.stages import program_order
from apportion.planner.pipeline.checks import Checks
from apportion.planner.pipeline.report import build_report
from apportion.planner.pipeline.steps import Passes
from apportion.planner.problem import Pass, Placement, Problem, Shards, exact_sums
from apportion.planner.remap import Remapping
from apportion.planner.route.routes import Routed, Site, depths
from apportion.planner.route.trees import KeysOnly
from apportion.planner.tasks.cells import HeadGroups, check_tasks, cut_cells
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, Tasks, find_tasks, placed_tasks


@dataclass(frozen=True)
class Placed:
    """A problem whose blocks have homes. inner: the problem whose ranks are `groups`, without `lone` sequences."""

    problem: Problem
    passes: Passes
    groups: Groups
    inner: Problem
    shards: Shards
    placement: Placement
    lone: Lone | None = None

    def apart(self) -> list[tuple[int, Placed]]:
        """The first ranks and the placements of parts between which nothing moves; where there are none, of all."""
        passes = self.passes
        if passes.pods is None or passes.inner is not None or passes.reshuffle:
            return [(0, self)]
        found = []
        for pod in passes.pods.apart(self.problem, self.placement):
            own, single = pod.problem, Groups.single(pod.problem.ranks)
            found.append((pod.first, Placed(own, passes, single, own, self.shards, pod.placement)))
        return found or [(0, self)]


@dataclass(frozen=True)
class Draft:
    """A plan as its passes made it: neither encoded nor reported on. problem: with the token cap that it promises;
    lowered: of each part of the ranks that was lowered by itself."""

    problem: Problem
    placed: Placed
    lowered: tuple[Lowered, ...]
    programs: Mapping[tuple[str, str], ProgramSet]
    layouts: Mapping[str, Layout]
    remapping: Remapping | None = None

    @property
    def moves(self) -> tuple[Move, ...]:
        """To layouts that other layers want."""
        return () if self.remapping is None else self.remapping.moves

    def plan(self, report: Mapping[str, Any] = MappingProxyType({})) -> Plan:
        """The plan as it will be, not sealed yet: its programs can be simulated. Without a report it does not name the
        hardware, whose digest takes long."""
        problem, hardware = self.problem, self.problem.hardware
        header = _header(problem, self.layouts, leading(self.lowered[0]).sets)
        digest = hardware.digest() if hardware is not None and report else ""
        request = Request(problem.batch, problem.cluster, problem.model, problem.policy, digest)
        return Plan(header, request, self.layouts, self.programs, self.moves, report)


@dataclass(frozen=True)
class Made:
    """A sealed plan, the placement it was made from, and what its report says of the search that found that."""

    plan: Plan
    placed: Placed
    search: Mapping[str, Any] | None = None


class SearchPass(Pass, Protocol):
    """Finds the passes of a plan."""

    @abstractmethod
    def __call__(self, problem: Problem, watch: Watch) -> Made:
        """The plan; its report has `search`. Raises ConfigError, CapacityError."""
        ...


def place(problem: Problem, passes: Passes, watch: Watch, threads: int = 1) -> Placed:
    """Runs the passes up to placement. Raises ConfigError, CapacityError."""
    groups, inner, lone = grouped(problem, passes)
    checks = Checks(passes)
    if lone is not None and lone.is_all:
        with watch("place"):
            shards, placement = lone.placement(problem)
        return Placed(problem, passes, groups, inner, shards, placement)
    if passes.pods is not None:
        with watch("place"), _in_groups(groups):
            members = int(groups.sizes.max())
            shards, placement = passes.pods(inner, members, passes.shard, passes.place, threads)
    else:
        with watch("shard"):
            shards = passes.shard(inner)
        with watch("place"), _in_groups(groups):
            placement = passes.place(inner, shards)
    checks.shards(inner, shards)
    checks.placement(inner, shards, placement)
    if placement.groups is not None:
        groups = unequal_groups(passes, placement.groups)
    return Placed(problem, passes, groups, inner, shards, placement, lone)


def grouped(problem: Problem, passes: Passes) -> tuple[Groups, Problem, Lone | None]:
    """The groups of ranks that placement takes for ranks, the problem in which they are, and the sequences that are not
    in it. Raises ConfigError, CapacityError."""
    if passes.inner is None:
        return Groups.single(problem.ranks), problem, None
    groups = passes.inner.groups(problem)
    lone = passes.inner.find_lone(problem, groups)
    if passes.reshuffle and groups.split and not splits_all(passes, problem):
        rule = "would leave kinds whose heads are not split in the loader's layout"
        raise ConfigError(
            "recipe.steps.reshuffle", True, rule, "leave `reshuffle` or `inner.ulysses.kinds` out"
        )
    if lone is not None and passes.reshuffle:
        rule = "moves all rows, those of lone sequences too"
        raise ConfigError(
            "recipe.steps.reshuffle", True, rule, "leave `reshuffle` or `inner.ulysses.lone` out"
        )
    if lone is not None and lone.is_all:
        return Groups.single(problem.ranks), problem, lone
    return groups, virtual_problem(problem, groups, lone), lone


def splits_all(passes: Passes, problem: Problem) -> bool:
    """Whether heads of all attention kinds are split, or of none."""
    return passes.inner is None or passes.inner.splits(problem) == set(problem.batch.kinds)


def draft(placed: Placed, watch: Watch, lowered: Lowered | None = None, threads: int = 1) -> Draft:
    """Runs the passes after placement, or after `schedule`. Raises ConfigError, CapacityError."""
    with watch("schedule"):
        parts = [(0, placed)] if lowered is not None else placed.apart()
        every = [lowered] if lowered is not None else spread(schedule, [part for _, part in parts], threads)
        for key in every[0]:
            check_tasks(sum(len(part[key].tasks) for part in every))
    problem = _with_own_cap(placed.problem, placed.passes, every)
    with watch("lower"):
        programs = _lower([first for first, _ in parts], every, threads)
        layouts = _layouts(problem, placed, every)
    if placed.passes.remap is None:
        return Draft(problem, placed, tuple(every), programs, layouts)
    with watch("remap"):
        remapping = placed.passes.remap(problem, layouts[_home_layout(layouts)])
    return Draft(problem, placed, tuple(every), programs, {**layouts, **remapping.layouts}, remapping)


def seal(draft: Draft, watch: Watch, search: Mapping[str, Any] | None = None, threads: int = 1) -> Plan:
    """Encodes and reports. search: what the report says of the search that found the draft.

    Raises CapacityError where the plan breaks a promise of the policy."""
    problem, placed = draft.problem, draft.placed
    with watch("encode"):
        parts = codec.encode_parts(draft.layouts, draft.programs, draft.moves, problem.ranks, threads)
    with watch("report"):
        report = build_report(
            problem,
            placed.shards,
            placed.placement,
            placed.lone,
            placed.groups,
            draft.lowered,
            draft.programs,
            parts,
        )
        if placed.passes.pods is not None:
            report |= {"pods": len(draft.lowered)}
        if draft.remapping is not None:
            report |= {"remap": draft.remapping.said}
        if search is not None:
            report |= {"search": search, "termination": report["termination"] | {"limit": search["stopped"]}}
    _check_promises(problem, report, draft.programs, draft.layouts)
    with watch("seal"):
        return codec.seal(draft.plan(report), parts)


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


class Watch:
    """Milliseconds per step, where somebody wants them."""

    def __init__(self, timings: dict[str, float] | None) -> None:
        self._timings = timings

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._timings is not None:
            self._timings[step] = (time.perf_counter() - start) * 1e3


#: nobody wants them
SILENT = Watch(None)


def check_request(problem: Problem) -> None:
    """Refuses what no recipe can plan. Raises ConfigError, CapacityError."""
    problem.cluster.check_ranks()
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
    inner = problem.policy.recipe.step("inner")
    projects = inner is not None and inner.params.get("project") is True
    need = rows * _home_row_bytes(problem.model, "backward", projects)
    if need > cap * 2**30:
        raise CapacityError(
            f"{rows} tokens, the least that the fullest rank can hold, need {need / 2**30:.2f} GiB of home rows for "
            f"one attention call, the cap is {cap} GiB: use more ranks, a shorter sequence or a higher memory_cap_gib"
        )


def unequal_groups(passes: Passes, first: Ints) -> Groups:
    """The groups that a placement made; first: int64 [groups + 1]. Raises ConfigError."""
    if passes.inner is not None:
        rule = "the placement makes groups of its own"
        raise ConfigError(
            "recipe.steps.inner", type(passes.inner).__name__.lower(), rule, "leave `inner` out"
        )
    return Groups(first)


def _with_own_cap(problem: Problem, passes: Passes, lowered: Sequence[Lowered]) -> Problem:
    """Strategies without a token cap promise what they came to, unless the policy names one. Where the ranks' default
    caps differ and each rank keeps to its own, these are the promise."""
    if problem.policy.token_cap is not None or not passes.place.own_cap:
        return problem
    held, caps = held_tokens(lowered), problem.token_caps
    if caps.min() < caps.max() and (held <= caps).all():
        return problem
    cap = max(int(held.max()), problem.token_cap)
    return replace(problem, policy=replace(problem.policy, token_cap=cap))


def schedule(placed: Placed) -> Lowered:
    """The tasks of every kind and phase and when their tiles move. Raises ConfigError, CapacityError."""
    problem, passes, placement, groups = placed.inner, placed.passes, placed.placement, placed.groups
    if placement.execution is not None and passes.route.rings:
        rule = "the placement says who computes, and what that adds up does not go around rings"
        remedy = "use schedule matchings, gather or divisions, with route star, node or tree"
        raise ConfigError("recipe.steps.route", "ring", rule, remedy)
    rows = Rows(placement.starts, placement.home, len(groups))
    heads = HeadGroups.of(problem.model, placement.head_groups)
    sets = _head_sets(problem, passes, groups) if len(heads) == 1 else _set_of_groups(passes, heads, rows)
    exchange = _exchange(placed, rows, sets)
    site = Site(rows, problem.batch, problem.cluster)
    home = None if exchange is None else exchange.home
    if home is not None and placed.lone is not None:
        home = placed.lone.beside(home)
    split = problem.bands if passes.inner is None else passes.inner.splits(placed.problem)
    lowered: Lowered = {}
    for kind, bands in problem.bands.items():
        if home is not None and kind not in split:
            low = _alone(placed, home, placed.problem.batch, kind)
            lowered |= {(kind, phase): low for phase in PHASES}
            continue
        beside = None if home is None or placed.lone is None else _beside(placed, placed.lone, home, kind)
        if placement.execution is None:
            found = find_tasks(bands, rows)
            Checks(passes).tasks(bands, rows.starts, *found, len(heads))
            if placement.groups is not None:
                check_groups(groups, len(found[1]))
            low = _scheduled(passes, site, found, None, exchange, groups, sets, heads, beside)
            lowered |= {(kind, phase): low for phase in PHASES}
            continue
        cells = cut_cells(bands, rows.starts)
        for phase in PHASES:
            execution = placement.execution[kind, phase]
            if phase == PHASES[1] and execution is placement.execution[kind, PHASES[0]]:
                lowered[kind, phase] = lowered[kind, PHASES[0]]
                continue
            found = placed_tasks(cells, execution, rows, heads)
            Checks(passes).tasks(bands, rows.starts, *found, len(heads))
            division = None if execution.division is None else execution.division.reshape(-1)
            low = _scheduled(passes, site, found, division, exchange, groups, sets, heads, beside)
            lowered[kind, phase] = low
    return lowered


def _exchange(placed: Placed, rows: Rows, sets: HeadSets) -> Exchange | None:
    """Of home rows and those of groups; home rows of lone sequences stay where they are."""
    passes, lone, shares, first = placed.passes, placed.lone, placed.problem.member_shares, None
    tokens = placed.inner.batch.tokens
    if lone is not None:
        first = lone.rows.per_rank
        shares = _room_beside(placed.problem, placed.groups, first, rows.per_rank)
    return plan_exchange(
        tokens, rows, placed.groups, shares, sets, passes.schedule.exchange, passes.reshuffle, first
    )


def _room_beside(problem: Problem, groups: Groups, first: Ints, held: Ints) -> Ints:
    """int64 [ranks] > 0: in what proportion members share the rows of their group, int64 [groups], beside `first` rows
    of their own: what their default caps leave, or an explicit one where a group holds more."""
    shares: Ints = np.maximum(problem.member_room - first, 1)
    if problem.policy.token_cap is None:
        return shares
    short = held > np.add.reduceat(shares, groups.first[:-1])
    room: Ints = np.where(short[groups.of_rank], np.maximum(problem.policy.token_cap - first, 1), shares)
    return room


def _beside(placed: Placed, lone: Lone, home: Rows, kind: str) -> Beside:
    """What single ranks compute of one kind while rows of groups travel. home: all home rows."""
    low = _alone(placed, lone.rows, lone.alone, kind)
    return Beside(low, home, lone.early[low.tasks.k])


def _alone(placed: Placed, rows: Rows, batch: Batch, kind: str) -> Lowering:
    """What single ranks compute of one kind, with all heads, of the sequences of a batch whose rows they have."""
    cluster, model, bands = placed.problem.cluster, placed.problem.model, batch.bands(kind)
    found, single = find_tasks(bands, rows), Groups.single(cluster.ranks)
    sets, heads = HeadSets.of(model, single), HeadGroups.of(model, 1)
    passes = replace(placed.passes, inner=None)
    Checks(passes).tasks(bands, rows.starts, *found, 1)
    return _scheduled(passes, Site(rows, batch, cluster), found, None, None, single, sets, heads)


def _scheduled(
    passes: Passes,
    site: Site,
    found: tuple[Tasks, Edges],
    division: Ints | None,
    exchange: Exchange | None,
    groups: Groups,
    sets: HeadSets,
    heads: HeadGroups,
    beside: Beside | None = None,
) -> Lowering:
    """Tasks in program order, with the rounds of their tiles. division: int32 [tasks]."""
    tasks, edges = found
    if groups.split:  # every rank of a group has them
        check_tasks(int(groups.sizes[tasks.exec].sum()))
    routed, checks = _routed(passes, edges, site), Checks(passes)
    checks.routed(edges, routed, len(groups))
    if division is not None:
        routed = replace(routed, division=_first_needed(tasks, routed, division))
    schedule, overlap = (
        passes.schedule(routed, len(groups)),
        passes.inner is not None and passes.inner.overlap,
    )
    checks.schedule(routed, schedule)
    if overlap:
        schedule = replace(schedule, local="even", beside_exchange=int(groups.sizes[0]))
    tasks = tasks.arriving(schedule.routed.arrives)
    tasks, parts, stage = program_order(tasks, schedule, site.rows, division)
    low = Lowering(site.rows, tasks, parts, stage, schedule, exchange, groups, sets, heads, beside)
    checks.lowering(low)
    return overlapped(low) if overlap else low


def _first_needed(tasks: Tasks, routed: Routed, division: Ints) -> Ints:
    """int32 [edges]: the first division with a task that needs the edge's rows."""
    first = np.full(len(routed.edges), np.iinfo(np.int32).max, np.int32)
    for edge in (tasks.edge, tasks.query_edge):
        some = np.flatnonzero(edge >= 0)
        np.minimum.at(first, routed.arrives[edge[some]], division[some])
    depth, parent = depths(routed.edges.parent), routed.edges.parent
    for level in range(int(depth.max(initial=0)), 0, -1):  # what is passed on must have come
        relays = np.flatnonzero(depth == level)
        np.minimum.at(first, parent[relays], first[relays])
    return first


def _head_sets(problem: Problem, passes: Passes, groups: Groups) -> HeadSets:
    """The heads of every rank, all at once or in stages."""
    of = HeadSets.of if passes.inner is None else passes.inner.head_sets
    return of(problem.model, groups)


def _set_of_groups(passes: Passes, heads: HeadGroups, rows: Rows) -> HeadSets:
    """The heads of work rows where tasks have some of the heads: all tiles have equally many of either side."""
    if passes.inner is not None or passes.reshuffle:
        step = "reshuffle" if passes.inner is None else "inner"
        rule = "cannot be used where the placement splits heads"
        raise ConfigError(f"recipe.steps.{step}", "on", rule, "leave it out or use one head group")
    zero, ones = np.zeros(rows.ranks, np.int64), np.ones(rows.ranks, np.int64)
    q, kv = (max(len(heads.sets[number - 1]) for number in side) for side in (heads.query, heads.key))
    return HeadSets(heads.sets, zero, zero, q * ones, kv * ones, np.zeros(rows.ranks, bool))


def _routed(passes: Passes, edges: Edges, site: Site) -> Routed:
    """How the tiles travel that the schedule makes of the edges. Only KV rows are shared, so only these have routes."""
    route = passes.route if not (edges.lane & 1).any() else KeysOnly(passes.route)
    star = None if passes.route.by_block else passes.schedule.tiles(edges, passes.route.relays)
    if star is None:
        return route(edges, site)
    routed = route(star.edges, site)
    return replace(routed, arrives=routed.arrives[star.arrives])


def _lower(first: Sequence[int], parts: Sequence[Lowered], threads: int) -> dict[tuple[str, str], ProgramSet]:
    """first: the first rank of each part."""
    keys, each = list(parts[0]), len(parts)
    items = [(part[key], key[1]) for key in keys for part in parts]
    made = spread(lambda item: _lower_phase(*item), items, threads)
    return {key: _side_by_side(first, made[at * each : (at + 1) * each]) for at, key in enumerate(keys)}


def _lower_phase(low: Lowering, phase: str) -> ProgramSet:
    if low.exchange is not None and low.sets.stages is not None:
        return lower_stages(low, low.exchange, low.sets.stages, phase)
    return lower_forward(low) if phase == "forward" else lower_backward(low)


def _side_by_side(first: Sequence[int], parts: Sequence[ProgramSet]) -> ProgramSet:
    """The programs of all ranks. first: the first rank of each part, of which its peers are counted."""
    if len(parts) == 1:
        return parts[0]
    tables = {name: joined([part[name] for part in parts]) for name in TABLES}
    peer, sizes = tables["transfers"].wide("peer"), [len(part["transfers"]) for part in parts]
    tables["transfers"] = tables["transfers"].with_column("peer", peer + np.repeat(first, sizes))
    rounds = _same_rounds([part["instructions"] for part in parts])
    tables["instructions"] = tables["instructions"].with_column("round", rounds)
    return ProgramSet(tables)


def _same_rounds(parts: Sequence[Table]) -> Ints:
    """int64 [instructions]: rounds numbered anew, in their order, so that all of a number have one channel and mode."""
    ways = [part.wide("channel") << 8 | part.wide("mode") for part in parts]
    stride, found = max(int(way.max(initial=0)) for way in ways) + 1, []
    for part, way in zip(parts, ways, strict=True):
        round_, launch = part.wide("round"), np.flatnonzero(part["op"] == Op.LAUNCH)
        of_round = np.zeros(int(round_.max(initial=0)) + 1, np.int64)
        of_round[round_[launch]] = way[launch]
        found.append(round_ * stride + of_round[round_])
    number, op = np.concatenate(found), np.concatenate([part["op"] for part in parts])
    some = np.flatnonzero((op == Op.LAUNCH) | (op == Op.WAIT))
    rounds, used = np.zeros(len(op), np.int64), np.zeros(int(number.max(initial=0)) + 1, bool)
    used[number[some]] = True
    rounds[some] = (np.cumsum(used) - 1)[number[some]]
    return rounds


def _layouts(problem: Problem, placed: Placed, lowered: Sequence[Lowered]) -> dict[str, Layout]:
    """Home rows; beside the loader's also the attention layout, where one rank has each of its rows."""
    if len(lowered) > 1:
        rows = Rows(placed.placement.starts, placed.placement.home, problem.ranks)
        return {"attention": rows.layout("attention", problem.batch)}
    low, reshuffle = leading(lowered[0]), placed.passes.reshuffle
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
        diagonals={kind: problem.batch.diagonals(kind) for kind in problem.batch.kinds},
        sent_gradients=model.sent_gradients,
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
        peak = int(_call_bytes(problem.model, rows, phase, program).max())
        if peak > cap * 2**30:
            raise CapacityError(
                f"the {phase} of kind {kind} needs {peak / 2**30:.2f} GiB of home and work rows on its fullest rank, "
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
