"""Two halves that take turns on real ranks over gloo compute the same as in sequence, and as the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from apportion import Batch, Cluster, Model, Plan, Policy, Recipe, Sequence, masks
from apportion.backends.torch import pingpong
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.pingpong import Piece
from apportion.ir.tensors import PHASES
from apportion.planner import api
from tests.ranks import cases, jobs_pingpong as jobs
from tests.ranks.rank_pool import Pool
from tests.support import strategies
from tests.support.sparse import sparse, sparse_product
from tests.support.strategies import STRATEGIES, alternating, steps

OWN = {"distca": steps("distca", place={"granularity": 4})}
MASKS = tuple(cases.BATCHES)
NAMES = list(STRATEGIES | OWN)
#: recipes of the halves; the second differs on purpose, since halves need to share only the ranks
TURNS = [(name, NAMES[(turn + 7) % len(NAMES)], turn) for turn, name in enumerate(NAMES)]


def plan_of(batch: Batch, name: str, ranks: int, model: Model) -> Plan:
    return strategies.plan_of(batch, name, ranks, model, OWN.get(name))


def sequences(*names: str) -> Batch:
    return Batch.from_sequences([Sequence(*row) for name in names for row in cases.BATCHES[name]])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pair", sparse(TURNS, 12), ids=NAMES)
def test_every_pair_of_recipes_equals_halves_and_oracle(
    pool: Pool, pair: tuple[Any, ...], ranks: int
) -> None:
    """Results are bitwise equal to those of each half on its own, and close to the oracle."""
    first, second, turn = pair
    dtype, extra = ("fp64", "fp32", "bf16")[turn % 3], ("", "sinks", "softcap")[(turn + ranks) % 3]
    model = cases.model(2, dtype, (8, 12), kv_heads=1 + turn % 2)
    batches = [cases.batch_of(MASKS[(k * turn + ranks) % len(MASKS)]) for k in (5, 3)]
    plans = [plan_of(b, name, ranks, model) for b, name in zip(batches, (first, second), strict=True)]
    cap = 2.0 if extra == "softcap" else None
    problems = [cases.problem_of(p, 2 * turn + i, extra == "sinks", cap) for i, p in enumerate(plans)]
    problems[1] = replace(problems[1], sinks=problems[0].sinks)
    options = {"scale": problems[0].scale, "softcap": cap}
    each = list(zip(*(cases.shards(p, q) for p, q in zip(plans, problems, strict=True)), strict=True))
    results = pool.run(jobs.attention_pair, ranks, None, problems[0].sinks, options, each=each)
    for together, alone in results:
        for actual, expected in zip((*together[0], *together[1]), (*alone[0], *alone[1]), strict=True):
            np.testing.assert_array_equal(actual, expected)
    for half, (plan, problem) in enumerate(zip(plans, problems, strict=True)):
        got = cases.gathered(plan, [together[half] for together, _ in results])
        cases.assert_good(got, problem, cases.allowed(plan.request.batch), dtype)


def check_stack(pool: Pool, plans: list[Plan], kinds: tuple[str | None, ...], mode: str = "stack") -> None:
    """Compares the results and all gradients of layers of these kinds taking turns with one half after the other."""
    ranks, model = plans[0].header.ranks, plans[0].request.model
    for together, alone in pool.run(jobs.stack_pair, ranks, model, kinds, mode, each=halves_of(plans)):
        assert_close(together, alone)


def assert_close(found: list[NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    for actual, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-9, atol=1e-11)


def halves_of(plans: list[Plan], seed: int = 0) -> list[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """(slice, hidden states) of both halves, for each rank."""
    rng = np.random.default_rng(seed)
    columns = []
    for plan in plans:
        home = plan.layout(plan.header.home_layout)
        hidden = rng.standard_normal((plan.request.batch.tokens, plan.request.model.hidden))
        ranks = range(plan.header.ranks)
        columns.append([(plan.for_rank(rank).encode(), hidden[home.tokens(rank)]) for rank in ranks])
    return list(zip(*columns, strict=True))


def pair_of_plans(batch: Batch, name: str, ranks: int, model: Model) -> list[Plan]:
    return [plan_of(half, name, ranks, model) for half in alternating(batch)]


@pytest.mark.parametrize("ranks", sparse([2, 4], 2))
@pytest.mark.parametrize(
    ("name", "mode"),
    sparse_product(7, ("distca", "node", "ulysses", "ring"), ("stack", "single", "checkpoint", "reentrant")),
)
def test_layers_with_all_their_gradients(pool: Pool, name: str, mode: str, ranks: int) -> None:
    model = cases.model(2, "fp64", kv_heads=2)
    batch = sequences("causal", "window", "shared", "image", "documents")
    check_stack(pool, pair_of_plans(batch, name, ranks, model), (None,) * 3, mode)


GATHER = {"shard": {"sequences": {}}, "place": {"whole": {}}, "schedule": {"gather": {}}}
UPIPE = {"inner": {"upipe": {"degree": "node"}}, **GATHER}


@pytest.mark.parametrize("second", [UPIPE, STRATEGIES["contiguous"]], ids=["both", "one"])
def test_plans_that_project_heads_themselves(pool: Pool, second: dict[str, Any]) -> None:
    """Head stages with the projection inside: hidden states are dispatched, and the program returns the
    projection's gradients."""
    model = cases.model(2, "fp64", kv_heads=2)
    halves = alternating(sequences("causal", "window", "documents"))
    plans = [
        api.plan(half, Cluster(1, 4), model, policy=Policy(Recipe("own", steps), token_cap=half.tokens))
        for half, steps in zip(halves, (UPIPE, second), strict=True)
    ]
    check_stack(pool, plans, (None, None), "project")


