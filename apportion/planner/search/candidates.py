"""What a search tries: the recipes it starts from, and the neighbours of a recipe that has done well."""

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
# rounds leave the first one exposed, many make every rank wait for the slowest; buffers for all of them keep ranks
# apart.
ROUNDS, BUFFERS = 6, 16
# Where queries see fewer keys than these shares of a rank's tokens: in few steps tiles of short documents are cheap to
# send twice, so that either route may be better; below the second (windows, chunks, answers to one question) they have
# few readers, and neither relays nor split heads save bytes: clusters of cells fit on a rank.
SHORT, SPARSE = 0.6, 0.2
# What travels of a key: forward, backward, and back.
JOURNEYS = (Tensor.KV, Tensor.KV, Tensor.DKV)
# Where keys travel for longer than ranks compute.
FEW_ROUNDS = 4
# Of tiles that are relayed: they pass through two rounds, so that more of these are on their way.
RELAYED_ROUNDS = 12
# What is tried around the best: about so many rounds, and so many buffers.
MORE_ROUNDS, MORE_BUFFERS = (12, 3, 4, 8, 20, 2, 1), (4,)
# Which part of a share of a long document comes from its head.
HEADS = (0.4, 0.5, 0.33)
# Of how many rows cuts are multiples: of a tile of most kernels.
ALIGN = 128
# Up to which share of a rank's time sequences stay whole.
LONE = (0.05, 0.12, 0.25)
# In what order tiles of several lengths travel, and when tasks run that need none (`even` cuts them into strips).
ORDERS, LOCALS = ("longest", "shortest", "any"), ("first", "even")


#: what `with_solvers` takes, by kind and name
EXACT = (("colouring", "flow"), ("partition", "ilp"))


@dataclass(frozen=True)
class Candidate:
    """A recipe to try. rounds: about how many its matchings make, which `coalesce` follows from once their number is
    known; None: as the recipe says."""

    recipe: Recipe
    rounds: int | None = None

    @cached_property
    def key(self) -> str:
        """Equal for equal candidates, whatever their names."""
        return f"{self.rounds} {_text(self.recipe)}"

    @cached_property
    def placing(self) -> str:
        """Equal for candidates whose tokens have the same homes."""
        return _text(step for step in self.recipe if step.step in ("inner", "shard", "place"))

    @property
    def overlapped(self) -> bool:
        """Whether the exchange of its heads goes beside computation."""
        step = self.recipe.step("inner")
        return step is not None and bool(step.params.get("overlap"))

    def with_schedule(self, **changed: int | str) -> Candidate:
        """The candidate with other parameters of its matchings."""
        step = self.recipe.step("schedule")
        held = {} if step is None else step.params
        return self.with_step("schedule", {"matchings": {**held, **changed}}, self.recipe.name, self.rounds)

    def with_step(
        self, step: str, value: Mapping[str, Any] | None, name: str, rounds: int | None
    ) -> Candidate:
        """The candidate with another step, {pass: parameters}, None to leave it out."""
        steps = {one.step: one for one in self.recipe if value or one.step != step}
        for chosen, params in (value or {}).items():
            steps[step] = Step(step, chosen, params)
        return Candidate(Recipe(name, tuple(steps.values())), rounds)


def _text(steps: Iterable[Step]) -> str:
    return json.dumps({one.step: [one.name, one.params] for one in steps}, sort_keys=True)


