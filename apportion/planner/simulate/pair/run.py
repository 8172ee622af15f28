"""Simulates two alternating halves of a microbatch (DistCA, section 4.1, "Ping-Pong execution").

Both halves' programs run on the same ranks, with the linear layers before and after attention, for several layers:

    turns    before · dispatch a, before · dispatch b, compute a, compute b, collect a · after, collect b · after
             and between layers a half's collect, after, before and dispatch, without a break
    serial   one half after the other, each with its own overlap
    single   like serial, with a wait right after every launch: communication on the compute stream, the paper's
             "Single Stream" (section 6.3)
    signal   like turns, with zero transfer time, the paper's "Signal": an upper bound on the overlap
    whole    the plan of the undivided microbatch, if given, with its own overlap. Halves fetch shared
             rows twice, so this is the baseline to beat

Segments are those of the executor (`ir.plan.segments`). The halves share all links and NICs; channels are separate
unless a number of process groups is given: then they share groups, and a round waits for earlier ones in its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from apportion._core import script as core
from apportion.ir.arrays import Floats, Ints, group_of, offsets
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError, VerifyError
from apportion.ir.fields import instance, integer
from apportion.ir.isa import Op
from apportion.ir.plan.segments import agreed_cuts, own_cuts, segment_ends
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.tensors import PHASES
from apportion.planner.cost import CostModel
from apportion.planner.simulate import busy_us, engine, prepare_program
from apportion.planner.simulate.durations import Costs
from apportion.planner.simulate.pair.result import MODES, WHOLE, ModeTimes, Pair, PairRun
from apportion.planner.simulate.program import LAUNCH, WAIT, WORK, Script, Traffic, View, port_count

#: time of the linear layers' backward, as a multiple of their forward's
LINEAR_BACKWARD = 2.0
MAX_LAYERS = 1_000
#: pieces of a half's turn, in order; BEFORE and DISPATCH belong to the next layer
COLLECT, AFTER, BEFORE, DISPATCH = range(4)


def simulate_pair(
    ping: Plan,
    pong: Plan,
    hardware: Hardware | str | None = None,
    layers: int = 4,
    groups: int | None = None,
    whole: Plan | None = None,
) -> Pair:
    """Simulates `layers` layers of every attention kind, forward and backward, of two alternating halves.

    hardware: kernel times and the rate of linear layers, default the built-in H100; links, NICs and speeds are those of
    the plans' cluster. groups: process groups that both halves share, channel c using group c % groups; None: separate
    groups for each channel of each half. whole: a plan of the undivided microbatch, for comparison. Equal arguments
    give equal times. Raises ConfigError if plans differ in ranks or kinds, VerifyError for one that cannot run.
    """
    for name, plan in (("ping", ping), ("pong", pong), *([] if whole is None else [(WHOLE, whole)])):
        instance(name, plan, Plan, "make one with plan(...)")
    machine = Hardware.named(hardware) or Hardware.load("h100")
    costs = CostModel(machine, ping.request.model)
    return simulate_pair_with(ping, pong, costs, machine.name, layers, groups, whole)


def simulate_pair_with(
    ping: Plan,
    pong: Plan,
    costs: Costs,
    hardware: str = "",
    layers: int = 4,
    groups: int | None = None,
    whole: Plan | None = None,
) -> Pair:
    """Like `simulate_pair`, with any cost model; `hardware` is its name."""
    layers = integer("layers", layers, 1, MAX_LAYERS)
    if groups is not None:
        groups = integer("groups", groups, 1, MAX_LAYERS)
    plans = [ping, pong, *([] if whole is None else [whole])]
    _check_plans(plans)
    keys = [(kind, phase) for kind in ping.header.kinds for phase in PHASES if (kind, phase) in ping.programs]
    runs = {
        key: _run_pair([_half(plan, *key, costs) for plan in plans], *key, layers, groups) for key in keys
    }
    return Pair(ping, pong, hardware, runs)


def turns_us(
    ping: Plan,
    pong: Plan,
    costs: Costs,
    around: Mapping[str, tuple[float, float]],
    cluster: Cluster | None = None,
    layers: int = 4,
) -> dict[tuple[str, str], float]:
    """(kind, phase) -> microseconds per layer, for `layers` consecutive layers of alternating halves, until the last
    rank ends. around: microseconds per token before and after attention, for each phase. cluster: as in `simulate`.
    Raises the errors of `simulate_pair`."""
    _check_plans([ping, pong])
    result = {}
    for kind, phase in ((kind, phase) for kind in ping.header.kinds for phase in PHASES):
        halves = []
        for plan in (ping, pong):
            half = _half(plan, kind, phase, costs, cluster)
            speeds = (plan.request.cluster if cluster is None else cluster).speeds
            rows = plan.layout(plan.header.home_layout).rows_per_rank / np.asarray(speeds or 1.0)
            before, after = (rows * factor for factor in around[phase])
            halves.append(half._replace(before=before, after=after))
        run = _simulate(_assign_channels(halves, None), layers, "turns", f"{kind} {phase}")
        result[kind, phase] = run.makespan_us / layers
    return result


def _check_plans(plans: list[Plan]) -> None:
    ping = plans[0]
    for name, plan in zip(("pong", WHOLE), plans[1:], strict=False):
        checks = {
            "ranks": plan.request.cluster == ping.request.cluster,
            "programs": set(plan.programs) == set(ping.programs),
        }
        for label in (label for label, equal in checks.items() if not equal):
            rule = f"differs from ping in its {label}"
            raise ConfigError(name, plan.id.hex()[:12], rule, "make all plans for the same ranks and kinds")


# ---------------------------------------------------------------------------------------------- one half


class Half(NamedTuple):
    """One half's program. segment: int64 [instructions], 0 dispatch, 1 compute, 2 collect. busy: float64 [ranks], work
    of the program; before, after: of the linear layers on either side of it. contention: as in `PreparedProgram`."""

    script: Script
    traffic: Traffic
    rank_of: Ints
    segment: Ints
    busy: Floats
    before: Floats
    after: Floats
    ports: int
    contention: float


def _half(plan: Plan, kind: str, phase: str, costs: Costs, cluster: Cluster | None = None) -> Half:
    program = prepare_program(plan, kind, phase, costs, cluster)
    view, script = program.view, program.script
    busy, (before, after) = busy_us(view, script), _linear_us(view, costs)
    ports = port_count(view.cluster)
    return Half(
        script, program.traffic, view.rank_of, _segments(view), busy, before, after, ports, program.contention
    )


def _assign_channels(halves: list[Half], groups: int | None) -> list[Half]:
    """The halves on separate channels, or on shared groups."""
    result: list[Half] = []
    for half in halves:
        channel_count = sum(int(other.script.channel.max(initial=-1)) + 1 for other in result)
        channel = half.script.channel + channel_count if groups is None else half.script.channel % groups
        result.append(half._replace(script=half.script._replace(channel=channel)))
    return result


def _segments(view: View) -> Ints:
    """int64 [instructions]: the segment of each."""
    op, round_ = view.instructions["op"], view.instructions["round"]
    ranks = [slice(a, b) for a, b in zip(view.instructions.ptr[:-1], view.instructions.ptr[1:], strict=True)]
    cuts = agreed_cuts(own_cuts(op[rank], round_[rank]) for rank in ranks)
    segments = np.zeros(len(op), np.int64)
    for rank in ranks:
        number = np.arange(len(op[rank]))
        segments[rank] = sum(number >= end for end in segment_ends(op[rank], round_[rank], cuts))
    return segments


def _linear_us(view: View, costs: Costs) -> tuple[Floats, Floats]:
    """Microseconds (before, after) attention, float64 [ranks]: Q, K and V projections; other linear work. Swapped in
    backward. A program that projects heads itself includes the projections."""
    model, plan = view.model, view.plan
    rows = plan.layout(plan.header.home_layout).rows_per_rank
    speeds = view.cluster.speeds
    total = np.asarray(costs.linear_us(rows), np.float64) / (1.0 if speeds is None else np.asarray(speeds))
    products = model.hidden * model.q_heads * model.head_dim + model.key_products
    share = products / costs.linear_parameters
    projected = bool((view.instructions["op"] == Op.PROJECT).any())
    before, after = (0.0 if projected else share) * total, (1 - share) * total
    return (before, after) if view.phase == "forward" else (LINEAR_BACKWARD * after, LINEAR_BACKWARD * before)


# ---------------------------------------------------------------------------------------------- both


class PairInstructions(NamedTuple):
    """Instructions of both halves and all layers, unsorted. rank, slot (position in a mode's order), number (within
    the slot), role: int64 [rows]; work_us: float64; launch: int64, numbered over all halves and layers, or -1."""

    rank: Ints
    slot: Ints
    number: Ints
    role: Ints
    work_us: Floats
    launch: Ints


def _run_pair(plans: list[Half], kind: str, phase: str, layers: int, groups: int | None) -> PairRun:
    """Runs all modes. plans: both halves, and the undivided microbatch if given."""
    halves, label = _assign_channels(plans[:2], groups), f"{kind} {phase}"
    runs = [_simulate(halves, layers, mode, f"{label}, {mode}") for mode in MODES]
    runs += [_simulate(_assign_channels([whole], groups), layers, WHOLE, label) for whole in plans[2:]]
    busy = sum(layers * (half.before + half.busy + half.after) for half in halves)
    return PairRun(kind, phase, layers, np.asarray(busy), *runs)


def _simulate(halves: list[Half], layers: int, mode: str, label: str) -> ModeTimes:
    script, traffic = _interleave(halves, layers, mode)
    if mode == "signal":
        traffic = traffic._replace(wire_us=np.zeros_like(traffic.wire_us))
    times, finish, blocked = engine.run(script, traffic, halves[0].ports, halves[0].contention)
    if (blocked >= 0).any():
        rank = int(np.argmax(blocked >= 0))
        raise VerifyError(f"{label}: rank {rank} waits for a round that never completes; verify both plans")
    waits = script.role == WAIT
    rank_of = group_of(np.diff(script.ptr))
    idle = engine.idle_until(script, times) - times.begin
    exposed = np.bincount(rank_of[waits], idle[waits], len(finish))
    return ModeTimes(float(max(finish.max(), times.done.max(initial=0.0))), exposed.astype(np.float64))


def _interleave(halves: list[Half], layers: int, mode: str) -> tuple[Script, Traffic]:
    """One script with its traffic, each half once per layer."""
    copies = [(number, half, layer) for layer in range(layers) for number, half in enumerate(halves)]
    sizes = [len(half.script.rank) for _, half, _ in copies]
    first = offsets(sizes)  # first launch of each copy, and the total
    rows = _join_scripts(_rows(*copy, mode, int(start)) for copy, start in zip(copies, first, strict=False))
    order = np.lexsort((rows.number, rows.slot, rows.rank))
    rows = PairInstructions._make(column[order] for column in rows)
    launches = rows.launch[rows.role == LAUNCH]
    number = np.full(first[-1] + 1, -1)  # the last entry maps -1, no launch, to -1
    number[launches] = np.arange(len(launches))
    traffic = _traffic([half for _, half, _ in copies], first, number)
    return _script(rows, number[rows.launch], [half for _, half, _ in copies], launches, traffic), traffic


def _rows(half_index: int, half: Half, layer: int, mode: str, first: int) -> PairInstructions:
    """The rows of one copy of a half, with launches numbered from `first`."""
    script, ranks = half.script, np.arange(len(half.before))
    launch = np.where(script.launch >= 0, script.launch + first, -1)
    slot = _slot(mode, half_index, 2 * layer + half.segment, np.where(half.segment == 0, DISPATCH, COLLECT))
    instructions = PairInstructions(
        half.rank_of, slot, 2 * np.arange(len(slot)), script.role.astype(np.int64), script.work_us, launch
    )
    added = [
        _work(ranks, _slot(mode, half_index, 2 * layer, BEFORE), 0, half.before),
        _work(ranks, _slot(mode, half_index, 2 * layer + 2, COLLECT), 2 * len(slot), script.end_us),
        _work(ranks, _slot(mode, half_index, 2 * layer + 2, AFTER), 0, half.after),
    ]
    return _join_scripts([instructions, *added, *([_extra_waits(instructions)] if mode == "single" else [])])


def _slot(mode: str, half_index: int, turn: Any, piece: Any) -> Any:
    """Position in a rank's order: turn by turn, halves alternating, unless they run serially."""
    alternating = mode in ("turns", "signal")
    return 4 * (2 * turn + half_index if alternating else half_index * 4 * MAX_LAYERS + turn) + piece


