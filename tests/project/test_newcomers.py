"""The changes that CONTRIBUTING.md shows are whole: each is applied to a copy of the package, and runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^### ([^\n]+)\n\n```diff\n(.*?)```\n\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)
CHANGES = {
    name: (diff, code)
    for name, diff, code in SECTION.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
}


def test_a_mask_a_pass_and_an_op_are_shown() -> None:
    assert list(CHANGES) == ["A mask", "A placement pass with a solver of its own", "An op"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_applies_and_runs(name: str, tmp_path: Path) -> None:
    diff, code = CHANGES[name]
    shutil.copytree(ROOT / "apportion", tmp_path / "apportion", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("tests/plans", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    subprocess.run(["git", "apply", "-"], input=diff, cwd=tmp_path, check=True, text=True)
    before = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert before.returncode != 0, "it runs without the change, too"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
