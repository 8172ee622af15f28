"""The server against its own OpenAPI document: schemathesis with all of its checks. `schemathesis.toml` has the two
exceptions and their reasons."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.service.limits import Limits
from tests.service.servers import Live, begin, live, make_job, ready, submit

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).with_name("schemathesis.toml")
QUICK = Limits(drain_s=2.0, wait_s=0.05, heartbeat_s=0.05)  # nobody waits for what was not submitted
REAL = {"path.job": "run", "path.epoch": 1, "path.iteration": 0, "path.rank": 0}
# The page's stream lasts as long as the server, those of a real job until its next iterations come: `test_watch` and
# `test_http_streams` have them. The job and its epoch stay.
WIDE = ["--exclude-path", "/watch"]
DEEP = ["--exclude-path-regex", "/(stream|watch)$", "--exclude-method", "DELETE"]
DEEP += ["--exclude-name", "POST /v1/jobs/{job}/epochs", "--phases", "coverage,fuzzing"]


def check(server: Live, folder: Path, config: str, examples: int, seed: int, *options: str) -> None:
    """Raises AssertionError with all that schemathesis found."""
    (folder / "schemathesis.toml").write_text(config)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "--no-color"]
    command += ["run", f"{server.url}/openapi.json", "--checks", "all", "--continue-on-failure"]
    command += ["--max-examples", str(examples), "--seed", str(seed)]
    command += ["--request-timeout", "30", "--warnings", "off"]
    command += ["--header", f"Authorization: Bearer {server.caller.key}", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    found = re.search(r"(\d+) selected / (\d+) total(?s:.*)Tested: (\d+)", done.stdout)
    assert found, done.stdout[-2_000:]
    selected, total, tested = map(int, found.groups())
    assert tested == selected
    assert selected == total - 1 or options != tuple(WIDE)


def wide(folder: Path, seed: int, examples: int) -> None:
    """All operations, with names and numbers that are drawn."""
    with live(limits=QUICK) as server:
        check(server, folder, CONFIG.read_text(), examples, seed, *WIDE)


def deep(folder: Path, seed: int, examples: int) -> None:
    """What can be asked of one job, whose iteration 0 is planned."""
    given = "\n".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in REAL.items())
    with live(limits=QUICK) as server:
        make_job(server.caller)
        begin(server.caller)
        submit(server.caller, 0)
        assert ready(server.caller, 0).status == 200
        check(server, folder, f"[parameters]\n{given}\n\n{CONFIG.read_text()}", examples, seed, *DEEP)
        assert ready(server.caller, 0).status == 200


def soak(seed: int, folder: Path) -> None:
    """Both, with many more examples."""
    wide(folder, seed, 60)
    deep(folder, seed, 60)


@pytest.mark.parametrize("seed", [1])
def test_wide(tmp_path: Path, seed: int) -> None:
    wide(tmp_path, seed, 5)


@pytest.mark.parametrize("seed", [2])
def test_deep(tmp_path: Path, seed: int) -> None:
    deep(tmp_path, seed, 10)
