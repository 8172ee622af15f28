"""Copies of the package with a change from the documents applied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def change(diff: str, folder: Path) -> dict[str, str]:
    """Copies the package with tests, documents and examples to a folder and applies a diff; rebuilds the core if the
    diff changes it. Returns an environment in which Python finds the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("apportion", "core", "docs", "examples", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, check=True, text=True)
    if "b/core/" in diff:
        command = ["make", "--no-print-directory", "core", f"PYTHON={sys.executable}"]
        subprocess.run(command, cwd=folder, check=True)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
