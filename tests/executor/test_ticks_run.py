"""Pipelines of ticks on real ranks over gloo: forward ticks under one plan, backward ticks under another, against the
same layers in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner.iteration.ticks import plan_tick, stage_ranks, tick_table
from tests.ranks import cases, jobs_ticks
from tests.ranks.jobs_ticks import Work
from tests.ranks.rank_pool import Pool

HEADS, WIDTH = jobs_ticks.HEADS, jobs_ticks.WIDTH
MODEL = Model(HEADS, 1, WIDTH, dtype="fp64", hidden=HEADS * WIDTH, ffn=16)
KINDS = {"full": masks.causal(), "near": masks.sliding_window(6), "sink": masks.sink_window(2, 4)}
LENGTHS = [[40, 3], [17, 20, 6], [43], [8, 8, 8, 19]]


class Run:
    """The ticks of a pipeline, planned, and what they are to compute."""

    def __init__(self, stages: int, replicas: int, virtual: int, cap: int | None, kinds: list[str]) -> None:
        self.table, self.kinds = tick_table(stages, len(LENGTHS), virtual, cap), kinds
        self.replicas, self.ranks = replicas, stages * replicas
        self.batches = [Batch.from_lengths(lengths, KINDS) for lengths in LENGTHS]
        cluster = Cluster(1, self.ranks)
        self.ticks = [
            plan_tick(self.table, tick, self.batches, cluster, MODEL, kinds)
            for tick in range(self.table.ticks)
        ]
        rng = np.random.default_rng(0)
        self.given, self.asked = (
            [rng.standard_normal((batch.tokens, HEADS, WIDTH)) for batch in self.batches] for _ in range(2)
        )
        self.weights = [rng.standard_normal((3, WIDTH, WIDTH)) / 3 for _ in kinds]

    def work(self, rank: int) -> Work:
        stage, replica = divmod(rank, self.replicas)
        ticks = []
        for plan, made in self.ticks:
            part = next((part for part in made.parts if part.stage == stage), None)
            key = None if part is None else (part.microbatch, part.chunk * self.table.stages + stage)
            ticks.append(jobs_ticks.Tick(plan.for_rank(rank).encode(), made.phase, key))
        rows = [self.rows(index, replica) for index in range(len(self.batches))]
        given, asked = ([x[r] for x, r in zip(xs, rows, strict=True)] for xs in (self.given, self.asked))
        return jobs_ticks.Work(ticks, self.table.stages, given, asked, self.weights)

    def rows(self, microbatch: int, replica: int) -> NDArray[Any]:
        """The microbatch's tokens on one replica, in order of rows: the same in every tick and stage."""
        for plan, made in self.ticks:
            for part in made.parts:
                if part.microbatch == microbatch:
                    rank = stage_ranks(part.stage, self.replicas)[replica]
                    return plan.layout("attention").tokens(rank) - part.start
        raise LookupError(microbatch)

    def joined(
        self, microbatch: int, stage: int, results: tuple[dict[int, NDArray[Any]], ...]
    ) -> NDArray[Any]:
        """The rows of a stage's replicas in token order."""
        tokens = np.concatenate([self.rows(microbatch, replica) for replica in range(self.replicas)])
        rows = np.concatenate([results[rank][microbatch] for rank in stage_ranks(stage, self.replicas)])
        found = np.empty_like(rows)
        found[tokens] = rows
        return found

    def layers(self) -> tuple[list[NDArray[Any]], ...]:
        """outputs, input gradients and weights' gradients of the layers in one place."""
        weights = [torch.from_numpy(weight).requires_grad_() for weight in self.weights]
        outputs, gradients = [], []
        for batch, given, asked in zip(self.batches, self.given, self.asked, strict=True):
            first = x = torch.from_numpy(given).requires_grad_()
            for kind, weight in zip(self.kinds, weights, strict=True):
                kept = torch.from_numpy(cases.allowed(batch, kind))
                x = x + cases.sdpa(*jobs_ticks.project(x, weight), None, kept)
            x.backward(torch.from_numpy(asked))
            outputs.append(x.detach().numpy())
            gradients.append(first.grad.numpy())
        return outputs, gradients, [weight.grad.numpy() for weight in weights]


@pytest.mark.parametrize(
    ("stages", "replicas", "virtual", "cap", "kinds"),
    [
        (2, 1, 1, None, ["full", "near"]),
        (2, 2, 1, 2, ["near", "sink"]),
        (4, 1, 1, None, ["full", "near", "sink", "full"]),
        (4, 2, 1, 4, ["full", "full", "near", "sink"]),
        (2, 2, 2, 5, ["full", "near", "full", "sink"]),
    ],
)
def test_a_pipeline_of_ticks_on_real_ranks(
    pool: Pool, stages: int, replicas: int, virtual: int, cap: int | None, kinds: list[str]
) -> None:
    run = Run(stages, replicas, virtual, cap, kinds)
    results = pool.run(jobs_ticks.pipeline, run.ranks, each=[run.work(rank) for rank in range(run.ranks)])
    outputs, gradients, weights = zip(*results, strict=True)
    want_outputs, want_gradients, want_weights = run.layers()
    for i in range(len(LENGTHS)):
        np.testing.assert_allclose(run.joined(i, stages - 1, outputs), want_outputs[i], atol=1e-10)
        np.testing.assert_allclose(run.joined(i, 0, gradients), want_gradients[i], atol=1e-10)
    for v, want in enumerate(want_weights):
        parts = [weights[rank][v] for rank in stage_ranks(v % stages, replicas)]
        np.testing.assert_allclose(sum(part for part in parts if part is not None), want, atol=1e-10)
