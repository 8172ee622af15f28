"""`apportion doctor`, and behaviour common to all commands: completion, quiet, colours, exit codes, 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apportion import cli
from apportion.service.http.serve import serving
from tests.service.stores import redis_server
from tests.support.commands import Command, CommandResult
from tests.support.sparse import sparse

FEW = ("--grids", "usp", "--batches", "1")
ROOT, WORKLOAD = Path(__file__).parents[2], "examples/code_lengths.json"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns wide, in the root of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


def run_process(*words: str, **environment: str) -> CommandResult:
    """Runs a command in a separate process."""
    env, command = {**os.environ, **environment}, [sys.executable, "-m", "apportion", *words]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    return CommandResult(process.returncode, process.stdout, process.stderr)


def checks(done: CommandResult) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in done.json["checks"]}


def test_doctor_reports_what_is_installed(tmp_path: Path) -> None:
    done = run_process("doctor", "--dir", str(tmp_path / "plans"), "--json")
    results = checks(done)
    assert done.code == cli.OK
    assert {"machine", "python", "apportion", "torch", "solvers", "service", "disk"} <= set(results)
    assert results["python"]["state"] == results["disk"]["state"] == "ok"
    assert all(check["remedy"] for check in results.values() if check["state"] in ("warning", "failed"))
    assert not (tmp_path / "plans").exists()  # doctor creates nothing


def test_doctor_checks_a_server(run: Command, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert checks(run("doctor", "--server", server.url, "--json"))["server"]["state"] == "ok"
    done = run("doctor", "--server", server.url, "--json")
    assert done.code == cli.FAILED
    assert done.json["failed"] == ["server"]


def test_doctor_checks_redis_and_hides_its_password(run: Command, tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        assert "answers" in checks(run("doctor", "--redis", url, "--json"))["redis"]["message"]
    done = run("doctor", "--redis", "redis://me:secret@127.0.0.1:1/0")
    assert done.code == cli.FAILED
    assert "secret" not in done.out + done.err


def test_doctor_reports_an_unreachable_ray_cluster(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    done = run("doctor", "--json")
    assert done.json["failed"] == ["Ray cluster"]


@pytest.mark.parametrize(
    "words",
    sparse(
        [
            ("doctor",),
            ("recipes",),
            ("solvers",),
            ("bench", "plan", "--ranks", "8", "--seeds", "1"),
            ("compare", "--workload", WORKLOAD, "--ranks", "8", "--batches", "2", "--recipes", "fcp,ring"),
            ("forecast", "--workload", WORKLOAD, "--ranks", "8", "--recipes", "fcp", *FEW),
        ],
        3,
    ),
)
def test_tables_fit_80_columns_and_files_have_no_colours(run: Command, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.code == cli.OK, done.err
    assert "\x1b" not in done.out
    assert "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_help_lists_exit_codes_and_completion() -> None:
    shown = run_process("--help").out
    assert "Exit codes: 0 done" in shown
    assert "--install-completion" in shown
    completion = {"_APPORTION_COMPLETE": "complete_bash", "COMP_WORDS": "apportion doc", "COMP_CWORD": "1"}
    assert "doctor" in run_process(**completion).out


def test_quiet_prints_only_errors(run: Command) -> None:
    words = ("plan", "--workload", WORKLOAD, "--ranks", "8", "--tokens-per-rank", "1024", "--json")
    loud, quiet = run(*words), run("--quiet", *words)
    assert loud.err  # it would warn of skipped samples
    assert quiet.err == ""
    wrong = run("--quiet", "plan", "--workload", WORKLOAD, "--recipe", "nobody", "--ranks", "8")
    assert (wrong.code, "nobody" in wrong.err) == (cli.BAD_INPUT, True)


def test_a_full_disk_is_reported(run: Command) -> None:
    done = run("plan", "--workload", WORKLOAD, "--ranks", "8", "-o", "/dev/full")
    assert done.code == cli.BAD_INPUT
    assert "Traceback" not in done.err
