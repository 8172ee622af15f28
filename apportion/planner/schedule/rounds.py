"""Schedules transfers into slots and rounds."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from apportion._core import rounds as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.planner.options import Count
from apportion.planner.problem import Pass
from apportion.planner.route.ring import Ring as RingRoute
from apportion.planner.route.routes import RoutePass, Routes, depths, join
from apportion.planner.schedule.double_ring import DoubleRing, WindowRoutes
from apportion.planner.solvers.colouring.matching import max_degree
from apportion.planner.solvers.contracts import ColouringProblem
from apportion.planner.solvers.use import ColouringSolver
from apportion.planner.tasks.tasks import Edges

# When tasks without tiles run: before the wait for the first round, after the last, or spread over the stages for even
# work.
Local = Literal["first", "last", "even"]


@dataclass(frozen=True)
class Slots:
    """Slots of tiles without relays. slot: int32 [tiles]; `slots` in total, `coalesce` per round."""

    slot: Ints
    slots: int
    max_degree: int
    coalesce: int

    @property
    def rounds(self) -> int:
        return -(-self.slots // self.coalesce)

    @property
    def round(self) -> Ints:
        return self.slot // self.coalesce


@dataclass(frozen=True)
class Schedule:
    """The round of each edge.

    round: int32 [edges], numbered in the order of waits; a relay comes after its parent. when: int64 [rounds],
    non-decreasing step of each round: a round may start once all rounds whose step is lower by `buffers` or more are
    consumed. channel: int64 [rounds]. slots: matchings in all rounds. local: when tasks without tiles run. division:
    int64 [rounds], ascending: the first part of the phase that needs each round; tasks then run in their own parts.
    own: int32 [blocks], instead of `local`: the stage, 0 to rounds, of tasks without tiles whose keys are in the block.
    back: int64 [edges], channel on which the sums of each edge's tile return; None: the channel of its round.
    beside_exchange: ranks of a group whose exchange overlaps with tasks; 0: no overlap.
    """

    routed: Routes
    round: Ints
    when: Ints
    channel: Ints
    slots: int
    buffers: int
    local: Local = "first"
    division: Ints | None = None
    own: Ints | None = None
    beside_exchange: int = 0
    back: Ints | None = None

    @property
    def edges(self) -> Edges:
        return self.routed.edges

    @property
    def rounds(self) -> int:
        return len(self.when)

    @cached_property
    def levels(self) -> int:
        """Waves of returns after the last round, until all have reached their homes: 2 with relays."""
        has_relays = not self.routed.carry and bool((self.edges.parent >= 0).any())
        return (2 if has_relays else 1) if self.rounds else 0

    @property
    def tails(self) -> int:
        """Stages after the last round, for tasks without tiles, during the last returns."""
        return max(2 if self.beside_exchange else 0, self.levels)

    @property
    def leads(self) -> int:
        """Stages before the first round."""
        return 2 if self.beside_exchange else 1

    @property
    def stages(self) -> int:
        """All stages: before the first round, one after each round, and after the last."""
        return self.leads + self.rounds + self.tails


# `auto` makes only this many rounds, since ranks wait for each other in each, but enough for some to overlap others;
# with relays they are twice as long, since a tile then passes through two. (FCP, section 4.2, coalesces four blocks;
# simulated with 8 to 256 ranks, four long rounds are as fast as many, or up to 30 % faster.)
AUTO_ROUNDS = 4
# Rounds have at most this many tokens per rank, to limit the rows held at once.
AUTO_ROUND_TOKENS = 131072
# Rounds between a relayed tile's arrival and the wait for it at its destination: with one, too little is computed in
# between (simulated on 64 ranks: 10 % slower); three gain nothing.
RELAY_LAG = 2


class SchedulePass(Pass, Protocol):
    """Assigns tiles to rounds.

    route: the schedule's own route, if it has one. exchange: assigns rows exchanged within a group to rounds.
    """

    @property
    def route(self) -> RoutePass | None:
        return None

    @property
    def exchange(self) -> Matchings:
        return Matchings()

    def tiles(self, edges: Edges, shared: bool) -> Routes | None:
        """Merges tiles before routing, or returns None to keep the star; shared: True if the route shares tiles
        among ranks, which must then remain equal for all."""
        return None

    @abstractmethod
    def __call__(self, routed: Routes, ranks: int) -> Schedule: ...


@dataclass(frozen=True)
class Matchings(SchedulePass):
    """Every slot is a matching; the number of slots is exactly the largest number of tiles that a rank sends or
    receives (FCP, section 4.2). Relays follow, each level in its own rounds on another channel.

    coalesce: slots per round; buffers: rounds of tiles that a rank holds at once (FCP's evaluation uses three).
    local: when tasks without tiles run. order: order of unequal tiles: any, or the longest or shortest first, so that
    tiles of a round are similar. solver: of kind colouring.
    """

    coalesce: Count | Literal["auto"] = "auto"
    buffers: Count = 3
    local: Local = "even"
    order: Literal["any", "longest", "shortest"] = "any"
    solver: ColouringSolver = ColouringSolver("matching")

    @property
    def exchange(self) -> Matchings:
        return self

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        edges, depth = routed.edges, depths(routed.edges.parent)
        roots, levels = np.flatnonzero(depth == 0), 1 + int(depth.max(initial=0))
        first = self.slots(edges.src[roots], edges.dst[roots], edges.rows[roots], ranks, min(levels, 2))
        if levels == 1:
            when = np.arange(first.rounds)
            return Schedule(
                routed, first.round, when, np.zeros_like(when), first.slots, self.buffers, self.local
            )
        # a relay that arrives with a later round is forwarded before the wait for that round
        keys, round_ = core.number_rounds(edges.parent, depth, first.round, levels, RELAY_LAG)
        channel = np.minimum(levels - 1 - keys % levels, 1)
        slots = first.slots + degrees(edges, round_, np.flatnonzero(keys % levels < levels - 1), ranks)
        return Schedule(routed, round_, keys // levels, channel, slots, self.buffers, self.local)

    def slots(self, src: Ints, dst: Ints, rows: Ints, ranks: int, times: int = 1) -> Slots:
        """Slots of the tiles src -> dst of `rows` rows each, integers [tiles]; automatic rounds are `times` times as
        long."""
        slot = self._slot(src, dst, rows, ranks)
        slots = int(slot.max()) + 1 if len(slot) else 0
        return Slots(slot, slots, max_degree(src, dst, ranks), self._coalesce(slots, rows, times))

    def _slot(self, src: Ints, dst: Ints, rows: Ints, ranks: int) -> Ints:
        if self.order == "any" or not len(rows):
            return self._colour(src, dst, ranks)
        by_length = np.argsort(-rows, kind="stable")
        slot = np.empty(len(rows), np.int32)
        slot[by_length] = self._colour(src[by_length], dst[by_length], ranks)
        sizes = np.zeros(int(slot.max()) + 1, np.int64)
        np.maximum.at(sizes, slot, rows)
        position = np.empty(len(sizes), np.int32)
        position[np.argsort(-sizes if self.order == "longest" else sizes, kind="stable")] = np.arange(
            len(sizes)
        )
        return position[slot]

    def _colour(self, src: Ints, dst: Ints, ranks: int) -> Ints:
        return self.solver(ColouringProblem(src, dst, ranks)).colour

    def _coalesce(self, slots: int, rows: Ints, times: int) -> int:
        if self.coalesce != "auto":
            return self.coalesce
        mean = int(rows.sum()) // len(rows) if len(rows) else 1
        return max(1, min(times * AUTO_ROUND_TOKENS // max(1, mean), -(-slots // AUTO_ROUNDS)))


def degrees(edges: Edges, round_: Ints, rounds: Ints, ranks: int) -> int:
    """Number of matchings in these rounds: the sum of their largest degrees."""
    if not len(edges):
        return 0
    return int(core.degrees(edges.src, edges.dst, round_, int(round_.max()) + 1, ranks)[rounds].sum())


def rounds_by_turn(
    routed: Routes, turn: Ints, ranks: int, buffers: int, local: Local = "first", **extra: Any
) -> Schedule:
    """One round for each distinct number in `turn`, int64 [edges], in ascending order, on one channel. extra: other
    fields of `Schedule`."""
    turns, round_ = np.unique(turn, return_inverse=True)
    rounds, channel = np.arange(len(turns)), np.zeros(len(turns), np.int64)
    slots = degrees(routed.edges, round_, rounds, ranks)
    return Schedule(routed, round_.astype(np.int32), rounds, channel, slots, buffers, local, **extra)


@dataclass(frozen=True)
class Ring(SchedulePass):
    """Ring attention (Liu et al., 2023): in each of N - 1 rounds every rank forwards the tile of the previous round.

    over: see the ring route. turns: True to run rings of one size after another, the largest first, like the groups of
    Megatron-Core's hybrid context parallelism; else all rings at once. window: ranks of an inner ring
    (Double-Ring-Attention of LoongTrain, Gu et al., 2024): tiles and gradients go around the ranks of a window while in
    flight to the next window, in rounds on a separate channel. It must divide the ranks of a larger ring; "node": the
    largest divisor of these and the ranks of a node; None and 1: a single ring. Raises ConfigError.
    """

    over: Literal["ranks", "holders"] = "ranks"
    turns: bool = False
    window: Count | Literal["node"] | None = None

    def __post_init__(self) -> None:
        if self.turns and self.window is not None:
            rule = "excludes `turns`: all rings run at once"
            raise ConfigError("recipe.schedule.ring.window", self.window, rule, "leave one of the two out")

    @property
    def route(self) -> RoutePass:
        """A ring is its own route."""
        return RingRoute(self.over) if self.window is None else DoubleRing(self.over, self.window)

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        if isinstance(routed, WindowRoutes):
            return _window_rounds(routed, ranks)
        if routed.ring is None:
            raise ConfigError("recipe.schedule", "ring", "needs tiles on rings", "leave the route out")
        turns = _earlier_rounds(routed.ring) if self.turns else 0
        return rounds_by_turn(routed, _hops(routed.edges.parent) + turns, ranks, 2)


def _window_rounds(routed: WindowRoutes, ranks: int) -> Schedule:
    """One round per hop; hops between windows are separate, on their own channel, started as soon as the tile has
    arrived."""
    turn = 2 * routed.hop + routed.between
    schedule = rounds_by_turn(routed, turn, ranks, 2, back=routed.back.astype(np.int64))
    # only dependencies of tiles delay a round: no rank has more than one round of either channel in flight
    return replace(schedule, when=np.zeros_like(schedule.when), channel=np.unique(turn) & 1)


def _hops(parent: Ints) -> Ints:
    """int64 [edges]: distance from home to the start of each edge of a chain; chains are sorted by hop."""
    index = np.arange(len(parent))
    return index - np.maximum.accumulate(np.where(parent < 0, index, 0)) if len(parent) else index


def _earlier_rounds(ring: Ints) -> Ints:
    """int64 [edges]: number of rounds of larger rings, which come before."""
    sizes = np.unique(ring)[::-1]
    row_offsets = np.cumsum(sizes - 1) - (sizes - 1)
    return np.asarray(row_offsets[np.searchsorted(-sizes, -ring)], np.int64)


@dataclass(frozen=True)
class Gather(SchedulePass):
    """Everything in one round, like an all-gather of KV; relays in one more round per level.

    local: tasks without tiles run during the round, or after it. whole: True if the rows that leave a rank are one
    tile for all ranks that need any of them, as in the collective; else each rank receives only what it needs.
    """

    local: Local = "last"
    whole: bool = False

    def tiles(self, edges: Edges, shared: bool) -> Routes:
        if shared and not self.whole:
            return Routes(edges, np.arange(len(edges), dtype=np.int32))
        return join(edges, self.whole)

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        depth = depths(routed.edges.parent)
        # each rank starts with its next neighbour, so that no rank is the first target of all
        order = np.lexsort(((routed.edges.dst - routed.edges.src) % ranks, depth))
        levels = int(depth.max(initial=-1)) + 1
        return rounds_by_turn(routed.take(order), depth[order], ranks, levels, self.local)
