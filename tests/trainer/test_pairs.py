"""Halves that take turns train the same model as the same microbatches one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.ir.request.model import Model
from apportion.service.http.serve import serving
from tests.ranks import jobs_pairs
from tests.ranks.loading import job, planning
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_rows

MODEL = Model(2, 1, 8, dtype="fp64", hidden=16, ffn=24, layers=2)


def loader_arguments(source: Any = None, recipe: str = "distca", microbatches: int = 2) -> dict[str, Any]:
    return planning(replace(job(2, 66, microbatches, recipe), model=MODEL), source)


@pytest.mark.parametrize(
    ("source", "recipe", "multiple"),
    sparse_rows([("local", "distca", None), ("service", "wlb", 4)], 2),
    ids=["local", "a server, packed and padded"],
)
def test_halves_train_like_consecutive_microbatches(
    pool: Pool, tmp_path: Path, source: str, recipe: str, multiple: int | None
) -> None:
    with serving(tmp_path) as server:
        arguments = loader_arguments(server.url if source == "service" else source, recipe)
        arguments["rows_multiple"] = multiple
        turns, plain = (pool.run(jobs_pairs.trained, 2, arguments, pairs) for pairs in (True, False))
    for (losses, gradients, states), (expected, others, same) in zip(turns, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert len(losses) >= 2
        assert states == same
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name], rtol=1e-10, atol=1e-13)


SAMPLES = [[[0], [1, 2]], [[3], [4], [5]]]


@pytest.mark.parametrize(
    ("microbatches", "options", "start", "message"),
    [
        (3, {"drop_last": True}, 0, "microbatches = 3: halves are two microbatches of"),
        (2, {}, 0, "drop_last = False: halves are .*also in the last iteration; pass drop_last=True"),
        (2, {"drop_last": True}, 1, "iteration 0 = 'a single half, microbatch 1'.*start between pairs"),
        (4, {"sampler": SAMPLES}, 0, "iteration 1 = 'a single half, microbatch 2'"),
    ],
)
def test_a_pass_that_ends_with_a_single_half_is_refused(
    pool: Pool, microbatches: int, options: dict[str, Any], start: int, message: str
) -> None:
    arguments = loader_arguments(microbatches=microbatches)
    for error in pool.errors(jobs_pairs.passed, 2, arguments, options, start):
        assert re.match(f"ConfigError: {message}", error), error
