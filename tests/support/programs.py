"""Programs in processes of their own; one that fails shows what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path = ROOT, env: Mapping[str, str] = {}, timeout_s: float = 900.0) -> str:
    """Runs a command, with `env` added to the environment. Returns its standard output; asserts that it succeeds."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
    return done.stdout


def run_python(*words: object, cwd: Path = ROOT, env: Mapping[str, str] = {}) -> str:
    """Runs Python with these arguments and without warnings, like `run`."""
    return run(sys.executable, "-W", "error", *words, cwd=cwd, env=env)
