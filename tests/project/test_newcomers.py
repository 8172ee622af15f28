"""The changes that CONTRIBUTING.md shows are whole: each is applied to a copy of the package, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changed import change
from tests.support.sparse import marked

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^### ([^\n]+)\n\n```diff\n(.*?)```\n\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)
CHANGES = {
    name: (diff, code)
    for name, diff, code in SECTION.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
}


def test_a_mask_a_pass_and_an_op_are_shown() -> None:
    assert list(CHANGES) == ["A mask", "A placement pass with a solver of its own", "An op"]


@pytest.mark.parametrize("name", marked(list(CHANGES), range(2)))  # for the last the core is built anew
def test_a_change_applies_and_runs(name: str, tmp_path: Path) -> None:
    diff, code = CHANGES[name]
    env = change(diff, tmp_path)
    before = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert before.returncode != 0, "it runs without the change, too"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
