"""Verification of a plan against its request's constraints: home ranks."""

from __future__ import annotations

from dataclasses import replace

import apportion as ap
from apportion.ir.bytes.codec import seal
from apportion.ir.verify import check

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp32", hidden=32, ffn=64, layers=1)


LENGTHS = [96, 40, 40, 40]


def plan_batch() -> ap.Plan:
    return ap.plan(ap.Batch.from_lengths(LENGTHS), ap.Cluster(nodes=1, ranks_per_node=4), MODEL)


def test_ranks_that_violate_home_ranks_are_named() -> None:
    plan = plan_batch()
    strict = replace(plan.request, batch=ap.Batch.from_lengths(LENGTHS, home_ranks=[[0], None, None, None]))
    strays = [v for v in check(seal(replace(plan, request=strict))) if "home_ranks" in v.message]
    holders = {rank for rank in range(4) if (plan.layout("attention").tokens(rank) < 96).any()}
    assert {v.rank for v in strays} == holders - {0}
    assert all(v.rule == "limits" and "home_ranks are (0,)" in v.message for v in strays)
