"""The changes that the documents show are whole: each is applied to a copy of the package, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changed import change
from tests.support.sparse import marked

ROOT = Path(__file__).resolve().parents[2]
CHANGE = re.compile(r"^```diff\n(.*?)```\n\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)
CHANGES: dict[str, tuple[str, str]] = {
    name: CHANGE.findall((ROOT / f"docs/how-to/own-{name}.md").read_text(encoding="utf-8"))[0]
    for name in ("mask", "solver", "op")
}


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