def test_layers_of_two_kinds(pool: Pool) -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(7)}
    model = cases.model(2, "fp64", kv_heads=1, kinds=kinds)
    plans = pair_of_plans(Batch.from_lengths([40, 25, 20, 9, 1], kinds), "contiguous", 4, model)
    check_stack(pool, plans, ("local", "global", "local"))


def test_ranks_without_tokens(pool: Pool) -> None:
    """One half has a single token on four ranks: three of them take part without rows."""
    model = cases.model(2, "fp64")
    plans = [plan_of(Batch.from_lengths(lengths), "contiguous", 4, model) for lengths in ([1], [30, 2])]
    check_stack(pool, plans, (None, None))


def occurrences(launches: list[tuple[str, int, int]]) -> Iterator[tuple[str, int, int, int]]:
    """Launches numbered by occurrence, since each layer launches the same rounds."""
    counts = Counter()
    for row in launches:
        counts[row] += 1
        yield *row, counts[row]


@pytest.mark.parametrize("name", ["distca", "node", "ring", "relays", "inner_reshuffled"])
def test_all_ranks_launch_the_rounds_of_both_halves_in_the_same_order(pool: Pool, name: str) -> None:
    model = cases.model(2, "fp64", kv_heads=2)
    plans = pair_of_plans(sequences("causal", "window", "shared"), name, 4, model)
    launches = pool.run(jobs.launches, 4, model, each=halves_of(plans))
    launches_by_rank = [list(occurrences(rank)) for rank in launches]
    successors = {}
    for rank in launches_by_rank:
        for earlier, later in pairwise(rank):
            successors.setdefault(earlier, set()).add(later)
    assert list(TopologicalSorter(successors).static_order())  # raises CycleError if two ranks disagree
    longest = max(launches_by_rank, key=len)
    assert longest[0] == ("forward", 0, 0, 1)
    pong, next_layer = (longest.index(("forward", *rest)) for rest in ((1, 0, 1), (0, 0, 2)))
    assert pong < next_layer


def small_pair(ranks: int = 2, name: str = "contiguous") -> tuple[Model, list[Plan]]:
    model = cases.model(2, "fp64")
    return model, pair_of_plans(Batch.from_lengths([30, 20, 9, 5]), name, ranks, model)


def test_a_rank_without_tokens_serves_the_last_layer_first_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = PlanHandle(api.plan(Batch.from_lengths([5]), Cluster(1, 1), cases.model(2), "fcp").for_rank(0))
    pieces = [Piece(None, None, (), "default", Score(scale, None)) for scale in (1.0, 2.0)]
    order = list[float]()
    monkeypatch.setattr(pingpong, "run", lambda *call: order.append(call[-1].score.scale))
    for phase in PHASES:
        pingpong.serve(handle, phase, pieces, torch.device("cpu"))
    assert order == [1.0, 2.0, 2.0, 1.0]


def test_nothing_is_saved_without_gradients(pool: Pool) -> None:
    model, plans = small_pair()
    assert all(pool.run(jobs.without_gradients, 2, model, each=halves_of(plans)))


def test_gradients_with_frozen_weights_and_an_unused_half(pool: Pool) -> None:
    model, plans = small_pair()
    for losses, alone, difference in pool.run(jobs.frozen, 2, model, each=halves_of(plans)):
        assert losses == alone
        assert difference < 1e-10


@pytest.mark.parametrize("name", ["node", "ulysses"])
def test_halves_may_share_process_groups(pool: Pool, name: str) -> None:
    model = cases.model(2, "fp64", kv_heads=2)
    plans = [plan_of(cases.batch_of(mask), name, 8, model) for mask in ("causal", "shared")]
    problems = [cases.problem_of(plan, 3) for plan in plans]
    each = list(zip(*(cases.shards(p, q) for p, q in zip(plans, problems, strict=True)), strict=True))
    for shared, own_groups, two_groups in pool.run(jobs.pair_on_channels, 8, each=each):
        assert shared == own_groups == two_groups


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("unlisted", "list the parameters"),
        ("swapped", "ranks hold different plans"),
        ("twice", "run forward again"),
        ("shape", "hidden_a has shape"),
    ],
)
def test_wrong_calls_are_described(pool: Pool, case: str, expected: str) -> None:
    model, plans = small_pair()
    for error in pool.errors(jobs.wrong_pair, 2, case, model, each=halves_of(plans)):
        assert error.startswith(("ConfigError: ", "ExecutionError: "))
        assert expected in error


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp", "summed ddp"])
def test_data_parallel_wrappers(pool: Pool, wrapper: str) -> None:
    """If the wrapped module makes the call, gradients are means over ranks, or sums."""
    model, plans = small_pair()
    halves = halves_of(plans)
    plain_gradients = pool.run(jobs.wrapped, 2, None, model, each=halves)
    reduce = np.sum if wrapper == "summed ddp" else np.mean
    expected = [reduce(grads, axis=0) for grads in zip(*plain_gradients, strict=True)]
    for gradients in pool.run(jobs.wrapped, 2, wrapper, model, each=halves):
        assert_close(gradients, expected)
