"""Planning and verification beside those of another commit: the same job in turns, so that a busy machine slows both.

    python benchmarks/against.py COMMIT [--jobs fcp=fcp_paper:2048,blend,…] [--ranks 8,64,256,1024] [--turns 3] [--json]

Each turn runs `apportion bench plan` of either commit, five repeats after one to warm up; what counts is the lowest of
the turns' medians. Prints a table, or with --json one object: rows with milliseconds of both. A commit that cannot plan
a job, or not within --patience seconds, has null. --tree: where the commit is checked out already, compiled perhaps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from apportion.cli.environment import machine, versions

ROOT = Path(__file__).resolve().parents[1]
JOBS = "fcp=fcp_paper:2048,fcp=fcp_paper:auto,blend,distca,zeppelin,ulysses,upipe,ring"
TIMES = ("planning_ms", "verify_ms")


def main() -> int:
    parser = argparse.ArgumentParser(description="Planning times beside another commit's.")
    parser.add_argument("commit")
    parser.add_argument("--jobs", default=JOBS, help="recipes, NAME or NAME_THEN=NAME, with :BLOCK")
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    cases = [(job, int(ranks)) for job in chosen.jobs.split(",") for ranks in chosen.ranks.split(",")]
    with _tree(chosen.commit, chosen.tree) as tree:
        every = track(cases, "planning", console=Console(stderr=True), disable=not sys.stderr.isatty())
        rows = [_row(job, ranks, tree, chosen.turns, chosen.patience) for job, ranks in every]
    if chosen.json:
        print(json.dumps({"base": chosen.commit, "machine": machine(), "versions": versions(), "rows": rows}))
    else:
        _print(chosen.commit, rows)
    return 0


@contextmanager
def _tree(commit: str, tree: Path | None) -> Iterator[Path]:
    if tree is not None:
        yield tree
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "tree"
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", made, commit], check=True
        )
        try:
            build_core(made)
            yield made
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", made], check=True)


def build_core(tree: Path) -> None:
    """Builds the core of another commit's tree, where it has one, as `make core` does."""
    if (tree / "core/CMakeLists.txt").exists():
        subprocess.run(["make", "-C", str(tree), "--silent", "core", f"PYTHON={sys.executable}"], check=True)


def _row(job: str, ranks: int, tree: Path, turns: int, patience: float) -> dict[str, Any]:
    """Milliseconds of the commit and of this tree, in turns; a tree that failed once is not asked again."""
    found: dict[str, list[dict[str, float]]] = {"base": [], "now": []}
    places = {"base": tree, "now": ROOT}
    for _ in range(turns):
        for name in list(places):
            recipes, _, block = job.partition(":")
            then, _, own = recipes.partition("=")
            recipe = then if name == "base" else own or then
            times = _times(places[name], recipe, block, ranks, patience)
            if times is None:
                del places[name]
            else:
                found[name].append(times)
    row: dict[str, Any] = {"job": job, "ranks": ranks}
    for name, each in found.items():
        row[name] = {kind: min(times[kind] for times in each) for kind in TIMES} if each else None
    return row


def _times(tree: Path, recipe: str, block: str, ranks: int, patience: float) -> dict[str, float] | None:
    command = [sys.executable, "-m", "apportion", "bench", "plan", "--recipe", recipe, "--ranks", str(ranks)]
    command += ["--block", block] if block else []
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, "--json"], cwd=tree, env=environment, capture_output=True, timeout=patience, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    (row,) = json.loads(done.stdout)["rows"]
    return {name: row[name]["p50"] for name in TIMES}


def _print(commit: str, rows: list[dict[str, Any]]) -> None:
    both = f"{commit[:7]} / now"
    print(f"| recipe | ranks | planning, {both} | ratio | verification, {both} | ratio | of planning |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [row["job"].partition("=")[2].replace(":", " ") or row["job"], str(row["ranks"])]
        for kind in TIMES:
            base, now = (None if row[name] is None else row[name][kind] for name in ("base", "now"))
            cells.append(" / ".join("-" if ms is None else f"{ms:.1f}" for ms in (base, now)))
            cells.append("-" if base is None or now is None else f"{now / base:.2f}")
        now = row["now"]
        cells.append("-" if now is None else f"{now['verify_ms'] / now['planning_ms']:.2f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
