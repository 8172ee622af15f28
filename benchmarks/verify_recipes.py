"""Every built-in recipe on the shipped workloads and log-normal documents, planned and verified at 64 and 256 ranks.

Run: python benchmarks/verify_recipes.py [--ranks 64,256] [--recipes all|NAME,...] [--workloads NAME,...] [--fresh]
[--timeout 600] [--memory-gib 12] [--json]. Built-in h100, the README's model, 32K tokens a rank, 8 ranks a node, seed
0. Each case runs in a process of its own under limits of time and memory; rows are in
benchmarks/results/verify_recipes.json as soon as they are known, and cases that are there already are not run again.
Exit code 1 where a plan breaks a rule or a case crashes.

    outcome   ok         planned, and no rule of the verifier is broken
              refused    the recipe says why it does not serve the case
              unchecked  planned, but too large for a rule of the verifier
              late       not done in time; what: planning or verifying
              memory     more than the limit; what: planning or verifying
              broken     the verifier, or a crash, says why
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from apportion.bench import BenchJob, Source, cluster_of, timed_plan, timed_verify, warm_up
from apportion.cli.environment import versions
from apportion.comparison import UNVERIFIED
from apportion.ir.errors import ApportionError, VerifyError
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.workload import read_workload
from apportion.planner.plugins import found as found_plugins
from apportion.planner.recipe.recipes import entries

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/verify_recipes.json"
WORKLOADS = {
    "lognormal": None,
    "documents": ROOT / "examples/doc_lengths.json",
    "code": ROOT / "examples/code_lengths.json",
}
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, layers=32)
TOKENS = 32768
SEED = 0
BAD = ("broken",)


@dataclass(frozen=True, order=True)
class Case:
    ranks: int
    workload: str
    recipe: str

    def job(self) -> BenchJob:
        path, hardware = WORKLOADS[self.workload], Hardware.load("h100")
        batch, _ = Source(None if path is None else read_workload(path)).batch(self.ranks * TOKENS, SEED)
        return BenchJob(batch, cluster_of(self.ranks, None, hardware), MODEL, self.recipe, SEED, hardware)


# --- in the process of a case


def checked(case: Case) -> Iterator[dict[str, Any]]:
    """What is known of the case, as it becomes known: the last one is the outcome."""
    warm_up(case.recipe)
    yield {"what": "planning"}
    try:
        plan, planning_ms, _ = timed_plan(case.job())
    except ApportionError as error:
        yield {"outcome": "refused", "why": " ".join(str(error).split())}
        return
    report = plan.report
    known = {"planning_ms": round(planning_ms, 1), "imbalance": report["imbalance"], "bytes": report["bytes"]}
    known |= {"rounds": report["rounds"], "plan_bytes": report["plan_bytes"]}
    yield {"what": "verifying", **known}
    try:
        yield {"outcome": "ok", "verify_ms": round(timed_verify(plan), 1), **known}
    except VerifyError as error:
        large = all(each.message.startswith(UNVERIFIED) for each in error.violations)
        yield {"outcome": "unchecked" if large else "broken", "why": str(error)[:2000], **known}


def child(case: Case, memory_gib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_gib << 30, memory_gib << 30))
    what: dict[str, Any] = {}
    try:
        for what in checked(case):
            print(json.dumps(what), flush=True)
    except MemoryError:
        print(json.dumps({**what, "outcome": "memory", "why": f"more than {memory_gib} GiB"}), flush=True)


# --- in the process that runs all


def run(case: Case, timeout: int, memory_gib: int) -> dict[str, Any]:
    """The row of a case."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--memory-gib", str(memory_gib)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, text=True)
    except subprocess.TimeoutExpired as late:
        told = (late.stdout or b"").decode()
        return asdict(case) | _last(told) | {"outcome": "late", "why": f"more than {timeout} s"}
    found = _last(done.stdout)
    if done.returncode or "outcome" not in found:
        found |= {"outcome": "broken", "why": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    return asdict(case) | found


def _last(told: str) -> dict[str, Any]:
    lines = told.splitlines()
    return dict(json.loads(lines[-1])) if lines else {"what": "starting"}


def rows(cases: Sequence[Case], timeout: int, memory_gib: int, fresh: bool) -> list[dict[str, Any]]:
    """The rows of the cases, each saved as soon as it is known."""
    saved = {case: row for case, row in _saved().items() if not (fresh and case in cases)}
    for number, case in enumerate(cases, 1):
        if case not in saved:
            saved[case] = run(case, timeout, memory_gib)
            _save(saved)
            print(f"{number}/{len(cases)} {_line(saved[case])}", file=sys.stderr, flush=True)
    return [saved[case] for case in cases]


def _saved() -> dict[Case, dict[str, Any]]:
    held = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {Case(row["ranks"], row["workload"], row["recipe"]): row for row in held}


def _save(held: dict[Case, dict[str, Any]]) -> None:
    found = [held[case] for case in sorted(held)]
    record = {"versions": versions(), "summary": summary(found), "rows": found}
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(RESULTS)


def summary(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Ranks -> outcome -> number of cases."""
    counts = {
        ranks: Counter(row["outcome"] for row in found if row["ranks"] == ranks) for ranks in _ranks(found)
    }
    return {str(ranks): dict(sorted(count.items())) for ranks, count in counts.items()}


def _ranks(found: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({row["ranks"] for row in found})


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {row[name]:.0f}" for name in ("planning_ms", "verify_ms") if name in row)
    why = row.get("why", "").splitlines()
    return (
        f"{row['recipe']} {row['workload']} {row['ranks']} ranks: {row['outcome']} {times} {(why or [''])[0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="64,256")
    parser.add_argument("--recipes", default="all")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--timeout", type=int, default=600, help="seconds of a case")
    parser.add_argument("--memory-gib", type=int, default=12, help="address space of a case")
    parser.add_argument("--fresh", action="store_true", help="run again what has rows")
    parser.add_argument("--json", action="store_true", help="print the rows, not the summary")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.case is not None:
        return child(Case(**json.loads(told.case)), told.memory_gib)
    built_in = [name for name in entries() if name not in found_plugins("apportion.recipes")]
    names = built_in if told.recipes == "all" else told.recipes.split(",")
    counts = [int(text) for text in told.ranks.split(",")]
    cases = [Case(*case) for case in product(counts, told.workloads.split(","), names)]
    found = rows(cases, told.timeout, told.memory_gib, told.fresh)
    print(json.dumps(found if told.json else summary(found), indent=1))
    sys.exit(any(row["outcome"] in BAD for row in found))


if __name__ == "__main__":
    main()
