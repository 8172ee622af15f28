"""`apportion demo`: planned and plain training agree, what does not is a failure, and no process is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from apportion.demo import run as demo, train, workload


def test_two_steps_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(None, 2, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert record["largest_difference"] <= demo.TOLERANCE
    assert len(record["losses"]["planned"]) == len(record["losses"]["plain"]) == 2
    imbalance = {name: row["compute_imbalance"] for name, row in record["recipes"].items()}
    assert imbalance["fcp"] < imbalance["contiguous"]
    assert record["tokens_per_s"] > 0


def test_other_losses_and_other_plans_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"loss": 1.0, "plan": "00" * 32, "tokens_per_s": 1.0, "waited_s": 0.0}
    monkeypatch.setattr(demo, "_trained", lambda steps, file: iter([step]))
    monkeypatch.setattr(train, "plain", lambda data: iter([1.001]))
    assert demo.run(None, 1, as_json=False) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "losses differ by 1.0e-03" in printed
    assert "the ranks ran plan 000000000000, not" in printed


def test_documents_are_as_long_as_samples_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"lengths": [500]}')
    (step,) = workload.documents(1, tmp_path / "w.json")
    assert [len(document) for document in step] == [workload.LONG, *[500] * 6, 72]


def test_a_demo_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apportion", "demo", "--steps", "1000"]
    with open(tmp_path / "out", "wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    with run:
        started = until(lambda: len(processes_of(run.pid)) >= 3 + workload.RANKS or run.poll() is not None)
        run.send_signal(signal.SIGTERM)
        run.wait(300)
    assert started, (tmp_path / "out").read_text()
    assert until(lambda: not processes_of(run.pid)), processes_of(run.pid)


def until(holds: Callable[[], Any], seconds: int = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(holds())


def processes_of(session: int) -> set[str]:
    """Number and name of a session's processes, as the system tells them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, rest = stat.read_text().rsplit(")", 1)
            state, _, _, own, *_ = rest.split()
            if state != "Z" and int(own) == session:
                found.add(name)
    return found
