"""Two halves that take turns, simulated: timelines by hand, segments, orders that cannot deadlock, and the gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apportion import Batch, Cluster, Hardware, Model, Plan, Policy, Recipe, simulate
from apportion.ir.errors import ConfigError, VerifyError
from apportion.ir.isa import Op
from apportion.ir.plan.segments import Cuts, agreed_cuts, own_cuts, segment_ends
from apportion.ir.request.figures import Figure
from apportion.planner import api
from apportion.planner.cost import CostModel
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate.pair import run as pair
from apportion.planner.simulate.pair.result import Pair, PairRun
from apportion.planner.simulate.pair.run import simulate_pair, simulate_pair_with
from tests.support.sparse import marked, sparse, sparse_product
from tests.support.strategies import STRATEGIES as OTHERS, alternating, cluster, is_uncapped, steps
from tests.support.timelines import Unit, plan_of, work

STRATEGIES = OTHERS | {"distca": steps("distca", place={"granularity": 4})}

#: linear layers of 64 tokens take 46 us: 12 before attention and 34 after it
COSTS = Unit(a_token=46 / 64)

#: rank 1 needs 8 us of keys from rank 0, 3 us later, and both compute 10 us
FETCH = (
    f"launch 0: send KV.home[0:8) to 1\n{work(10)}\nwait 0",
    f"launch 0: receive KV.work[0:8) from 0\nwait 0\n{work(10)}",
)


def plan_with(batch: Batch, recipe: Recipe, ranks: int, model: Model) -> Plan:
    cap = None if is_uncapped(recipe) else batch.tokens
    return api.plan(batch, cluster(ranks), model, policy=Policy(recipe, token_cap=cap))


def halves_of(name: str, ranks: int = 4, kinds: dict[str, Any] | None = None) -> list[Plan]:
    model = Model(2, 1, 8, dtype="fp32", hidden=16, ffn=32, layers=dict.fromkeys(kinds, 1) if kinds else 1)
    halves = alternating(Batch.from_lengths([40, 33, 25, 9, 7, 1], kinds))
    recipe = Recipe(name, STRATEGIES[name])
    return [plan_with(half, recipe, ranks, model) for half in halves]


# --- timelines by hand


def turns(plan: Plan, costs: Unit = COSTS, layers: int = 1, **options: Any) -> PairRun:
    """Forward of two equal halves."""
    return simulate_pair_with(plan, plan, costs, layers=layers, **options).runs["default", "forward"]


def test_one_layer_by_hand() -> None:
    """Turns: rank 1 computes ping at 24, pong at 35, when its keys have arrived, and both linear layers after 45."""
    plan = plan_of(*FETCH)
    run = turns(plan)
    assert run.busy_us.tolist() == [112.0, 112.0]
    assert run.turns.makespan_us == pytest.approx(113.0)
    assert run.turns.exposed_us.tolist() == pytest.approx([0.0, 1.0])
    assert run.serial.makespan_us == pytest.approx(134.0)
    assert run.single.makespan_us == pytest.approx(134.0)
    assert run.signal.makespan_us == pytest.approx(112.0)
    assert run.gain == pytest.approx(134 / 113 - 1)
    assert run.hidden_fraction == pytest.approx(21 / 22)


def test_between_layers_no_rank_waits_for_the_other_half() -> None:
    plan = plan_of(*FETCH)
    run = turns(plan, layers=2)
    assert run.turns.makespan_us == pytest.approx(226.0)
    assert run.single.makespan_us == pytest.approx(4 * 67.0)


def test_rounds_of_one_group_wait_for_each_other() -> None:
    """Keys of both halves in one group: pong's start when ping's have arrived."""
    plan = plan_of(*FETCH)
    quick = replace(COSTS, a_token=0.0)
    own, shared = (turns(plan, quick, groups=groups) for groups in (None, 1))
    # pong's keys arrive at 8 + 8 + 3, ping computes until 21
    assert own.turns.makespan_us == pytest.approx(31.0)
    assert shared.turns.makespan_us == pytest.approx(32.0)  # at 11 + 8 + 3


def test_backward_swaps_the_linear_layers_before_and_after_attention() -> None:
    plan = plan_of("delta dO.home[0:64) O.home[0:64) -> delta.work[0:64)", phase="backward")
    half = pair._half(plan, "default", "backward", COSTS)
    assert half.before.tolist() == pytest.approx([2 * 34])
    assert half.after.tolist() == pytest.approx([2 * 12])


def test_packing_precedes_a_round_of_each_half() -> None:
    """Rank 0 packs for 1 us. In series, pong's round starts when rank 1 launches it, at 68 + 12; on a single stream,
    rank 0, which waited for ping's, is later by its packing."""
    plan = plan_of(*FETCH)
    run = turns(plan, replace(COSTS, a_row=1.0))
    assert run.busy_us.tolist() == pytest.approx([114.0, 112.0])
    assert run.serial.makespan_us == pytest.approx(68 + 12 + 11 + 10 + 34)
    assert run.single.makespan_us == pytest.approx(68 + 12 + 1 + 11 + 10 + 34)


