"""Training-sized rows and head widths of real models, on a GPU; skipped without --gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apportion import Batch, Cluster, Sequence, masks
from apportion.planner import api
from apportion.trainer.step.plain import plain_attention
from tests.ranks import cases, jobs

SEQUENCES = {
    "causal": [Sequence(length, masks.causal()) for length in (5000, 1333, 700, 70, 1)],
    "window": [Sequence(length, masks.sliding_window(777)) for length in (4096, 1500)],
    "shared": [Sequence(6000, masks.shared_question(3000, [1000, 500, 1500]))],
}
CASES = [
    (recipe, mask, widths, dtype)
    for turn, recipe in enumerate(("fcp", "blend", "distca", "dcp", "zeppelin"))
    for mask in SEQUENCES
    for widths, dtype in [[((128, 128), "bf16"), ((192, 128), "fp16"), ((128, 128), "fp32")][turn % 3]]
]


@pytest.fixture(autouse=True)
def gpu(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--gpu"):
        pytest.skip("needs a GPU: make test-gpu")


@pytest.mark.parametrize(("recipe", "mask", "widths", "dtype"), CASES)
def test_long_rows(interpreted: Any, recipe: Any, mask: Any, widths: Any, dtype: Any) -> None:
    batch = Batch.from_sequences(SEQUENCES[mask])
    model = replace(cases.model(4, dtype, widths, kv_heads=2), hidden=1024, ffn=1024)
    plan = api.plan(batch, Cluster(1, 4), model, recipe=recipe)
    problem = cases.problem_of(plan)
    got = cases.run(interpreted, plan, problem)
    exact = run(problem, batch, dtype, torch.float64)
    same = run(problem, batch, dtype, torch.float32 if dtype == "fp32" else None)
    for actual, reference, expected in zip(got, same, exact, strict=False):
        size = np.linalg.norm(expected)
        error, plain = (float(np.linalg.norm(x - expected) / size) for x in (actual, reference))
        assert error <= 2 * max(plain, 2e-7)


def run(problem: Any, batch: Any, dtype: Any, compute_dtype: Any) -> Any:
    """out, dq, dk and dv of plain attention on the GPU: inputs are rounded to `dtype`; computes in `compute_dtype`."""
    storage_dtype = jobs.DTYPES[dtype]
    leaves = [
        torch.from_numpy(x).to("cuda", storage_dtype).to(compute_dtype or storage_dtype).requires_grad_()
        for x in (problem.q, problem.k, problem.v)
    ]
    out = plain_attention(*leaves, batch, "default")
    out.backward(torch.from_numpy(problem.do).to("cuda", storage_dtype).to(out.dtype))
    return [x.detach().double().cpu().numpy() for x in (out, *(leaf.grad for leaf in leaves))]
