"""Changes in the documents are complete: with each applied to a copy of the package, its example code and the tests
that its page names pass."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changed import change
from tests.support.programs import run, run_python
from tests.support.sparse import marked

ROOT = Path(__file__).resolve().parents[2]
CHANGE = re.compile(r"^```diff\n(.*?)```\n\n```python\n(.*?)```.*?^    \.venv/bin/(pytest .*?)$", re.M | re.S)
CHANGES: dict[str, tuple[str, str, str]] = {
    name: CHANGE.findall((ROOT / f"docs/how-to/own-{name}.md").read_text(encoding="utf-8"))[0]
    for name in ("mask", "solver", "op")
}


@pytest.mark.parametrize("name", marked(list(CHANGES), range(2)))  # the last one rebuilds the core
def test_a_change_applies_and_runs(name: str, tmp_path: Path) -> None:
    diff, code, _ = CHANGES[name]
    env = change(diff, tmp_path)
    before = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert before.returncode != 0, "the code also runs without the change"
    run_python("-c", code, cwd=tmp_path, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_tests_of_a_change_pass(name: str, tmp_path: Path) -> None:
    diff, _, tests = CHANGES[name]
    words = [*shlex.split(tests), "-p", "no:cacheprovider"]
    run(sys.executable, "-m", *words, cwd=tmp_path, env=change(diff, tmp_path))