def portfolio(problem: Problem, inner: str) -> tuple[list[Candidate], list[Candidate]]:
    """The recipes that a search starts from, those that are cheap to plan and did best where queries see as many keys,
    and others.

    inner: "auto", or "none" for recipes that do not split heads.
    """
    degrees = _degrees(problem) if inner == "auto" else []
    reach = max(problem.reach.values())
    route = "node" if problem.cluster.nodes > 1 else "star"
    if reach < SHORT:
        others = [_mixed("blend", "star", degree) for degree in degrees]
        others += [_blocks("auto", 1), _mixed("contiguous", "star", 1)]
        star, whole, lone = _mixed("blend", "star", 1), _whole(), [*map(_lone, degrees[:1])]
        if reach >= SPARSE:
            return [star, *lone, whole, *_zones(problem), _mixed("blend", route, 1)], others
        # few tiles come, and all of them at once
        return [
            replace(star, rounds=1),
            replace(whole, rounds=1),
            *lone,
            *_zones(problem),
            _named("dcp"),
        ], others
    dear = _is_dear(problem)
    third = partial(_lone, rounds=FEW_ROUNDS) if dear else partial(_mixed, "blend", "star")
    makers = _lone, partial(_lone, lone=LONE[0], rounds=MORE_ROUNDS[0]), third
    first = [make(degree) for degree in degrees[:1] for make in makers]
    first.insert(len(first) if route == "node" else 0, _mixed("blend", route, 1))
    first += _zones(problem) if dear else []
    others = [_mixed("blend", "star", degree) for degree in degrees[1:2]]
    others += [_blocks("auto", 1), *map(_staged, degrees[:1])]
    others += [_mixed("blend", route, degree) for degree in degrees[2:]]
    others += [_blocks(4096, degree) for degree in (1, *degrees[:1])]
    others += [Candidate(_recipe(f"zigzag-u{degree}", degree, "zigzag", "ring")) for degree in degrees[:1]]
    others += [_mixed("contiguous", "star", 1)]
    others += [_blocks("auto", degree) for degree in degrees[:1]]
    return first, others


def last_resort() -> Candidate:
    """What serves whatever can be served: `fcp` as it is."""
    return _named("fcp")


def _named(name: str) -> Candidate:
    from apportion.planner.recipe.recipes import find_recipe

    return Candidate(find_recipe(name))


def _degrees(problem: Problem) -> list[int]:
    """Over how many ranks of a node heads can be split, the most first."""
    most = gcd(problem.cluster.ranks_per_node, problem.model.q_heads)
    return [degree for degree in range(most, 1, -1) if most % degree == 0]


def _mixed(place: str, route: str, degree: int) -> Candidate:
    rounds = ROUNDS if route == "star" else RELAYED_ROUNDS
    return Candidate(_recipe(f"{place}-u{degree}", degree, place, "matchings", route=route), rounds)


def _lone(degree: int, lone: float | str = "auto", rounds: int = ROUNDS) -> Candidate:
    """Heads split for long sequences only, even in time."""
    inner = {"ulysses": {"degree": degree, "lone": lone, "kinds": "auto"}}
    split = _mixed("blend", "star", 1).with_step("inner", inner, f"mixed-u{degree}", rounds)
    return split.with_step("place", {"blend": {"weigh": "time", "align": ALIGN}}, split.recipe.name, rounds)


def _whole() -> Candidate:
    """Whole sequences, even in time; what fits nowhere is cut."""
    recipe = _recipe("whole", 1, "lpt", "matchings")
    place = {"lpt": {"weigh": "time", "solver": "swap"}}
    return Candidate(recipe, ROUNDS).with_step("place", place, "whole", ROUNDS)


