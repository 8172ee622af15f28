"""Every strategy on real ranks over gloo, forward and backward, against dense float64 attention."""

import cases
import pytest
from strategies import STRATEGIES, cluster

from apportion.ir.policy import Policy, Recipe
from apportion.planner import api
from apportion.planner.recipes import pipeline

MASKS = tuple(cases.BATCHES)
TURNS = [(name, turn) for turn, name in enumerate(STRATEGIES)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "turn"), TURNS, ids=list(STRATEGIES))
def test_every_strategy_on_real_ranks(pool, name, turn, ranks):
    dtype, extra = ("fp64", "fp32", "bf16")[turn % 3], ("", "sinks", "softcap")[(turn + ranks) % 3]
    batch = cases.batch_of(MASKS[(5 * turn + ranks) % len(MASKS)])
    model = cases.model(2, dtype, (8, 12), kv_heads=1 + turn % 2)
    recipe = Recipe(name, STRATEGIES[name])
    cap = None if getattr(pipeline(recipe).place, "own_cap", False) else batch.tokens
    plan = api.plan(batch, cluster(ranks), model, policy=Policy(recipe, token_cap=cap))
    problem = cases.problem_of(plan, turn, extra == "sinks", 2.0 if extra == "softcap" else None)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch), dtype)
