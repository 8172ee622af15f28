"""`apportion demo`: planned and plain training agree, differences are failures, and no process is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from apportion.demo import run as demo, train, workload
from tests.processes import descendants, running


@pytest.mark.slow
def test_planned_and_plain_training_agree_for_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(None, 2, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert record["largest_difference"] <= demo.TOLERANCE
    assert len(record["losses"]["planned"]) == len(record["losses"]["plain"]) == 2
    imbalance = {name: row["compute_imbalance"] for name, row in record["recipes"].items()}
    assert imbalance["auto"] < imbalance["contiguous"]
    assert record["tokens_per_s"] > 0


def test_differing_losses_and_plans_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"loss": 1.0, "plan": "00" * 32, "tokens_per_s": 1.0, "waited_s": 0.0}
    monkeypatch.setattr(demo, "_train_on_ranks", lambda steps, file: iter([step]))
    monkeypatch.setattr(train, "train_plain", lambda data: iter([1.001]))
    assert demo.run(None, 1, as_json=False) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "losses differ by 1.0e-03" in printed
    assert "the ranks ran plan 000000000000, not" in printed


def test_documents_are_as_long_as_samples_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"lengths": [500]}')
    (step,) = workload.documents(1, tmp_path / "w.json")
    assert [len(document) for document in step] == [workload.LONG, *[500] * 6, 72]


@pytest.mark.slow
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    command, started = [sys.executable, "-m", "apportion", "demo", "--steps", "1000"], set[int]()
    with open(tmp_path / "out", "wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        until = time.monotonic() + 120.0
        while ranks_of(started) < workload.RANKS and run.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            started |= set(descendants(run.pid))
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    assert len(started) > workload.RANKS, (tmp_path / "out").read_text()
    assert not running(started, 60.0)


def ranks_of(pids: set[int]) -> int:
    """The number of these processes that train."""
    count = 0
    for pid in pids:
        with suppress(OSError):
            count += b"\0apportion.demo.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return count
