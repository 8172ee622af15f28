"""Checks planning cost against ceilings in CI: function calls, table rows and plan bytes.

Run: python -m tests.checks.ceilings [--only NAME,...] [--json] [--update]

Plans log-normal documents of seed 0 (docs/benchmarks.md), 32K tokens per rank on 8 and 64 ranks. Each row is compared
with its ceiling in tests/data/ceilings.json; the exit code is 1 if one is exceeded. Calls exclude compiled loops and
depend on Python and numpy: they are compared only under the versions that the ceilings name, and may exceed them by 2 %
and ten calls.
`--update` writes the measured values as new ceilings; the commit message must state why.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apportion import Model, verify
from apportion.bench import BenchJob, Source, cluster_of, count_calls, plan_unverified
from apportion.planner.recipe.recipes import find_recipe, with_block

RESULTS = Path(__file__).resolve().parents[1] / "data/ceilings.json"
RECIPES = ("fcp_paper", "fcp", "blend", "distca", "dcp", "zeppelin", "mixed", "ulysses", "upipe", "ring")
RANKS, TOKENS = (8, 64), 32768
#: tolerance of calls, relative and absolute, since libraries change between patch releases
SLACK, FEW = 1.02, 10


def versions() -> dict[str, str]:
    """The versions on which calls depend."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "numpy": np.__version__}


def measure(names: Sequence[str] = RECIPES, ranks: Sequence[int] = RANKS) -> Iterator[dict[str, Any]]:
    """Yields a row per recipe and number of ranks; `calls` are by step."""
    for name in names:
        recipe = with_block(find_recipe(name), 2048) if name == "fcp_paper" else find_recipe(name)
        for count in ranks:
            model = Model(q_heads=32, kv_heads=8, head_dim=128, layers=1)
            job = BenchJob(Source().batch(count * TOKENS, 0)[0], cluster_of(count), model, recipe)
            plan = plan_unverified(job)
            verify(plan)  # so that imports are not counted below
            tables = (table for programs in plan.programs.values() for table in programs.tables.values())
            yield {
                "recipe": name,
                "ranks": count,
                "rows": sum(map(len, tables)),
                "bytes": int(plan.report["plan_bytes"]["total"]),
                "calls": count_calls(job),
            }


def excesses_of(row: Mapping[str, Any], ceiling: Mapping[str, Any], same_versions: bool) -> Iterator[str]:
    """Yields descriptions of a row's values that exceed their ceilings."""
    for name in ("rows", "bytes"):
        if row[name] > ceiling[name]:
            yield f"{name} {row[name]:,}, at most {ceiling[name]:,}"
    if same_versions:
        for step, calls in row["calls"].items():
            most = ceiling["calls"].get(step, 0)
            if calls > most * SLACK + FEW:
                yield f"{step} calls {calls:,} functions, at most {most:,}"


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", default="", help="only these recipes, as in fcp,ring")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--update", action="store_true", help="write the measurements as the new ceilings")
    options = parser.parse_args()
    names = tuple(options.only.split(",")) if options.only else RECIPES
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": None, "rows": []}
    ceilings = {(row["recipe"], row["ranks"]): row for row in stored["rows"]}
    rows, excesses = [], []
    for row in measure(names):
        rows.append(row)
        key = row["recipe"], row["ranks"]
        ceiling = ceilings.get(key)
        same = stored["versions"] == versions()
        problems = ["no ceiling"] if ceiling is None else excesses_of(row, ceiling, same)
        excesses += [f"{row['recipe']} on {row['ranks']} ranks: {what}" for what in problems]
        ceilings[key] = row
        if not options.json:
            sizes = f"{row['recipe']:10} {row['ranks']:3} rows {row['rows']:8,} bytes {row['bytes']:10,}"
            print(f"{sizes}  ", *(f"{step} {calls:,}" for step, calls in row["calls"].items()))
    if options.json:
        print(json.dumps({"versions": versions(), "rows": rows}, indent=1))
    if options.update:
        data = {"versions": versions(), "rows": list(ceilings.values())}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        return 0
    for line in excesses:
        print(f"{line}; make it cheaper, or use `--update` and say why in the commit", file=sys.stderr)
    return bool(excesses)


if __name__ == "__main__":
    sys.exit(main())
