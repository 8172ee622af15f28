"""Builds the sdist, and the wheel from it; installs each in a new environment and runs it there.

Run: python -m tests.checks.package [--out dist]. Exit code 1 if either lacks a tracked file of the package or cannot
plan. Needs the package index and a C++ compiler. Prints the time of the first verified plan for 64 ranks in each
environment (target: 3 s) and the size of the environment (target: 80 MB).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "examples/batch.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build sdist and wheel, install them, start them.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archives = build(folder)
        lacking = {path.name: missing(path) for path in archives}
        for file, names in lacking.items():
            print(f"{file}: lacks {', '.join(names[:5]) or 'nothing'}{' …' if len(names) > 5 else ''}")
        if any(lacking.values()):
            return 1
        for number, path in enumerate(archives):
            start(folder / f"environment{number}", path)
        out.mkdir(parents=True, exist_ok=True)
        for path in archives:
            print(shutil.copy(path, out))
    return 0


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the sdist of tracked files, and the wheel from the sdist."""
    tree, tools, archives = folder / "tree", folder / "tools", folder / "made"
    for name in _tracked_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    python = _environment(tools)
    _run([python, "-m", "pip", "install", "--quiet", "build"], folder)
    _run([python, "-m", "build", "--outdir", str(archives), str(tree)], folder, quiet=True)
    (sdist,), (wheel,) = archives.glob("*.tar.gz"), archives.glob("*.whl")
    return sdist, wheel


def missing(path: Path) -> list[str]:
    """The files of the package that an archive lacks."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            contents = set(archive.namelist())
    else:
        with tarfile.open(path) as found:
            contents = {name.partition("/")[2] for name in found.getnames()}
    return sorted(name for name in _tracked_files() if name.startswith("apportion/") and name not in contents)


def start(home: Path, path: Path) -> None:
    """Installs an archive without extras, plans a batch and verifies the plan."""
    python = _environment(home)
    _run([python, "-m", "pip", "install", "--quiet", str(path)], home)
    command, plan = str(home / "bin/apportion"), str(home / "first.plan")
    start_time = time.perf_counter()
    _run([command, "plan", "--batch", str(BATCH), "--ranks", "64", "-o", plan], home, quiet=True)
    _run([command, "verify", plan], home)
    seconds = time.perf_counter() - start_time
    _run([command, "--version"], home)
    files = (file for file in (home / "lib").rglob("*") if file.is_file())
    installed = sum(file.stat().st_size for file in files if "pip" not in file.relative_to(home).parts[3:4])
    size = f"{installed / 1e6:.0f} MB"
    print(f"first plan of 64 ranks, verified: {seconds:.1f} s; installed: {size}", flush=True)


def _tracked_files() -> list[str]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _environment(home: Path) -> str:
    venv.create(home, with_pip=True)
    return str(home / "bin/python")


def _run(command: list[str], folder: Path, *, quiet: bool = False) -> None:
    """Runs a command in a folder where the checkout's package cannot be imported."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", " ".join(Path(part).name if "/" in part else part for part in command), flush=True)
    subprocess.run(command, cwd=folder, env=clean, stdout=subprocess.DEVNULL if quiet else None, check=True)


if __name__ == "__main__":
    sys.exit(main())
