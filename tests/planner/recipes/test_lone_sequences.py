"""Sequences that one rank computes alone while groups split the heads of the others."""

from __future__ import annotations

import numpy as np
import pytest

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.isa import Op
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.workload import lognormal_lengths
from apportion.ir.tensors import Space, Tensor
from apportion.planner.inner.lone import LoneSequences, find_lone
from apportion.planner.pipeline import pipeline, placing
from apportion.planner.pipeline.checks import checked_steps
from apportion.planner.pipeline.watch import SILENT
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe, passes_of
from apportion.planner.search.price import least_placed_us
from apportion.planner.tasks.rows import Rows

MODEL = Model(q_heads=8, kv_heads=2, head_dim=64)
FIRST = np.array([0, 4, 8])


def recipe(lone: float | str | None = "auto", degree: int = 4, **steps: object) -> Recipe:
    inner: object = {"ulysses": {"degree": degree, "lone": lone}}
    data = {"inner": inner, "shard": {"sequences": {}}, "place": {"blend": {}}, "schedule": {"matchings": {}}}
    return Recipe("mine", data | steps)


def problem_of(batch: Batch, cluster: Cluster | None = None, **policy: object) -> Problem:
    return Problem(batch, cluster or Cluster(2, 4), MODEL, Policy(recipe(), **policy))


def lone_of(problem: Problem, share: float | str = "auto", first: np.ndarray = FIRST) -> LoneSequences:
    found = find_lone(problem, first, share)
    assert found is not None
    return found


def lognormal(ranks: int = 8, tokens: int = 32768) -> Batch:
    return Batch.from_lengths(lognormal_lengths(0, ranks * tokens))


def same_programs(one: Plan, other: Plan) -> bool:
    """Compares only the tables, so the headers may have different head sets."""
    return all(
        np.array_equal(program[name].columns[column], values)
        for key, program in one.programs.items()
        for name in program.tables
        for column, values in other.programs[key][name].columns.items()
    )


def plan(batch: Batch, recipe: Recipe | str | None, cluster: Cluster | None = None, **policy: object) -> Plan:
    with checked_steps():
        return ap.plan(batch, cluster or Cluster(2, 4), MODEL, recipe=recipe, **policy)


# ---- which sequences are lone


def test_long_sequences_are_never_lone() -> None:
    problem = problem_of(lognormal())
    lone = lone_of(problem)
    pairs = problem.batch.lengths.astype(float) ** 2
    assert pairs[lone.index].max() < pairs[lone.others].min() * 1.05
    assert pairs[lone.index].max() < 0.5 * pairs.sum() / 8
    assert lone_of(problem, 0.5).rows.per_rank.max() <= 0.98 * problem.batch.tokens / 8  # no rank is full
    assert sorted([*lone.index, *lone.others]) == list(range(len(pairs)))


def test_ranks_of_a_group_have_equal_shares_of_lone_sequences() -> None:
    problem = problem_of(lognormal(), Cluster(2, 4))
    lone = lone_of(problem)
    time = np.bincount(lone.home, lone.time, 8).reshape(2, 4)
    total = float(lone.time.sum()) / 8 + 1
    assert (time.max(1) - time.mean(1)).max() < 0.1 * max(total, time.mean())


def test_groups_share_the_tokens_that_are_not_lone() -> None:
    lone = lone_of(problem_of(lognormal()), 0.1)
    assert lone.left.shape == (2,)
    assert ((lone.left > 0) & (lone.left <= 1)).all()
    time = np.bincount(lone.home, lone.time, 8).reshape(2, 4).max(1)
    assert (np.argsort(lone.left) == np.argsort(-time)).all()


def test_short_sequences_are_all_lone() -> None:
    batch = Batch.from_lengths([200] * 64)
    made = plan(batch, recipe())
    assert len(lone_of(problem_of(batch)).others) == 0
    assert made.report["bytes"]["total"] == 0
    assert made.report["imbalance"]["compute"] == pytest.approx(0)


def test_one_long_sequence_leaves_no_lone_ones() -> None:
    batch = Batch.from_lengths([8192])
    assert find_lone(problem_of(batch), FIRST, "auto") is None
    assert same_programs(plan(batch, recipe()), plan(batch, recipe(None)))


def test_without_groups_no_sequence_is_lone() -> None:
    one, other = (plan(lognormal(2), recipe(lone, degree=1), Cluster(1, 2)) for lone in ("auto", None))
    assert same_programs(one, other)


def test_faster_ranks_of_a_group_get_more_lone_sequences() -> None:
    speeds = (1.0, 1.0, 1.0, 0.5) * 2
    problem = problem_of(lognormal(), Cluster(2, 4, speeds=speeds))
    lone = lone_of(problem, 0.1)
    time = np.bincount(lone.home, lone.time, 8)
    assert time[[3, 7]].max() < time[[0, 1, 2, 4, 5, 6]].min()


