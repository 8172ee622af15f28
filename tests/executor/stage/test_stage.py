"""The stage kernels on real ranks over gloo, in Triton's interpreter, against dense float64 attention.

`make test-slow` runs a cover of all strategies, in which every mask, number of ranks, dtype, width, GQA ratio, sinks
and softcap occurs with several of the others; `make test` runs two of its cells. `make conformance` runs every strategy
with every mask. bfloat16 products are wrong in the interpreter, so float16 stands for both.

`make test-gpu` runs the cover on a GPU, all ranks on the same one, also in bfloat16 and in the widths of models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from apportion import Batch, Cluster, Plan
from apportion.planner import api
from tests.ranks import cases, jobs
from tests.ranks.rank_pool import Pool
from tests.support import oracle
from tests.support.parse import parse
from tests.support.sparse import marked, sparse
from tests.support.strategies import STRATEGIES, WIDE, cluster, plan_of

MATRIX = STRATEGIES | WIDE
MASKS = tuple(cases.BATCHES)
#: (QK, V): V may be narrower or wider than QK; 12 and 24 are padded; 80 is the sum of two powers of two
WIDTHS = ((16, 16), (8, 12), (80, 24), (16, 32))
WIDTHS_OF_MODELS = ((128, 128), (192, 128), (64, 64), (96, 96))
RANKS = (2, 4, 3, 2, 6)


class Cell(NamedTuple):
    """heads: query heads per KV head, and KV heads."""

    name: str
    mask: str
    ranks: int
    heads: tuple[int, int]
    dtype: str
    widths: tuple[int, int]
    extra: str
    sent: str


def cell(strategy: int, turn: int) -> Cell:
    """A cell whose axes cycle at different rates. Groups of two ranks need an even number of ranks."""
    name = tuple(MATRIX)[strategy]
    ranks = RANKS[turn % len(RANKS)]
    ranks += ranks % 2 if "inner" in name else 0
    heads = ((2, 2), (4, 1), (1, 4))[turn % 3] if name not in WIDE else (4, 2)
    extra = ("", "sinks", "softcap")[turn // 2 % 3]
    dtype = ("fp32", "fp16")[turn // 3 % 2]
    sent = "model" if dtype == "fp16" and (strategy + turn) % 3 else "wide"
    return Cell(name, MASKS[turn % 13], ranks, heads, dtype, WIDTHS[turn % 4], extra, sent)


COVER = [cell(strategy, 7 * strategy) for strategy in range(len(MATRIX))]
FULL = [cell(strategy, 13 * strategy + mask) for strategy in range(len(MATRIX)) for mask in range(13)]


def as_on_gpus(turn: Any, case: Any) -> Any:
    return case._replace(dtype="bf16", widths=WIDTHS_OF_MODELS[turn % 4])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cells = FULL if metafunc.config.getoption("--full") else marked(COVER, (0, 10))
        if metafunc.config.getoption("--gpu"):
            cells = [*COVER, *map(as_on_gpus, range(len(COVER)), COVER)]
        metafunc.parametrize("case", cells, ids=lambda case: f"{case.name}-{case.mask}-{case.dtype}")


def test_the_cover_has_every_value_of_every_axis() -> None:
    for axis, values in enumerate((tuple(MATRIX), MASKS, (2, 3, 4, 6), None, ("fp32", "fp16"), WIDTHS)):
        assert values is None or {case[axis] for case in COVER} == set(values)
    assert {case.extra for case in COVER} == {"", "sinks", "softcap"}
    for dtype, sent in (("fp32", {"wide"}), ("fp16", {"wide", "model"})):
        assert {case.sent for case in COVER if case.dtype == dtype} == sent


def test_every_strategy(interpreted: Pool, case: Cell) -> None:
    batch = cases.batch_of(case.mask)
    model = cases.model(case.heads[0], case.dtype, case.widths, kv_heads=case.heads[1])
    model = replace(model, sent_gradients=case.sent)
    plan = plan_of(batch, case.name, case.ranks, model)
    softcap = 2.0 if case.extra == "softcap" else None
    problem = cases.problem_of(plan, 1, case.extra == "sinks", softcap)
    got = cases.run(interpreted, plan, problem)
    mask = cases.allowed(batch)
    cases.assert_good(got, problem, mask, case.dtype)
    if case.dtype == "fp32":
        expected = cases.answer(cases.rounded(problem, torch.float32), mask)
        for error, exact in zip(cases.errors(got, expected), expected, strict=True):
            assert exact is None or error <= 2e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("columns", [(0, 1, 2), (2, 0), (1,)])
def test_messages_hold_rounded_numbers_that_unpack_exactly(
    interpreted: Pool, pytestconfig: pytest.Config, dtype: str, columns: tuple[int, ...]
) -> None:
    rows = np.random.default_rng(0).standard_normal((37, 3, 20)).astype(np.float32)
    ((message, unpacked),) = interpreted.run(jobs.there_and_back, 1, dtype, columns, each=[rows])
    columns_sent = rows[:, list(columns)]
    if dtype == "fp16":
        np.testing.assert_array_equal(message, columns_sent.astype(np.float16))
    elif pytestconfig.getoption("--gpu"):
        np.testing.assert_array_equal(message, torch.from_numpy(columns_sent).bfloat16().float().numpy())
    else:  # the interpreter truncates where a device rounds
        np.testing.assert_array_equal(message.view(np.uint32), columns_sent.view(np.uint32) & 0xFFFF0000)
    np.testing.assert_array_equal(unpacked[:, list(columns)], message)
    others = [column for column in range(3) if column not in columns]
    assert not unpacked[:, others].any()


BY_HAND = sorted((Path(__file__).parents[2] / "plans").glob("*.txt"))


@pytest.mark.parametrize("extra", sparse(["", "sinks"], 2))
@pytest.mark.parametrize(
    "path", sparse([path for path in BY_HAND if path.stem != "heads"], 3), ids=lambda path: path.stem
)
def test_plans_written_by_hand(interpreted: Pool, path: Path, extra: str) -> None:
    plan = parse(path.read_text().replace('"dtype": "fp64"', '"dtype": "fp16"'))
    problem = cases.problem_of(plan, 2, sinks=extra == "sinks")
    for kind in plan.header.kinds:
        got = cases.run(interpreted, plan, problem, kind)
        cases.assert_good(got, problem, cases.allowed(plan.request.batch, kind), "fp16")


def fp16_plan(recipe: str, *lengths: int, ranks: int = 2) -> Plan:
    model = cases.model(2, "fp16", (16, 16), kv_heads=2)
    return api.plan(Batch.from_lengths(lengths), cluster(ranks), model, recipe=recipe)


UNWRITTEN = {
    **{path.stem: None for path in BY_HAND if path.stem in ("clear", "nested", "relay", "waves")},
    "fcp": ("fcp", 150, 40),
    "ulysses": ("ulysses", 50, 9),
    "dcp": ("dcp", 90, 30, 7),
    "distca": ("distca", 90, 30, 7),
    "a rank without rows": ("wlb", 10),
}


@pytest.mark.parametrize("check", sparse([False, True], 2))
@pytest.mark.parametrize("name", sparse(list(UNWRITTEN), 3))
def test_no_unwritten_memory_is_read(interpreted: Pool, name: str, check: bool) -> None:
    """Rows that a task completes are never in accumulators, and the kernel check must not read them there."""
    if (plan_arguments := UNWRITTEN[name]) is None:
        path = next(path for path in BY_HAND if path.stem == name)
        plan = parse(path.read_text().replace('"dtype": "fp64"', '"dtype": "fp16"'))
    else:
        plan = fp16_plan(*plan_arguments)
    problem = cases.problem_of(plan, 3, sinks=not check)
    shards, ranks = cases.shards(plan, problem), plan.header.ranks
    results = interpreted.run(jobs.attention_on_nan, ranks, problem.sinks, check, each=shards)
    cases.assert_good(cases.gathered(plan, results), problem, cases.allowed(plan.request.batch), "fp16")


def small_plan(dtype: str = "fp32") -> Plan:
    batch = Batch.from_lengths([50, 9, 1])
    return api.plan(batch, Cluster(1, 2), cases.model(2, dtype, (16, 16)), cases.recipe())


def test_the_same_plan_gives_the_same_bits(interpreted: Pool) -> None:
    plan = small_plan()
    for first, second in interpreted.run(jobs.twice, 2, each=cases.shards(plan, cases.problem_of(plan))):
        assert first == second


@pytest.mark.parametrize("extra", ["", "sinks"])
def test_the_gradient_of_lse_passes_through_delta(interpreted: Pool, extra: str) -> None:
    """The gradient passes through delta; rows without keys have none."""
    batch = cases.batch_of("bands")
    plan = api.plan(batch, Cluster(1, 2), cases.model(2, "fp32", (16, 16)), cases.recipe())
    problem = cases.problem_of(plan, 6, extra == "sinks")
    problem = replace(problem, dlse=np.random.default_rng(1).standard_normal(problem.q.shape[:2]))
    mask = cases.allowed(batch)
    got, lse = cases.run_with_lse(interpreted, plan, problem)
    rounded = replace(cases.rounded(problem, torch.float32), dlse=problem.dlse)
    expected, exact = cases.answer(rounded, mask), oracle.dense(rounded, mask).lse
    for error, size in zip(cases.errors(got, expected), expected, strict=True):
        assert size is None or error <= 1e-6 * np.linalg.norm(size)
    np.testing.assert_allclose(lse, exact, rtol=1e-6, atol=1e-6)


def test_a_kernel_that_returns_nan_is_caught(interpreted: Pool) -> None:
    plan = small_plan()
    shards = cases.shards(plan, cases.problem_of(plan))
    shards[1].v[0] = np.nan
    messages = interpreted.errors(jobs.attention_on_nan, 2, None, True, each=shards)
    assert any("NaN in o" in message for message in messages)