def _work(ranks: Ints, slot: int, number: int, work: Floats) -> PairInstructions:
    return PairInstructions(
        ranks,
        np.full(len(ranks), slot),
        np.full(len(ranks), number),
        np.full(len(ranks), WORK),
        work,
        np.full(len(ranks), -1),
    )


def _extra_waits(rows: PairInstructions) -> PairInstructions:
    """A wait to insert right after every launch; unpacking stays at the program's own wait."""
    launches = PairInstructions._make(column[rows.role == LAUNCH] for column in rows)
    zeros = np.zeros_like(launches.work_us)
    return launches._replace(
        number=launches.number + 1, role=np.full_like(launches.role, WAIT), work_us=zeros
    )


def _join_scripts(parts: Iterable[PairInstructions]) -> PairInstructions:
    return PairInstructions._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _traffic(copies: list[Half], first: Ints, number: Ints) -> Traffic:
    """The transfers of all copies, with renumbered launches."""
    parts = [
        half.traffic._replace(
            sender=number[half.traffic.sender + start], receiver=number[half.traffic.receiver + start]
        )
        for half, start in zip(copies, first, strict=False)
    ]
    return Traffic._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _script(rows: PairInstructions, launch: Ints, copies: list[Half], src: Ints, traffic: Traffic) -> Script:
    """The script of sorted rows. launch: int64 [rows]; src: int64 [launches], each launch's number before sorting."""
    ranks = len(copies[0].before)
    rank, round_, channel = (
        np.concatenate([getattr(half.script, name) for half in copies])[src]
        for name in ("rank", "round", "channel")
    )
    ptr = np.searchsorted(rows.rank, np.arange(ranks + 1))
    streams = (rank, round_, channel, *core.link_channels(rank, channel))
    ends = core.list_ends(traffic.sender, traffic.receiver, len(rank))
    role, zeros = rows.role.astype(np.uint8), np.zeros(ranks)
    return Script(ptr, role, rows.work_us, zeros, launch, *streams, *ends)
