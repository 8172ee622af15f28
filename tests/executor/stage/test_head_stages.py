"""Head stages with the projection inside on the stage engine: gradients, and the bytes that a call holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apportion.ir.request.batch import Batch
from apportion.planner.pipeline.feasibility import attention_bytes
from tests.executor.test_upipe_block import RING, WHOLE, inputs, plain, planned, planned_results
from tests.ranks import cases, jobs_upipe
from tests.ranks.jobs_upipe import Sizes
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_rows

SMALL = Sizes(8, 2, 16, 16, hidden=32)


@pytest.mark.parametrize(
    ("steps", "nodes", "kv_heads"), sparse_rows([(WHOLE, 1, 2), (WHOLE, 1, 1), (RING, 2, 2)], 3)
)
def test_gradients_equal_plain_attention(interpreted: Pool, steps: Any, nodes: int, kv_heads: int) -> None:
    """Covers KV heads used by one rank, KV heads shared by both ranks, and tiles from the other node."""
    exact = replace(SMALL, kv_heads=kv_heads)
    plan = planned(
        cases.batch_of("causal"), replace(exact, dtype=torch.float32), nodes, 2, steps, heads=4, project=True
    )
    expected = plain(plan, exact)
    got = planned_results(interpreted, plan, replace(exact, dtype=torch.float32))
    for name, reference in expected.items():
        np.testing.assert_allclose(got[name], reference, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("kv_heads", "hidden"), [(2, 32), (1, 32), (2, 256)])
def test_the_bytes_that_a_call_holds_match_the_count(interpreted: Pool, kv_heads: int, hidden: int) -> None:
    """A call holds results only in the model's dtype, except sums of heads that both ranks use, and the larger of dX
    and the output, which share memory."""
    sizes = replace(SMALL, kv_heads=kv_heads, hidden=hidden, dtype=torch.bfloat16)
    plan = planned(Batch.from_lengths([24]), sizes, 1, 2, WHOLE, heads=4, project=True)
    assert max(held_bytes(interpreted, plan, sizes)) == attention_bytes(plan)


def held_bytes(pool: Pool, plan: Any, sizes: Sizes) -> list[int]:
    home = plan.layout(plan.header.home_layout)
    x, _ = inputs(plan, sizes)
    do = np.ones((len(x), sizes.q_heads, sizes.v_head_dim))
    rows = [home.tokens(rank) for rank in range(2)]
    each = [(plan.for_rank(rank).encode(), x[rows[rank]], do[rows[rank]]) for rank in range(2)]
    return [size for results in pool.run(jobs_upipe.held_bytes, 2, sizes, each=each) for size in results]
