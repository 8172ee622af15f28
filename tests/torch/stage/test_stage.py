"""The stage kernels on real ranks over gloo, in Triton's interpreter, against dense float64 attention.

`make test` runs a cover: every strategy, and every mask, number of ranks, dtype, width, GQA ratio, sinks and softcap
with several of the others. `make conformance` runs every strategy with every mask. bfloat16 products are wrong in the
interpreter, so float16 stands for both.
"""

from typing import NamedTuple

import cases
from strategies import STRATEGIES, WIDE, cluster

from apportion.ir.policy import Policy, Recipe
from apportion.planner import api
from apportion.planner.recipes import pipeline

MATRIX = STRATEGIES | WIDE
MASKS = tuple(cases.BATCHES)
#: of V may be narrower or wider than QK; 12 and 24 are padded, 80 is two powers of two
WIDTHS = ((16, 16), (8, 12), (80, 24), (16, 32))
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


def cell(strategy, turn):
    """Axes take turns at different speeds. Groups of two ranks need an even number of them."""
    name = tuple(MATRIX)[strategy]
    ranks = RANKS[turn % len(RANKS)]
    ranks += ranks % 2 if "inner" in name else 0
    heads = ((2, 2), (4, 1), (1, 3))[turn % 3] if name not in WIDE else (4, 2)
    extra = ("", "sinks", "softcap")[turn // 2 % 3]
    return Cell(
        name, MASKS[turn % 13], ranks, heads, ("fp32", "fp16")[turn // 3 % 2], WIDTHS[turn % 4], extra
    )


COVER = [cell(strategy, 7 * strategy) for strategy in range(len(MATRIX))]
FULL = [cell(strategy, 13 * strategy + mask) for strategy in range(len(MATRIX)) for mask in range(13)]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cells = FULL if metafunc.config.getoption("--full") else COVER
        metafunc.parametrize("case", cells, ids=lambda case: f"{case.name}-{case.mask}")


def test_the_cover_has_every_value_of_every_axis():
    for axis, values in enumerate((tuple(MATRIX), MASKS, (2, 3, 4, 6), None, ("fp32", "fp16"), WIDTHS)):
        assert values is None or {case[axis] for case in COVER} == set(values)
    assert {case.extra for case in COVER} == {"", "sinks", "softcap"}


def test_every_strategy(interpreted, case):
    batch = cases.batch_of(case.mask)
    model = cases.model(case.heads[0], case.dtype, case.widths, kv_heads=case.heads[1])
    recipe = Recipe(case.name, MATRIX[case.name])
    cap = None if getattr(pipeline(recipe).place, "own_cap", False) else batch.tokens
    plan = api.plan(batch, cluster(case.ranks), model, policy=Policy(recipe, token_cap=cap))
    softcap = 2.0 if case.extra == "softcap" else None
    problem = cases.problem_of(plan, 1, case.extra == "sinks", softcap)
    got = cases.run(interpreted, plan, problem)
    cases.assert_good(got, problem, cases.allowed(batch), case.dtype)
