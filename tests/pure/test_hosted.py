"""What is run by others (hooks of git, hosted CI, containers) names what is here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def commands_of(target: str) -> list[str]:
    """The lines of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, target
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_hooks_before_a_commit_run_what_make_lint_runs() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == commands_of("lint")
    assert not any(hook["pass_filenames"] for hook in local["hooks"])  # the tools know what to look at


def test_hosted_ci_names_targets_of_make_and_every_python() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = {name for line in lines for name in re.findall(r"\bmake ([a-z-]+)", line)}
    assert named == {"lint", "test-plain", "test", "package"}
    assert named <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = jobs["plain"]["strategy"]["matrix"]
    assert matrix == {"python": said, "numba": ["", "1"]}
    first, beyond = re.findall(r"3\.(\d+)", project["requires-python"])
    assert said == [f"3.{minor}" for minor in range(int(first), int(beyond))]


def test_actions_are_pinned_by_major_version() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in used), used