def _zones(problem: Problem) -> list[Candidate]:
    """Sequences on as few ranks as have room for them (Zeppelin's zones), few of them cut; none where a rank would have
    more above the mean than cut sequences take on their way. Where rounds take longer than ranks compute, also none cut
    but those that no rank has room for."""
    rounds = _rounds_us(problem)
    times = row_times(problem, problem.batch.starts) / 1e3
    heaviest = float((times / -(-problem.batch.lengths // problem.token_cap)).max())
    travel = rounds + _moved_bytes(problem) / (problem.cluster.intra_gbs * 1e3)
    if heaviest - float(times.sum() / problem.speeds.sum()) > travel:
        return []
    zones = Candidate(_recipe("zones", 1, "zeppelin", "matchings"), ROUNDS)
    return [zones, _named("hybrid_dp")] if rounds > _busy_us(problem) else [zones]


def _rounds_us(problem: Problem) -> float:
    """All layers: what the rounds of the keys of a rank take besides their bytes, each packed, sent and unpacked."""
    cluster, layers = problem.cluster, sum(problem.layers.values())
    latency = cluster.inter_latency_us if cluster.nodes > 1 else cluster.intra_latency_us
    return layers * len(JOURNEYS) * ROUNDS * (2 * problem.cost.hardware.rowop_us.value + latency)


def _busy_us(problem: Problem) -> float:
    """All layers: the pairs of a mean rank at the best throughput."""
    pairs = {kind: int(area(bands).sum()) for kind, bands in problem.bands.items()}
    heads, cost = problem.model.q_heads, problem.cost
    busy = sum(
        problem.layers[kind] * float(cost.ideal_us(phase, held, heads))
        for kind, held in pairs.items()
        for phase in PHASES
    )
    return busy / float(problem.speeds.sum())


def _is_dear(problem: Problem) -> bool:
    """Whether the keys and values of a rank, and their gradients, travel for longer than a rank computes."""
    link = problem.cluster.inter_gbs_per_rank if problem.cluster.nodes > 1 else problem.cluster.intra_gbs
    return _moved_bytes(problem) / (link * 1e3) > _busy_us(problem)


def _moved_bytes(problem: Problem) -> float:
    """All layers: the keys and values of a rank's tokens, forward and backward, and their gradients."""
    a_token = sum(problem.model.sent_bytes(tensor) for tensor in JOURNEYS)
    return sum(problem.layers.values()) * a_token * problem.batch.tokens / problem.ranks


def _staged(degree: int) -> Candidate:
    """Heads of a group in stages, whose exchange overlaps the stage before (UPipe, with q, k and v given)."""
    inner = {"upipe": {"degree": degree, "heads": degree, "ahead": 1}}
    return _mixed("blend", "star", 1).with_step("inner", inner, f"blend-upipe{degree}", ROUNDS)


def _blocks(block: int | str, degree: int) -> Candidate:
    name = f"fcp-{block}-u{degree}"
    return Candidate(_recipe(name, degree, "lpt", "matchings", blocks=block), 2 * ROUNDS)


def _recipe(
    name: str,
    degree: int,
    place: str,
    schedule: str,
    route: str = "star",
    blocks: int | str | None = None,
) -> Recipe:
    near = {"solver": "lpt_near"}
    shard = {"sequences": {}} if blocks is None else {"blocks": {"block": blocks, "zigzag": True, **near}}
    how = {"buffers": BUFFERS} if schedule == "matchings" else {}
    placed: Mapping[str, Mapping[str, Any]] = {
        "blend": {"align": ALIGN},
        "zeppelin": {"cap": "enforce", "parts": 1},
    }
    params = near if blocks is not None else placed.get(place, {})
    data: dict[str, Any] = {"shard": shard, "place": {place: params}, "schedule": {schedule: how}}
    if degree > 1:
        data["inner"] = {"ulysses": {"degree": degree, "overlap": True}}
    if route != "star":
        data["route"] = {route: {}}
    return Recipe(name, data)


def in_more_rounds(best: Candidate) -> Candidate:
    """The candidate with its tiles in more rounds than candidates start with."""
    return Candidate(best.recipe, MORE_ROUNDS[0])


def neighbours(best: Candidate, problem: Problem, inner: str) -> list[Iterator[Candidate]]:
    """Variations of one parameter each, those first that helped most often; some are the best itself."""
    moves = [_longer(best), _weighed(best), _overlapped(best), _headed(best)]
    if best.rounds is not None:
        moves.insert(0, _in_rounds(best, MORE_ROUNDS[:3]))
        moves.append(best.with_schedule(order=order) for order in ORDERS)
    near = max(problem.reach.values()) < SPARSE
    if inner == "auto" and not near:
        moves.append(_split(best, problem))
    if best.rounds is not None:
        moves.append(_in_rounds(best, MORE_ROUNDS[3:]))
        if not best.overlapped:  # which runs these evenly in any case
            moves.append(best.with_schedule(local=local) for local in LOCALS)
        if problem.cluster.nodes > 1:
            moves.append(_rerouted(best))
        moves.append(best.with_schedule(buffers=buffers) for buffers in MORE_BUFFERS)
    moves.append(_resized(best))
    if inner == "auto" and near:
        moves.append(_split(best, problem))
    return moves


def with_solvers(best: Candidate) -> Iterator[Candidate]:
    """With exact solvers, where its passes take one."""
    place = best.recipe.step("place")
    if best.rounds is not None:
        yield best.with_schedule(solver="flow")
    if place is not None and place.name == "lpt":
        value = {"lpt": {**place.params, "solver": "ilp"}}
        yield best.with_step("place", value, best.recipe.name, best.rounds)


def _in_rounds(best: Candidate, counts: Sequence[int]) -> Iterator[Candidate]:
    return (Candidate(best.recipe, rounds) for rounds in counts)


def _rerouted(best: Candidate) -> Iterator[Candidate]:
    name, route = best.recipe.name, best.recipe.step("route")
    if route is None:
        yield best.with_step("route", {"node": {}}, name, RELAYED_ROUNDS)
    else:
        yield best.with_step("route", None, name, ROUNDS)


def _longer(best: Candidate) -> Iterator[Candidate]:
    """With other sequences left whole, where some are."""
    step = best.recipe.step("inner")
    if step is not None and step.params.get("lone") is not None:
        for lone in LONE:
            value = {step.name: {**step.params, "lone": lone}}
            yield best.with_step("inner", value, best.recipe.name, best.rounds)


def _overlapped(best: Candidate) -> Iterator[Candidate]:
    """With the exchange beside computation, or before and after it."""
    step = best.recipe.step("inner")
    if step is not None and step.name == "ulysses":
        for overlap in (True, False):
            value = {"ulysses": {**step.params, "overlap": overlap}}
            yield best.with_step("inner", value, best.recipe.name, best.rounds)


def _split(best: Candidate, problem: Problem) -> Iterator[Candidate]:
    step = best.recipe.step("inner")
    held = 1 if step is None else int(step.params["degree"])
    shared = {"overlap": True} if step is None or step.name != "ulysses" else step.params
    base = best.recipe.name.rpartition("-u")[0] or best.recipe.name
    for degree in sorted({*_degrees(problem), 1}, key=lambda degree: abs(degree - held)):
        if degree != held:
            value = None if degree == 1 else {"ulysses": {**shared, "degree": degree}}
            yield best.with_step("inner", value, f"{base}-u{degree}", best.rounds)


def _weighed(best: Candidate) -> Iterator[Candidate]:
    """With time made even instead of pairs, or the other way round, where placement can do either."""
    place = best.recipe.step("place")
    if place is not None and place.name in ("blend", "lpt"):
        for weigh in ("time", "pairs"):
            value = {place.name: {**place.params, "weigh": weigh}}
            yield best.with_step("place", value, best.recipe.name, best.rounds)


def _headed(best: Candidate) -> Iterator[Candidate]:
    """Other shares of long documents, where `blend` cuts them."""
    place = best.recipe.step("place")
    if place is not None and place.name == "blend":
        for head in HEADS:
            value = {"blend": {**place.params, "head": head}}
            yield best.with_step("place", value, best.recipe.name, best.rounds)


def _resized(best: Candidate) -> Iterator[Candidate]:
    """Other blocks, where tokens are cut into blocks."""
    shard = best.recipe.step("shard")
    if shard is not None and shard.name == "blocks":
        for block in (8192, 4096, 2048, "auto"):
            value = {"blocks": {**shard.params, "block": block}}
            yield best.with_step("shard", value, best.recipe.name, best.rounds)
