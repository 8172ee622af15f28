"""Plans made before training: any number of runs give the same folder, which loaders and servers read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion import CapacityError, ConfigError, cli
from apportion.ir.bytes.origin import origin
from apportion.service.precompute import IterationError, Work, precompute
from apportion.service.store import Folder, StoreError
from apportion.service.workers import ProcessExecutor, WorkerDiedError
from tests.service.requests import JOB, RANKS
from tests.support.programs import run

LENGTHS = np.random.default_rng(0).integers(100, 900, 12)


def work(iterations: int = 8, seed_of: int = 0, **more: object) -> Work:
    return Work(JOB, LENGTHS + seed_of, None, iterations, **more)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_stopped_run_is_continued_by_the_next(tmp_path: Path, workers: ProcessExecutor) -> None:
    reports: list[tuple[int, int]] = []
    first = precompute(work(3), tmp_path / "a", workers, 2)
    rest = precompute(work(8), tmp_path / "a", workers, 2, lambda *at: reports.append(at))
    assert (first.planned, rest.iterations, rest.planned) == (3, 8, 5)
    assert reports[0] == (0, 0)
    assert reports[-1] == (8, 5)
    assert precompute(work(8), tmp_path / "a", workers, 2).planned == 0
    precompute(work(8), tmp_path / "b", workers, 2)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_damaged_plans_are_planned_again_and_left_alone_by_readers(
    tmp_path: Path, workers: ProcessExecutor
) -> None:
    precompute(work(5), tmp_path, workers, 2)
    whole = files(tmp_path)
    first, second, third, *_ = (tmp_path / name for name in sorted(whole) if name.endswith(".plan"))
    first.write_bytes(first.read_bytes()[:99])
    second.write_bytes(third.read_bytes())  # another request's
    damaged = files(tmp_path)
    reader = Folder(tmp_path, repairs=False)
    for path in (first, second):
        with pytest.raises(StoreError, match=rf"cannot read {path}: .*; run apportion precompute again"):
            reader.slice(bytes.fromhex(path.stem), 0)
    assert files(tmp_path) == damaged
    assert precompute(work(5), tmp_path, workers, 2).planned == 2
    assert files(tmp_path) == whole


def test_every_iteration_of_every_epoch_is_planned(tmp_path: Path, workers: ProcessExecutor) -> None:
    all_work, store = work(8), Folder(tmp_path)
    summary = precompute(all_work, tmp_path, workers, 2)
    epochs = [all_work.sampling.epoch(epoch) for epoch in range(8)]
    assert len(epochs[0]) < 8
    for samples in [samples for epoch in epochs for samples in epoch][:8]:
        assert store.slice(JOB.request_key(all_work.batches(samples)), RANKS - 1).ranks == RANKS
    assert summary.packs == len(list(store.files()))
    record = json.loads((tmp_path / "precompute.json").read_bytes())
    assert record == origin(JOB, LENGTHS, None, all_work.sampling) | {"iterations": 8}


def test_equal_iterations_are_planned_together_and_all_counted(
    tmp_path: Path, workers: ProcessExecutor
) -> None:
    summary = precompute(Work(JOB, np.full(12, 300), None, 8), tmp_path, workers, 2)
    assert summary.packs < summary.planned == summary.iterations == 8


class DyingExecutor(Executor):
    """Plans in this process, after `deaths` failures of a worker."""

    def __init__(self, deaths: int) -> None:
        self.left = deaths

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        self.left -= 1
        if self.left >= 0:
            future.set_exception(WorkerDiedError("killed"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_a_request_is_planned_again_until_three_workers_have_died_on_it(tmp_path: Path) -> None:
    with pytest.raises(IterationError, match="iteration 0 of epoch 0: killed"):
        precompute(work(1), tmp_path, DyingExecutor(3), 1)
    assert precompute(work(1), tmp_path, DyingExecutor(2), 1).planned == 1


@pytest.mark.parametrize(("other", "field"), [({"seed_of": 1}, "lengths"), ({"shuffle": False}, "shuffle")])
def test_a_folder_of_another_job_is_refused(
    other: dict[str, object], field: str, tmp_path: Path, workers: ProcessExecutor
) -> None:
    precompute(work(1), tmp_path, workers, 2)
    before = files(tmp_path)
    with pytest.raises(ConfigError) as refused:
        precompute(work(1, **other), tmp_path, workers, 2)
    assert refused.value.field == field
    assert files(tmp_path) == before


@pytest.mark.parametrize("record", [b"", b"[1]", b"{}", b'{"iterations": ""}', b'{"iterations": 5}', b"\xff"])
def test_a_damaged_record_is_named(record: bytes, tmp_path: Path, workers: ProcessExecutor) -> None:
    (tmp_path / "precompute.json").write_bytes(record)
    with pytest.raises(ConfigError):
        precompute(work(1), tmp_path, workers, 2)
    assert files(tmp_path) == {"precompute.json": record}


def test_a_batch_that_cannot_be_planned_is_named(tmp_path: Path, workers: ProcessExecutor) -> None:
    with pytest.raises(CapacityError, match="sample"):
        Work(JOB, [10**6], None, 1)
    tight = replace(JOB, policy=replace(JOB.policy, token_cap=1))
    with pytest.raises(IterationError, match="iteration 0 of epoch 0"):
        precompute(Work(tight, LENGTHS, None, 1), tmp_path, workers, 2)
    # the refused job left no plans in the folder
    assert precompute(work(1), tmp_path, workers, 2).planned == 1


@pytest.mark.slow
def test_the_command_continues_after_being_killed_anywhere(tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.jsonl", tmp_path / "plans"
    lengths.write_text("\n".join(map(str, LENGTHS.tolist())))
    options = ["--ranks", "4", "--tokens-per-rank", "512", "--iterations", "80", "--workers", "1", "--json"]
    files = ["--lengths", str(lengths), "--out", str(out)]
    command = [sys.executable, "-m", "apportion", "precompute", *files, *options]
    for least in (1, 12):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            while process.poll() is None and sum(1 for _ in out.rglob("*.plan")) < least:
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
    record = json.loads(run(*command))
    assert record["iterations"] == 80
    assert 0 < record["planned"] < 80
    assert cli.main(["store", "check", str(out), "--json"]) == cli.OK