def test_casts_of_a_half_precede_its_linear_layers() -> None:
    plan = plan_of("delta dO.home[0:64) O.home[0:64) -> delta.work[0:64)", phase="backward")
    run = simulate_pair_with(plan, plan, replace(COSTS, a_row=5.0), layers=1).runs["default", "backward"]
    half = 2 * 46 + 2 * 5  # delta; dQ, dK and dV
    assert run.busy_us.tolist() == pytest.approx([2 * half])
    assert [way.makespan_us for way in run.modes.values()] == pytest.approx([2 * half] * 4)


def test_slow_ranks_take_longer_in_linear_layers_too() -> None:
    plan = plan_of(*FETCH, speeds=[1.0, 0.5])
    half = pair._half(plan, "default", "forward", COSTS)
    assert half.before.tolist() == pytest.approx([12, 24])


# --- segments


def rounds_of(plan: Any, key: Any) -> Iterator[list[tuple[NDArray[Any], list[Any]]]]:
    """The ops and launched rounds of each rank's three segments, under cuts on which all ranks agree."""
    programs = [plan.programs[key].rank(rank)["instructions"] for rank in range(plan.header.ranks)]
    columns = [(table["op"], table["round"]) for table in programs]
    cuts = agreed_cuts(own_cuts(*both) for both in columns)
    for op, round_ in columns:
        ends = (0, *segment_ends(op, round_, cuts), len(op))
        parts = [slice(a, b) for a, b in pairwise(ends)]
        yield [(op[part], round_[part][op[part] == Op.LAUNCH].tolist()) for part in parts]


@pytest.mark.parametrize(("name", "ranks"), sparse_product(4, STRATEGIES, (2, 4, 6)))
def test_segments_of_all_ranks_launch_the_same_rounds(name: str, ranks: int) -> None:
    plan = halves_of(name, ranks)[0]
    attention = (Op.ATTEND, Op.ATTEND_GRAD)
    for key in plan.programs:
        found = list(rounds_of(plan, key))
        for dispatch, _, collect in found:
            assert not np.isin(dispatch[0], (Op.WAIT, *attention)).any()
            assert not np.isin(collect[0], attention).any()
        launched = [{r for rank in found for r in rank[segment][1]} for segment in range(3)]
        for earlier, later in pairwise(launched):
            assert max(earlier, default=-1) < min(later, default=2**31)


