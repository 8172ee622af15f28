"""What executing costs the host: launches and milliseconds of a rank, every recipe, 32K tokens a rank, one core.

Run: python -m benchmarks.execution [--only NAME,...] [--ranks 8,64] [--repeats 30] [--seed 0] [--json]

Writes all rows to benchmarks/results/execution.json and the table between the markers of docs/performance.md; rows that
are not measured anew are kept, and `--only none` writes the table alone. A recorder stands in the place of the device.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from apportion.bench import BenchJob, Source, cluster_of, planned
from apportion.cli.environment import machine, versions
from apportion.ir.errors import ApportionError
from apportion.ir.request.model import Model
from apportion.planner.recipe.recipes import entries
from apportion.trainer.measure.bench import Bench, on_host
from apportion.trainer.step.attention import Communicator
from benchmarks.targets import ROOT, TOKENS, Figure, Rows, line, promised, say, write_tables

RESULTS = ROOT / "benchmarks/results/execution.json"
RANKS = (8, 64)
#: launches of a layer over its instructions
LAUNCHES = 1.5
_EVERY = {8: 0.3, 64: 0.6}
#: recipe -> ranks from which on it holds -> host ms of a phase
HOST_MS = {**dict.fromkeys(("fcp", "blend", "auto", "distca"), _EVERY), "ring": {64: 4.0}}


# --- measuring


def measure(recipe: str, ranks: int, repeats: int, seed: int = 0, tokens: int = TOKENS) -> dict[str, Any]:
    """Both phases of one plan, or why there are none. tokens: of a rank."""
    skipped: list[str] = []
    bench = Bench(torch.device("cpu"), Communicator(), on_host, ("stage",), repeats, skipped.append)
    batch, _ = Source().batch(ranks * tokens, seed)
    named = {"recipe": recipe, "ranks": ranks, "seed": seed}
    try:
        found = bench.measure(planned(BenchJob(batch, cluster_of(ranks), Model(), recipe, seed)))
    except ApportionError as error:
        return named | {"refused": str(error).splitlines()[0]}
    except RuntimeError as error:
        wanted = re.search(r"tried to allocate (\d+) bytes", str(error))
        if wanted is None:
            raise
        size = int(wanted[1]) / 2**30
        return named | {"refused": f"a rank's arenas take {size:.0f} GiB, more than the machine has"}
    if not found:
        return named | {"refused": skipped[0]}
    return named | {row.phase: row.record() for row in found}


def measured(names: Sequence[str], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each recipe and rank count; progress goes to stderr."""
    for name in names:
        for ranks in given.ranks:
            row = measure(name, ranks, given.repeats, given.seed)
            say(f"{name}, {ranks} ranks: {row.get('refused') or ' '.join(map(str, figures(row).values()))}")
            yield row


def merged(held: Rows, fresh: Rows) -> list[Mapping[str, Any]]:
    """All rows, the fresh ones in the place of older ones, in the order of the recipes."""
    names = list(entries())
    rows = {(names.index(row["recipe"]), row["ranks"]): row for row in (*held, *fresh)}
    return [rows[key] for key in sorted(rows)]


# --- the page


def figures(row: Mapping[str, Any]) -> dict[str, Figure]:
    """Of forward and backward, together where the title does not say."""
    both = row["forward"], row["backward"]
    counts = {name: sum(phase[name] for phase in both) for name in ("instructions", "launches", "messages")}
    wanted = promised(HOST_MS.get(row["recipe"], {}), row["ranks"])
    return {
        **{name: Figure(count, None, 0) for name, count in counts.items()},
        "launches / instructions": Figure(counts["launches"] / counts["instructions"], LAUNCHES),
        "forward, host ms": Figure(both[0]["host_ms"], wanted, 3),
        "backward, host ms": Figure(both[1]["host_ms"], wanted, 3),
        "promised": Figure(wanted, None, 1),
        "prepare ms": Figure(sum(phase["prepare_ms"] for phase in both), None, 1),
    }


def table(rows: Rows) -> str:
    """A line for each plan, and below why there is none."""
    lines: list[str] = []
    for row in rows:
        if "refused" not in row:
            cells = figures(row)
            if not lines:
                lines = [line(["recipe", "ranks", *cells]), line(["---", *["--:"] * (1 + len(cells))])]
            lines.append(line([row["recipe"], str(row["ranks"]), *map(str, cells.values())]))
    refused = [
        f"\n{row['recipe']}, {row['ranks']} ranks: {row['refused']}" for row in rows if "refused" in row
    ]
    return "\n".join([*lines, *refused])


# --- the command


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="recipes, separated by commas; none writes the table alone")
    parser.add_argument("--ranks", type=_numbers, default=RANKS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows, write nothing")
    given = parser.parse_args()
    known = list(entries())
    given.names = [name for name in (given.only or ",".join(known)).split(",") if name != "none"]
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no recipe {', '.join(unknown)}: there is {', '.join(known)}")
    return given


def main() -> None:
    given = _arguments()
    fresh = list(measured(given.names, given))
    if given.json:
        print(json.dumps(fresh, indent=1))
        return
    rows = merged(json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else [], fresh)
    record = {"machine": machine(), "versions": versions(), "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write_tables({"execution": table(rows)})


if __name__ == "__main__":
    main()
