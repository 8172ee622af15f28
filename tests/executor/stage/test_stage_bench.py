"""The benchmark of attention with real stage kernels, in Triton's interpreter."""

from __future__ import annotations

from apportion.bench import BenchJob, Source, cluster_of, plan_unverified
from apportion.ir.request.model import Model
from tests.ranks import jobs_bench
from tests.ranks.rank_pool import Pool


def test_ranks_run_stage_kernels(interpreted: Pool) -> None:
    batch, _ = Source().batch(2 * 16, 0)
    plan = plan_unverified(BenchJob(batch, cluster_of(2), Model(2, 1, 16, dtype="fp16"), "allgather"))
    for rows in interpreted.run(jobs_bench.rows, 2, plan, ("stage",), False):
        assert [(row["phase"], row["host_ms"], row["ms"]) for row in rows] == [
            ("forward", 1.0, 2.0),
            ("backward", 1.0, 2.0),
        ]
        assert all(row["launches"] > 0 and row["tflops"] > 0 for row in rows)