def test_early_sequences_fit_together_in_the_time_of_arrival() -> None:
    batch, none, time = Batch.from_lengths([2, 4, 3, 2]), np.zeros(0, int), np.array([2, 5, 3, 1])
    lone = LoneSequences(batch, 1, np.arange(4), none, np.zeros(4, int), time, np.ones(1), 4.0)
    assert lone.early.tolist() == [False, False, True, True]


# ---- rows


def test_lone_sequences_are_the_first_home_rows() -> None:
    batch = Batch.from_lengths([4, 10, 3, 9, 2])
    lone = LoneSequences(
        batch, 2, np.array([0, 2, 4]), np.array([1, 3]), np.array([1, 0, 1]), np.ones(3, int), np.ones(1), 0.0
    )
    rows = lone.with_others(Rows(np.array([0, 7, 19]), np.array([0, 1]), 2))
    token = np.arange(28)
    home = rows.home[rows.block_of(token)]
    assert home.tolist() == [1] * 4 + [0] * 7 + [1] * 3 + [0] * 3 + [1] * 9 + [1] * 2
    first = {0: 0, 4: 3, 11: 6, 14: 0, 17: 9, 26: 4}  # token: its row, at the beginning of each run
    expected = [
        row + i for row, n in zip(first.values(), np.diff([*first, 28]), strict=True) for i in range(n)
    ]
    assert rows.row_of(token).tolist() == expected


def test_lone_rows_are_not_exchanged() -> None:
    made = plan(lognormal(), recipe())
    lone = lone_of(problem_of(lognormal()))
    moved = sum(item["bytes"] for item in made.report["exchanges"] if item["name"] == "ulysses_in")
    all_moved = plan(lognormal(), recipe(None)).report["exchanges"]
    before = sum(item["bytes"] for item in all_moved if item["name"] == "ulysses_in")
    shared = lone.shared.tokens / lone.batch.tokens
    assert moved == pytest.approx(shared * before, rel=0.02)


def test_lone_sequences_are_whole_tasks_with_all_heads() -> None:
    batch = lognormal()
    made, lone = plan(batch, recipe()), lone_of(problem_of(batch))
    program = made.programs["default", "forward"]
    operands, tasks = program["operands"], program["tasks"]
    q = operands.ptr[tasks.rank_of_row()] + tasks["q"]
    alone = (operands["heads"][q] == 0) & (operands["space"][q] == Space.HOME)
    assert sorted(operands["rows"][q][alone]) == sorted(lone.lone_batch.lengths)
    assert (operands["tensor"][q] == Tensor.Q).all()
    ops = program["instructions"]["op"]
    attend = np.flatnonzero(ops == Op.ATTEND)
    first_wait = np.flatnonzero(ops == Op.WAIT)[0]
    assert attend[0] < first_wait


# ---- plans


WINDOWED = {"global": masks.causal(), "local": masks.sliding_window(512)}
TWO_KINDS = Model(8, 2, 64, layers={"global": 1, "local": 3})


def with_kinds(kinds: object, **steps: object) -> Recipe:
    return recipe(inner={"ulysses": {"degree": 4, "lone": "auto", "kinds": kinds}}, **steps)


@pytest.mark.parametrize("kinds", ["auto", ("global",)])
def test_windows_are_computed_at_home(kinds: object) -> None:
    batch = Batch.from_lengths(lognormal_lengths(0, 8 * 8192), mask=WINDOWED)
    made = ap.plan(batch, Cluster(2, 4), TWO_KINDS, recipe=with_kinds(kinds))
    assert made.report["imbalance"]["tokens"] <= 0.02
    names = {(item["kind"], item["name"]) for item in made.report["exchanges"]}
    assert {name for kind, name in names if kind == "global"} > {"ulysses_in", "ulysses_out"}
    assert {name for kind, name in names if kind == "local"} == {"fetch", "return"}
    assert (made.programs["local", "forward"]["operands"]["heads"] == 0).all()
    moved = sum(item["bytes"] for item in made.report["exchanges"] if item["kind"] == "local")
    before = ap.plan(batch, Cluster(2, 4), TWO_KINDS, recipe=with_kinds("all")).report["exchanges"]
    assert moved < 0.5 * sum(item["bytes"] for item in before if item["kind"] == "local")


def test_the_kind_that_sees_most_is_always_split() -> None:
    mask = {"local": masks.sliding_window(64), "nearer": masks.sliding_window(16)}
    batch = Batch.from_lengths([3000, 200, 3000, 700], mask=mask)
    model = Model(8, 2, 64, layers={"local": 1, "nearer": 1})
    made = ap.plan(batch, Cluster(2, 4), model, recipe=with_kinds("auto"))
    split = {item["kind"] for item in made.report["exchanges"] if item["name"] == "ulysses_in"}
    assert split == {"local"}


