"""Search space: initial recipes, and the neighbours of a good recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd
from typing import Any

from apportion.ir.masks.bands import area
from apportion.ir.request.policy import Recipe, Step
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner.problem import Problem
from apportion.planner.shard.blocks import row_times

# Rounds and buffers that candidates start with. Simulated on 64 and 256 ranks (documents of docs/benchmarks.md): few
# rounds leave the first one exposed, many make every rank wait for the slowest; buffers for all of them decouple the
# ranks.
ROUNDS, BUFFERS = 6, 16
# Thresholds for the number of keys that queries see, as shares of a rank's tokens: below the first, tiles of short
# documents are cheap to send twice, so either route may be better; below the second (windows, chunks, answers to one
# question) tiles have few readers, and neither relays nor split heads save bytes: clusters of cells fit on a rank.
SHORT, SPARSE = 0.6, 0.2
# Transfers of a key: forward, backward, and the returned gradient.
JOURNEYS = (Tensor.KV, Tensor.KV, Tensor.DKV)
# Number of rounds of a candidate if transferring the keys takes longer than compute.
FEW_ROUNDS = 4
# Number of rounds with relays: a relayed tile passes through two of them, so more tiles are in flight.
RELAYED_ROUNDS = 12
# Numbers of rounds and buffers tried around the best.
MORE_ROUNDS, MORE_BUFFERS = (12, 3, 4, 8, 20, 2, 1), (4,)
# Fractions of each rank's share of a long document that are taken from the document's head.
HEADS = (0.4, 0.5, 0.33)
# Cuts are at multiples of this many rows: the tile of most kernels.
ALIGN = 128
# Maximum shares of a rank's time for sequences that stay whole.
LONE_SHARES = (0.05, 0.12, 0.25)
# Orders of tiles of different lengths, and when tasks without tiles run (`even` cuts them into strips).
ORDERS, LOCALS = ("longest", "shortest", "any"), ("first", "even")


#: solvers that `with_solvers` uses, by kind and name
EXACT = (("colouring", "flow"), ("partition", "ilp"))


@dataclass(frozen=True)
class Candidate:
    """A recipe to try. rounds: approximate number of its matching rounds, from which `coalesce` follows once the number
    of slots is known; None: as in the recipe."""

    recipe: Recipe
    rounds: int | None = None

    @cached_property
    def key(self) -> str:
        """Cache key: equal for equal candidates, regardless of their names."""
        return f"{self.rounds} {_text(self.recipe)}"

    @cached_property
    def placement_key(self) -> str:
        """Cache key of placement: equal for candidates with the same token homes."""
        return _text(step for step in self.recipe if step.step in ("inner", "shard", "place"))

    @property
    def overlapped(self) -> bool:
        """True if the exchange of its heads overlaps computation."""
        step = self.recipe.step("inner")
        return step is not None and bool(step.params.get("overlap"))

    def with_parameter(self, step: str, parameter: str, value: Any) -> Candidate:
        """The candidate with another value of a parameter of a step that it has."""
        current = self.recipe.step(step)
        assert current is not None
        return self.with_step(
            step, {current.name: {**current.params, parameter: value}}, self.recipe.name, self.rounds
        )

    def with_step(
        self, step: str, value: Mapping[str, Any] | None, name: str, rounds: int | None
    ) -> Candidate:
        """The candidate with `step` replaced by `value`, {pass: parameters}, or without it if `value` is None."""
        steps = {item.step: item for item in self.recipe if value or item.step != step}
        for pass_name, params in (value or {}).items():
            steps[step] = Step(step, pass_name, params)
        return Candidate(Recipe(name, tuple(steps.values())), rounds)


def _text(steps: Iterable[Step]) -> str:
    return json.dumps({item.step: [item.name, item.params] for item in steps}, sort_keys=True)


def portfolio(problem: Problem, inner: str) -> tuple[list[Candidate], list[Candidate]]:
    """(initial recipes of a search, other recipes); initial ones are cheap to plan and best for requests whose queries
    see similar numbers of keys.

    inner: "auto", or "none" for recipes that do not split heads.
    """
    degrees = _degrees(problem) if inner == "auto" else []
    reach = max(problem.reach.values())
    route = "node" if problem.cluster.nodes > 1 else "star"
    if reach < SHORT:
        others = [_mixed("blend", "star", degree) for degree in degrees]
        others += [_blocks("auto", 1), _mixed("contiguous", "star", 1)]
        star, whole, lone = _mixed("blend", "star", 1), _whole_sequences(), [*map(_lone_split, degrees[:1])]
        if reach >= SPARSE:
            return [star, *lone, whole, *_zones(problem), _mixed("blend", route, 1)], others
        # few tiles arrive, all at once
        return [
            replace(star, rounds=1),
            replace(whole, rounds=1),
            *lone,
            *_zones(problem),
            _built_in("dcp"),
        ], others
    is_expensive = _is_communication_heavy(problem)
    last_maker = partial(_lone_split, rounds=FEW_ROUNDS) if is_expensive else partial(_mixed, "blend", "star")
    makers = _lone_split, partial(_lone_split, lone=LONE_SHARES[0], rounds=MORE_ROUNDS[0]), last_maker
    first = [make(degree) for degree in degrees[:1] for make in makers]
    first.insert(len(first) if route == "node" else 0, _mixed("blend", route, 1))
    first += _zones(problem) if is_expensive else []
    others = [_mixed("blend", "star", degree) for degree in degrees[1:2]]
    others += [_blocks("auto", 1), *map(_head_stages, degrees[:1])]
    others += [_mixed("blend", route, degree) for degree in degrees[2:]]
    others += [_blocks(4096, degree) for degree in (1, *degrees[:1])]
    others += [Candidate(_recipe(f"zigzag-u{degree}", degree, "zigzag", "ring")) for degree in degrees[:1]]
    others += [_mixed("contiguous", "star", 1)]
    others += [_blocks("auto", degree) for degree in degrees[:1]]
    return first, others


def last_resort() -> Candidate:
    """The fallback, which plans every feasible request: `fcp` unchanged."""
    return _built_in("fcp")


def _built_in(name: str) -> Candidate:
    from apportion.planner.recipe.recipes import find_recipe

    return Candidate(find_recipe(name))


def _degrees(problem: Problem) -> list[int]:
    """Numbers of ranks of a node over which heads can be split, largest first."""
    limit = gcd(problem.cluster.ranks_per_node, problem.model.q_heads)
    return [degree for degree in range(limit, 1, -1) if limit % degree == 0]


def _mixed(place: str, route: str, degree: int) -> Candidate:
    rounds = ROUNDS if route == "star" else RELAYED_ROUNDS
    return Candidate(_recipe(f"{place}-u{degree}", degree, place, "matchings", route=route), rounds)


def _lone_split(degree: int, lone: float | str = "auto", rounds: int = ROUNDS) -> Candidate:
    """Splits heads for long sequences only, balanced by time."""
    inner = {"ulysses": {"degree": degree, "lone": lone, "kinds": "auto"}}
    split = _mixed("blend", "star", 1).with_step("inner", inner, f"mixed-u{degree}", rounds)
    return split.with_step("place", {"blend": {"weigh": "time", "align": ALIGN}}, split.recipe.name, rounds)


def _whole_sequences() -> Candidate:
    """Whole sequences, balanced by time; sequences that fit no rank are cut."""
    recipe = _recipe("whole", 1, "lpt", "matchings")
    place = {"lpt": {"weigh": "time", "solver": "swap"}}
    return Candidate(recipe, ROUNDS).with_step("place", place, "whole", ROUNDS)


def _zones(problem: Problem) -> list[Candidate]:
    """Sequences on as few ranks as have room (Zeppelin's zones), few of them cut; no candidate if a rank's excess over
    the mean would exceed the transfer time of cut sequences. If rounds take longer than compute, also a variant that
    cuts only sequences that fit no rank."""
    rounds_us = _rounds_us(problem)
    times = row_times(problem, problem.batch.starts) / 1e3
    heaviest = float((times / -(-problem.batch.lengths // problem.token_cap)).max())
    travel_us = rounds_us + _moved_bytes(problem) / (problem.cluster.intra_gbs * 1e3)
    if heaviest - float(times.sum() / problem.speeds.sum()) > travel_us:
        return []
    zones = Candidate(_recipe("zones", 1, "zeppelin", "matchings"), ROUNDS)
    return [zones, _built_in("hybrid_dp")] if rounds_us > _busy_us(problem) else [zones]


def _rounds_us(problem: Problem) -> float:
    """Fixed cost, over all layers, of the rounds for a rank's keys: packing, sending and unpacking, apart from their
    bytes."""
    cluster, layers = problem.cluster, sum(problem.layers.values())
    latency = cluster.inter_latency_us if cluster.nodes > 1 else cluster.intra_latency_us
    return layers * len(JOURNEYS) * ROUNDS * (2 * problem.cost.hardware.rowop_us.value + latency)


def _busy_us(problem: Problem) -> float:
    """Time, over all layers, of a mean rank's pairs at the best throughput."""
    pairs = {kind: int(area(bands).sum()) for kind, bands in problem.bands.items()}
    heads, cost = problem.model.q_heads, problem.cost
    busy = sum(
        problem.layers[kind] * float(cost.ideal_us(phase, kind_pairs, heads))
        for kind, kind_pairs in pairs.items()
        for phase in PHASES
    )
    return busy / float(problem.speeds.sum())


def _is_communication_heavy(problem: Problem) -> bool:
    """True if transferring a rank's keys, values and their gradients takes longer than its compute."""
    link = problem.cluster.inter_gbs_per_rank if problem.cluster.nodes > 1 else problem.cluster.intra_gbs
    return _moved_bytes(problem) / (link * 1e3) > _busy_us(problem)


def _moved_bytes(problem: Problem) -> float:
    """Bytes, over all layers, of the keys and values of a rank's tokens, forward and backward, and their gradients."""
    token_bytes = sum(problem.model.sent_bytes(tensor) for tensor in JOURNEYS)
    return sum(problem.layers.values()) * token_bytes * problem.batch.tokens / problem.ranks


def _head_stages(degree: int) -> Candidate:
    """Heads of a group in stages, whose exchange overlaps the previous stage (UPipe on given q, k and v)."""
    inner = {"upipe": {"degree": degree, "heads": degree, "ahead": 1}}
    return _mixed("blend", "star", 1).with_step("inner", inner, f"blend-upipe{degree}", ROUNDS)


def _blocks(block: int | str, degree: int) -> Candidate:
    name = f"fcp-{block}-u{degree}"
    return Candidate(_recipe(name, degree, "lpt", "matchings", blocks=block), 2 * ROUNDS)


def _recipe(
    name: str, degree: int, place: str, schedule: str, route: str = "star", blocks: int | str | None = None
) -> Recipe:
    solver = {"solver": "lpt_near"}
    shard = {"sequences": {}} if blocks is None else {"blocks": {"block": blocks, "zigzag": True, **solver}}
    schedule_params = {"buffers": BUFFERS} if schedule == "matchings" else {}
    place_params: Mapping[str, Mapping[str, Any]] = {
        "blend": {"align": ALIGN},
        "zeppelin": {"cap": "enforce", "parts": 1},
    }
    params = solver if blocks is not None else place_params.get(place, {})
    data: dict[str, Any] = {"shard": shard, "place": {place: params}, "schedule": {schedule: schedule_params}}
    if degree > 1:
        data["inner"] = {"ulysses": {"degree": degree, "overlap": True}}
    if route != "star":
        data["route"] = {route: {}}
    return Recipe(name, data)


def in_more_rounds(best: Candidate) -> Candidate:
    """The candidate with more rounds than initial candidates have."""
    return Candidate(best.recipe, MORE_ROUNDS[0])


def neighbours(best: Candidate, problem: Problem, inner: str) -> list[Iterator[Candidate]]:
    """Variations of one parameter each, the most often successful ones first; some equal the best itself."""
    step = best.recipe.step("inner")
    lone_shares = LONE_SHARES if step is not None and step.params.get("lone") is not None else ()
    moves = [
        _variants(best, "inner", ("ulysses",), "lone", lone_shares),
        _variants(best, "place", ("blend", "lpt"), "weigh", ("time", "pairs")),
        _variants(best, "inner", ("ulysses",), "overlap", (True, False)),
        _variants(best, "place", ("blend",), "head", HEADS),
    ]
    if best.rounds is not None:
        moves.insert(0, _with_rounds(best, MORE_ROUNDS[:3]))
        moves.append(_variants(best, "schedule", ("matchings",), "order", ORDERS))
    is_sparse = max(problem.reach.values()) < SPARSE
    if inner == "auto" and not is_sparse:
        moves.append(_split(best, problem))
    if best.rounds is not None:
        moves.append(_with_rounds(best, MORE_ROUNDS[3:]))
        if not best.overlapped:  # with overlap `local` is always "even"
            moves.append(_variants(best, "schedule", ("matchings",), "local", LOCALS))
        if problem.cluster.nodes > 1:
            moves.append(_reroute(best))
        moves.append(_variants(best, "schedule", ("matchings",), "buffers", MORE_BUFFERS))
    moves.append(_variants(best, "shard", ("blocks",), "block", (8192, 4096, 2048, "auto")))
    if inner == "auto" and is_sparse:
        moves.append(_split(best, problem))
    return moves


def with_solvers(best: Candidate) -> Iterator[Candidate]:
    """Variants with exact solvers, for passes that take one."""
    if best.rounds is not None:
        yield from _variants(best, "schedule", ("matchings",), "solver", ("flow",))
    yield from _variants(best, "place", ("lpt",), "solver", ("ilp",))


def _variants(
    best: Candidate, step: str, passes: Sequence[str], parameter: str, values: Sequence[Any]
) -> Iterator[Candidate]:
    """Variants with these values of a parameter; none unless the step uses one of these passes."""
    current = best.recipe.step(step)
    applies = current is not None and current.name in passes
    return (best.with_parameter(step, parameter, value) for value in (values if applies else ()))


def _with_rounds(best: Candidate, counts: Sequence[int]) -> Iterator[Candidate]:
    return (Candidate(best.recipe, rounds) for rounds in counts)


def _reroute(best: Candidate) -> Iterator[Candidate]:
    name, route = best.recipe.name, best.recipe.step("route")
    if route is None:
        yield best.with_step("route", {"node": {}}, name, RELAYED_ROUNDS)
    else:
        yield best.with_step("route", None, name, ROUNDS)


def _split(best: Candidate, problem: Problem) -> Iterator[Candidate]:
    step = best.recipe.step("inner")
    current = 1 if step is None else int(step.params["degree"])
    shared = {"overlap": True} if step is None or step.name != "ulysses" else step.params
    base = best.recipe.name.rpartition("-u")[0] or best.recipe.name
    for degree in sorted({*_degrees(problem), 1}, key=lambda degree: abs(degree - current)):
        if degree != current:
            value = None if degree == 1 else {"ulysses": {**shared, "degree": degree}}
            yield best.with_step("inner", value, f"{base}-u{degree}", best.rounds)
