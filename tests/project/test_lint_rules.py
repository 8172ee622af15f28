"""Limits on the size of functions: ruff checks them, and no exception is unused."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path, PurePath

from tests.support.programs import run

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ("C901", "PLR0912", "PLR0913", "PLR0915")
RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]


def test_ruff_checks_limits_and_every_exception_is_still_needed() -> None:
    assert set(LIMITS) <= set(RUFF["select"])
    command = [Path(sys.executable).with_name("ruff"), "check", "--exit-zero", "--output-format", "json"]
    plain = ["--select", ",".join(LIMITS), "--config", "lint.per-file-ignores = {}", "."]
    found = json.loads(run(*command, *plain))
    large = {(PurePath(row["filename"]).relative_to(ROOT), row["code"]) for row in found}
    assert large
    excepted = [(name, code) for name, codes in RUFF["per-file-ignores"].items() for code in codes]
    unused = [
        (name, code)
        for name, code in excepted
        if code in LIMITS and not any(path.match(name) and code == found for path, found in large)
    ]
    assert not unused, f"{unused}: take these out of per-file-ignores in pyproject.toml"
