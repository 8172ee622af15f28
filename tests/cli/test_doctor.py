"""`apportion doctor`, and behaviour common to all commands: completion, quiet, colours, exit codes, 80 columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from apportion import cli
from apportion.service.http.serve import serving
from tests.service.stores import redis_server
from tests.support.sparse import sparse

ROOT, WORKLOAD = Path(__file__).parents[2], "examples/code_lengths.json"


class Done(NamedTuple):
    """A finished command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process, 80 columns wide."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> Done:
        return Done(cli.main(words), *capsys.readouterr())

    return run


def run_process(*words: str, **environment: str) -> Done:
    """Runs a command in a separate process."""
    env, command = {**os.environ, **environment}, [sys.executable, "-m", "apportion", *words]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    return Done(process.returncode, process.stdout, process.stderr)


def checks(done: Done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_doctor_reports_what_is_installed(tmp_path: Path) -> None:
    done = run_process("doctor", "--dir", str(tmp_path / "plans"), "--json")
    results = checks(done)
    assert done.returncode == cli.OK
    assert {"machine", "python", "apportion", "torch", "solvers", "service", "disk"} <= set(results)
    assert results["python"]["state"] == results["disk"]["state"] == "ok"
    assert all(check["remedy"] for check in results.values() if check["state"] in ("warning", "failed"))
    assert not (tmp_path / "plans").exists()  # doctor creates nothing


def test_doctor_checks_a_server(run: Callable[..., Done], tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert checks(run("doctor", "--server", server.url, "--json"))["server"]["state"] == "ok"
    done = run("doctor", "--server", server.url, "--json")
    assert done.returncode == cli.FAILED
    assert json.loads(done.stdout)["failed"] == ["server"]


def test_doctor_checks_redis_and_hides_its_password(run: Callable[..., Done], tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        assert "answers" in checks(run("doctor", "--redis", url, "--json"))["redis"]["message"]
    done = run("doctor", "--redis", "redis://me:secret@127.0.0.1:1/0")
    assert done.returncode == cli.FAILED
    assert "secret" not in done.stdout + done.stderr


def test_doctor_reports_an_unreachable_ray_cluster(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    done = run("doctor", "--json")
    assert json.loads(done.stdout)["failed"] == ["Ray cluster"]


@pytest.mark.parametrize(
    "words",
    sparse(
        [
            ("doctor",),
            ("recipes",),
            ("solvers",),
            ("bench", "plan", "--ranks", "8", "--seeds", "1"),
            ("compare", "--workload", WORKLOAD, "--ranks", "8", "--batches", "2", "--recipes", "fcp,ring"),
            (
                "forecast",
                "--workload",
                WORKLOAD,
                "--ranks",
                "8",
                "--recipes",
                "fcp",
                "--grids",
                "usp",
                "--batches",
                "1",
            ),
        ],
        3,
    ),
)
def test_tables_fit_80_columns_and_files_have_no_colours(
    run: Callable[..., Done], words: tuple[str, ...]
) -> None:
    done = run(*words)
    assert done.returncode == cli.OK, done.stderr
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_lists_exit_codes_and_completion() -> None:
    shown = run_process("--help").stdout
    assert "Exit codes: 0 done" in shown
    assert "--install-completion" in shown
    script = run_process(
        _APPORTION_COMPLETE="complete_bash", COMP_WORDS="apportion doc", COMP_CWORD="1"
    ).stdout
    assert "doctor" in script


def test_quiet_prints_only_errors(run: Callable[..., Done]) -> None:
    words = ("plan", "--workload", WORKLOAD, "--ranks", "8", "--tokens-per-rank", "1024", "--json")
    loud, quiet = run(*words), run("--quiet", *words)
    assert loud.stderr  # it would warn of skipped samples
    assert quiet.stderr == ""
    wrong = run("--quiet", "plan", "--workload", WORKLOAD, "--recipe", "nobody", "--ranks", "8")
    assert (wrong.returncode, "nobody" in wrong.stderr) == (cli.BAD_INPUT, True)


@pytest.mark.parametrize(
    "words",
    sparse(
        [
            ("verify", "/proc/self/mem"),
            ("report", "{here}", "-o", "{here}/r.html"),
            ("show", "{here}/none.plan"),
            ("plan", "--batch", "{here}/binary.json"),
            ("forecast", "--ranks", "8", "--recipes", "fcp", "--batches", "0"),
        ],
        3,
    ),
)
def test_errors_have_no_traceback(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    done = run_process(*(word.format(here=tmp_path) for word in words))
    assert done.returncode == cli.BAD_INPUT
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_a_full_disk_is_reported(run: Callable[..., Done]) -> None:
    done = run("plan", "--workload", WORKLOAD, "--ranks", "8", "-o", "/dev/full")
    assert done.returncode == cli.BAD_INPUT
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("recipes", "--json"), ("recipes",)])
def test_a_closed_stdout_is_not_an_error(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "apportion", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == cli.OK