def columns(*steps: tuple[Op, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.array([op for op, _ in steps], np.uint8), np.array([r for _, r in steps], np.int32)


def test_cuts_by_hand() -> None:
    """Rank 0 computes before its second launch, rank 1 forwards what it received; both send results home in round 3,
    and rank 1 forwards a sum in round 4."""
    L, W, A, M = Op.LAUNCH, Op.WAIT, Op.ATTEND, Op.ADD
    first = columns((L, 0), (A, 0), (L, 1), (W, 0), (A, 0), (L, 3), (W, 1), (M, 0), (W, 3), (M, 0))
    second = columns((L, 0), (W, 0), (L, 2), (A, 0), (L, 3), (W, 2), (W, 3), (M, 0), (L, 4), (W, 4))
    assert own_cuts(*first) == Cuts(1, 4)
    assert own_cuts(*second) == Cuts(2, 4)
    agreed = agreed_cuts([own_cuts(*first), own_cuts(*second)])
    assert agreed == Cuts(1, 4)
    assert segment_ends(*first, agreed) == (1, 6)
    assert segment_ends(*second, agreed) == (1, 5)


def test_a_rank_without_instructions() -> None:
    nothing = columns()
    assert segment_ends(*nothing, agreed_cuts([own_cuts(*nothing)])) == (0, 0)


# --- orders


@pytest.mark.parametrize("ranks", marked([2, 4, 6], (1,)))
@pytest.mark.parametrize("name", sparse(list(STRATEGIES), 4))
def test_taking_turns_never_deadlocks_and_rarely_costs_time(name: str, ranks: int) -> None:
    """In one group, a rank's rounds are served strictly in the order of its launches, so only a common order completes.
    The halves use different recipes, so that their rounds have nothing in common. On half-millisecond plans an order
    may lose a few percent by chance; over all pairs it gains."""
    for groups in (None, 1, 2):
        found = pair_of(name, ranks, groups)
        for run in found.runs.values():
            assert run.turns.makespan_us >= run.busy_us.max() * (1 - 1e-12)
            assert run.single.makespan_us >= run.serial.makespan_us * (1 - 1e-12)
            assert run.signal.makespan_us <= run.turns.makespan_us * 1.01
            assert groups is not None or run.turns.makespan_us <= run.serial.makespan_us * 1.03


@cache
def pair_of(name: str, ranks: int, groups: int | None) -> Pair:
    other = list(STRATEGIES)[(list(STRATEGIES).index(name) + 5) % len(STRATEGIES)]
    return simulate_pair(halves_of(name, ranks)[0], halves_of(other, ranks)[1], layers=2, groups=groups)


@pytest.mark.slow
def test_taking_turns_gains_over_all_pairs() -> None:
    pairs = (pair_of(name, ranks, None) for name in STRATEGIES for ranks in (2, 4, 6))
    runs = [run for pair in pairs for run in pair.runs.values()]
    turns, serial = (sum(getattr(run, way).makespan_us for run in runs) for way in ("turns", "serial"))
    assert turns < 0.99 * serial


def test_cuts_that_differ_between_ranks_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows why ranks must agree. Rank 0 computes before launching round 1; rank 1 could launch it at once. If each cut
    alone, rank 0 launches round 0 of pong between the rounds of ping, and rank 1 does not."""
    plan = plan_of(
        f"launch 0: send KV.home[0:8) to 1\n{work(10)}\nlaunch 1: send KV.home[8:16) to 1\nwait 0\nwait 1",
        "launch 0: receive KV.work[0:8) from 0\nlaunch 1: receive KV.work[8:16) from 0\nwait 0\nwait 1",
    )
    assert simulate_pair_with(plan, plan, COSTS, groups=1).gain > 0
    monkeypatch.setattr(
        pair, "segment_ends", lambda op, round_, cuts: segment_ends(op, round_, own_cuts(op, round_))
    )
    with pytest.raises(VerifyError, match="never completes"):
        simulate_pair_with(plan, plan, COSTS, groups=1)


# --- the gain

LLAMA = Model(32, 8, 128, dtype="bf16", hidden=4096, ffn=14336)


def long_halves(name: str, ranks: int = 16) -> list[Plan]:
    lengths = [65536, 65536, 40000, 40000, *[16384] * 8, *[4096] * 24, *[1000] * 50]
    halves = alternating(Batch.from_lengths(lengths))
    machines = Cluster(nodes=ranks // 8, ranks_per_node=8)
    return [api.plan(half, machines, LLAMA, find_recipe(name)) for half in halves]


@pytest.mark.parametrize(
    ("name", "least"), [("contiguous", 0.01), ("distca", 0.1), ("allgather", 0.05), ("ulysses", 0.1)]
)
def test_recipes_that_gather_at_once_gain_from_turns(name: str, least: float) -> None:
    """Recipes that gather everything at once cannot hide it: in series, halves take as long as on a single stream."""
    found = simulate_pair(*long_halves(name))
    assert found.gain > least
    assert found.serial_gain > least


@pytest.mark.parametrize("name", ["ring", "fcp", "usp"])
def test_programs_of_many_rounds_lose_nothing(name: str) -> None:
    found = simulate_pair(*long_halves(name))
    assert found.gain > 0.01
    assert found.serial_gain > -0.002


def test_the_gain_is_relative_to_the_undivided_microbatch() -> None:
    """Undivided, it takes the time of its own simulation plus at most that of its linear layers."""
    ping, pong = halves_of("contiguous")
    both = [*ping.request.batch.lengths.tolist(), *pong.request.batch.lengths.tolist()]
    recipe = Recipe("contiguous", STRATEGIES["contiguous"])
    whole = plan_with(Batch.from_lengths(both), recipe, 4, ping.request.model)
    found = simulate_pair(ping, pong, layers=1, whole=whole)
    for (kind, phase), run in found.runs.items():
        alone, half = simulate(whole).runs[kind, phase], pair._half(whole, kind, phase, cost_model(whole))
        assert run.whole.makespan_us >= alone.makespan_us
        assert run.whole.makespan_us <= alone.makespan_us + (half.before + half.after).max() * (1 + 1e-9)
    assert found.whole_gain == pytest.approx(found.ms("whole") / found.ms("turns") - 1)
    assert simulate_pair(ping, pong, layers=1).whole_gain is None


def cost_model(plan: Plan) -> CostModel:
    return CostModel(Hardware.load("h100"), plan.request.model)


def test_no_gain_without_communication() -> None:
    plans = long_halves("ulysses")
    links = {"intra_gbs": 1e9, "inter_gbs": 1e9, "intra_latency_us": 0, "inter_latency_us": 0}
    fast = replace(plans[0].request.cluster, **links)
    halves = [api.plan(plan.request.batch, fast, LLAMA, find_recipe("ulysses")) for plan in plans]
    unposted = replace(Hardware.load("h100"), post_us=Figure(0.0, "posting is communication too"))
    assert abs(simulate_pair(*halves, unposted).serial_gain) < 1e-3


def test_contention_slows_every_schedule_with_transfers() -> None:
    halves, h100 = long_halves("ring"), Hardware.load("h100")
    figures = (Figure(contention, "made up") for contention in (0.0, 0.2))
    none, some = (simulate_pair(*halves, replace(h100, contention=figure), layers=2) for figure in figures)
    assert some.ms("signal") == pytest.approx(none.ms("signal"))
    for way in ("turns", "serial"):
        assert none.ms(way) < some.ms(way) < 1.2 * none.ms(way)
    assert some.ms("single") == pytest.approx(none.ms("single"), rel=0.05)  # during other ranks' transfers


# --- data and errors


def test_halves_on_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="differs from ping in its ranks"):
        simulate_pair(halves_of("ring", 2)[0], halves_of("ring", 4)[1])


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("groups", 0)])
def test_counts_are_checked(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        simulate_pair(*halves_of("ring"), **{field: value})
