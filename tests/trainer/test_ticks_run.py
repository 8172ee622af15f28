"""Pipelines of ticks on real ranks over gloo train the same model as the microbatches without a pipeline."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion import ConfigError, Model, cli, masks
from apportion.planner.iteration.ticks import tick_job, tick_table
from apportion.service.http.serve import serving
from tests.ranks import jobs_ticks
from tests.ranks.loading import LENGTHS, job, planning
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_rows

MODEL = Model(2, 1, 8, dtype="fp64", hidden=16, ffn=24, layers=4)
KINDS = {"full": masks.causal(), "near": masks.sliding_window(6), "sink": masks.sink_window(2, 4)}


def tick_arguments(tokens: int, ranks: int, recipe: Any, layers: Any = 4, **options: Any) -> dict[str, Any]:
    """Arguments of the loader. tokens: total of a microbatch on all ranks."""
    kwargs = planning(replace(job(ranks, tokens), model=replace(MODEL, layers=layers)))
    return {**kwargs, "recipe": recipe, **options}


@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches", "virtual", "kinds", "options"),
    sparse_rows(
        [
            (2, 2, 2, 2, ["full", "near", "sink", "sink"], {}),
            (2, 2, 4, 1, None, {"rows_multiple": 4}),
            (2, 2, 2, 1, ["near", "sink"], {}),
            (4, 1, 4, 1, ["full", "full", "near", "sink"], {}),
        ],
        4,
    ),
)
def test_ticks_train_like_a_run_without_a_pipeline(
    pool: Pool,
    stages: int,
    replicas: int,
    microbatches: int,
    virtual: int,
    kinds: list[str] | None,
    options: dict[str, Any],
) -> None:
    ranks = stages * replicas
    layers: Any = 4
    if kinds is not None:
        layers = {kind: 4 // len(kinds) * kinds.count(kind) for kind in kinds}
        options |= {"masks": {kind: KINDS[kind] for kind in kinds}}
    pipeline = stages, microbatches, virtual
    plain = tick_arguments(64, ranks, "fcp", layers, microbatches=microbatches, **options)
    ticks = tick_arguments(64 * stages, ranks, None, layers, **options)
    expected = pool.run(jobs_ticks.trained, ranks, plain, None, None)
    found = pool.run(jobs_ticks.trained, ranks, ticks, pipeline, kinds)
    for (losses, gradients), (others, same) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, same[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_ticks_can_be_planned_by_a_server_or_in_advance(pool: Pool, tmp_path: Path) -> None:
    kwargs = tick_arguments(128, 4, None)
    lengths, model = tmp_path / "lengths.txt", tmp_path / "model.json"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    model.write_text(json.dumps(MODEL.to_data()))
    files = ["--lengths", str(lengths), "--model", str(model), "--out", str(tmp_path / "plans")]
    options = (
        "--ranks 4 --tokens-per-rank 32 --microbatches 4 --pipeline 2 --iterations 1 --no-shuffle --workers 1"
    )
    assert cli.main(["precompute", *files, *options.split()]) == cli.OK
    with serving(tmp_path / "server") as server:
        local, served, stored = (
            pool.run(jobs_ticks.trained, 4, {**kwargs, "source": source}, (2, 4), None)
            for source in (kwargs["source"], server.url, tmp_path / "plans")
        )
    for found, *others in zip(local, served, stored, strict=True):
        for losses, gradients in others:
            assert losses == found[0]
            assert all(torch.equal(gradient, found[1][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("ranks", "recipe", "chunks", "error"),
    [
        (3, None, 1, r"cluster.ranks = 3: must be a multiple of the 2 stages"),
        (2, "wlb", 1, r"recipe.pack = 'wlb': would mix sequences of several ticks"),
        (2, "auto", 1, r"recipe = 'auto': does not keep a microbatch's rows in place in all ticks"),
        (2, "fcp", 1, r"recipe = 'fcp': does not keep .*leave recipe out, or pass distca"),
        (2, None, 2, r"chunks = \[0, 0\]: must be 1 lists of equal length, one per chunk of a stage"),
    ],
)
def test_unsupported_pipelines_are_refused(
    pool: Pool, ranks: int, recipe: Any, chunks: int, error: str
) -> None:
    arguments = tick_arguments(64 * ranks, ranks, recipe)
    errors = pool.errors(jobs_ticks.stepped, ranks, arguments, (2, 2), chunks)
    assert re.match(f"ConfigError: {error}", errors[0]), errors


@pytest.mark.parametrize(
    ("mistake", "ranks", "error"),
    [
        ("", 2, "$"),
        (
            "sum",
            2,
            r"ConfigError: group = '2 ranks': hold different parameters.*pass the ranks of one pipeline stage",
        ),
        ("equal", 2, r"ConfigError: group = '2 ranks': hold different parameters"),
        (
            "none",
            4,
            r"ExecutionError: parameters differ between the ranks of stage .: sum gradients over them",
        ),
        ("mean", 2, r"UserWarning: the loss cannot be checked"),
    ],
)
def test_wrong_sums_and_unchecked_losses_are_reported(
    pool: Pool, mistake: str, ranks: int, error: str
) -> None:
    for result in pool.errors(jobs_ticks.mistaken, ranks, tick_arguments(64 * ranks, ranks, None), mistake)[
        1:
    ]:
        assert re.match(error, result), result


def test_kinds_of_stages_must_match_the_layers() -> None:
    model = replace(MODEL, layers={"full": 2, "near": 2})
    two_kinds = replace(job(2, 128, recipe="distca"), model=model)
    tick_job(two_kinds, tick_table(2, 2), ["near", "full"])
    with pytest.raises(ConfigError, match=r"kinds = \['full', 'full'\]: must be in proportion to .*layers"):
        tick_job(two_kinds, tick_table(2, 2), ["full", "full"])
