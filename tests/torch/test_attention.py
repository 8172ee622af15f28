"""Planned attention on real ranks over gloo, against dense float64 attention."""

import cases
import pytest
from cases import batch_of, make_plan

from apportion.ir.cluster import Cluster

COVER = cases.pairwise()


@pytest.mark.parametrize("case", COVER, ids=["-".join(map(str, case)) for case in COVER])
def test_pairwise_cover(pool, case):
    batch = batch_of(case.mask)
    plan = make_plan(
        batch,
        Cluster(1, case.ranks),
        cases.model(case.ratio, case.dtype, case.widths, kv_heads=1 + case.ranks % 2),
        cases.recipe(reshuffle=case.reshuffle),
    )
    problem = cases.problem_of(plan, 1, case.extra == "sinks", 2.0 if case.extra == "softcap" else None)
    got = cases.run(pool, plan, problem)
    cases.assert_good(got, problem, cases.allowed(batch), case.dtype)