@pytest.mark.parametrize("name", ["mixed", "auto"])
@pytest.mark.parametrize("seed", range(6))
def test_kinds_on_ranks_of_unequal_speed(name: str, seed: int) -> None:
    """Bounds of groups do not hold for a kind that single ranks compute, some of them faster."""
    rng = np.random.default_rng(seed)
    mask = {"global": masks.causal(), "local": masks.sliding_window(50)}
    batch = Batch.from_lengths(rng.integers(50, 6000, rng.integers(2, 12)).tolist(), mask=mask)
    speeds = tuple(rng.choice([1.0, 1.0, 0.9, 0.8], 8).tolist())
    model = Model(8, 2, 16, layers={"global": 8, "local": 40})
    made = ap.plan(batch, Cluster(2, 4, speeds=speeds), model, recipe=name)
    assert made.report["bounds"]["makespan"]["gap"] >= 1


def test_the_lower_bound_of_a_candidate_is_at_most_its_time() -> None:
    mask = {"global": masks.causal(), "local": masks.sliding_window(8000)}
    batch = Batch.from_lengths([60000, 3000], mask=mask)
    model = Model(8, 2, 64, layers={"global": 1, "local": 40})
    steps = with_kinds(("global",), place={"blend": {"weigh": "time"}})
    problem = Problem(batch, Cluster(1, 4, speeds=(1.0, 1.0, 1.0, 0.2)), model, Policy(steps))
    placed = placing.place(problem, passes_of(steps), SILENT)
    plan = pipeline.draft(placed, SILENT).plan()
    found = ap.simulate(plan).runs
    time_us = sum(problem.layers[kind] * run.makespan_us for (kind, _), run in found.items())
    assert least_placed_us(placed) <= time_us


def test_invalid_kinds_of_a_group_are_refused() -> None:
    batch = Batch.from_lengths([3000, 200, 3000, 700], mask=WINDOWED)
    with pytest.raises(ConfigError, match=r"recipe\.inner\.ulysses\.kinds.*must be one of global, local"):
        ap.plan(batch, Cluster(2, 4), TWO_KINDS, recipe=with_kinds(("loc",)))
    with pytest.raises(ConfigError, match=r"reshuffle.*in the loader's layout"):
        ap.plan(batch, Cluster(2, 4), TWO_KINDS, recipe=with_kinds(("global",), reshuffle=True))
    with pytest.raises(ConfigError, match=r"reshuffle.*lone sequences"):
        plan(lognormal(), recipe(reshuffle=True))


# ---- refusals


@pytest.mark.parametrize("seed", range(12))
def test_a_cap_is_kept_on_ranks_of_unequal_speed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = Batch.from_lengths(rng.choice([50, 100, 200, 700, 1500], 15).tolist())
    speeds = tuple(rng.choice([0.5, 1.0], 4).tolist())
    cap = int(batch.tokens / 4 * rng.uniform(1.0, 1.3)) + 1
    assert most_rows(batch, Cluster(1, 4, speeds=speeds), find_recipe("mixed"), cap) <= cap


def most_rows(batch: Batch, cluster: Cluster, recipe: Recipe, cap: int, model: Model = MODEL) -> int:
    """Tokens of the fullest rank under an explicit cap."""
    made = ap.plan(batch, cluster, model, policy=Policy(recipe, token_cap=cap))
    return int(made.layout("attention").rows_per_rank.max())


def test_an_explicit_cap_is_kept() -> None:
    batch = lognormal()
    for over in (1.0, 1.02, 1.2):
        cap = int(np.ceil(over * batch.tokens / 8))
        assert most_rows(batch, Cluster(2, 4), recipe(), cap) <= cap
    batch, contiguous = Batch.from_lengths([25, 50, 900, 25, 50, 327]), recipe(place={"contiguous": {}})
    assert most_rows(batch, Cluster(2, 4), contiguous, 176, Model(12, 12, 8)) <= 176


def test_lone_sequences_that_would_unbalance_ranks_are_not_chosen() -> None:
    batch = Batch.from_lengths([4000] * 9)
    made = ap.plan(batch, Cluster(1, 4), MODEL, policy=Policy(recipe(), token_cap=16000))
    assert made.report["imbalance"]["compute"] < 0.01


def test_a_slow_rank_leaves_lone_sequences_to_others() -> None:
    speeds = (1.0, 1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0)
    lone = lone_of(problem_of(lognormal(), Cluster(2, 4, speeds=speeds)), 0.25)
    assert len(lone.index) > 10
    assert 3 not in lone.home
