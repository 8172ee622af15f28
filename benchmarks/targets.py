"""Measures planning times and quality of the recipes against their targets, with 8K tokens per rank on one core.

Run: python benchmarks/targets.py [--only NAME,...] [--ranks 8,64,256,1024] [--large] [--seeds 0,1,2] [--repeats 5]

Writes all rows to benchmarks/results/targets.json and the tables between the markers of docs/benchmarks.md. Keeps rows
that are not measured again; `--only none` writes only the tables. `--large` adds 4,096 ranks. Skips recipes that are
not installed, with a message, and larger sizes once a plan takes longer than `--patience` seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from apportion.bench import BenchJob, Source, Times, cluster_of, timed_plan, timed_verify
from apportion.cli.environment import versions
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError, UnknownNameError
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe, Step
from apportion.ir.tensors import PHASES
from apportion.planner.recipe.recipes import find_recipe, with_block
from benchmarks.tables import ROOT, head, line, write_tables

RESULTS = ROOT / "benchmarks/results/targets.json"

RANKS, LARGE = (8, 64, 256, 1024), 4096
TOKENS = 8192
#: the promised size of the largest part
PART_KB, AUTO_PART_KB = 16, 64
#: smallest number of ranks -> promised ratio of verification time to planning time
VERIFY = {8: 0.8, 64: 0.6}


@dataclass(frozen=True)
class Promise:
    """A row of the tables; None or empty: measured without a promise.

    ms: ranks -> median planning time. compute: smallest number of ranks -> max/mean - 1 of compute; kv: likewise, KV
    bytes over their bound. over_bound: max/mean over `imbalance_bound`. tokens: max/mean - 1. slots: whether their
    number must equal the largest degree. node: at 1,024 ranks, how many times fewer bytes travel between nodes if the
    ranks of a node share tiles.
    """

    name: str
    recipe: Callable[[], Recipe]
    ms: Mapping[int, float]
    compute: Mapping[int, float] = field(default_factory=dict)
    over_bound: float | None = None
    tokens: float | None = None
    slots: bool = False
    kv: Mapping[int, float] = field(default_factory=dict)
    node: float | None = None
    part_kb: int = PART_KB
    tokens_per_rank: int = TOKENS
    ranks: tuple[int, ...] = ()


def _named(name: str) -> Callable[[], Recipe]:
    return lambda: find_recipe(name)


_PAPER_MS = {8: 1.2, 64: 6, 256: 22, 1024: 80, 4096: 400}
_MS = {8: 1.5, 64: 6, 256: 20, 1024: 80, 4096: 400}
_HEADS_MS = {8: 1.5, 64: 6, 256: 15, 1024: 60}
_RING_MS = {8: 2, 64: 40, 256: 200}
_AUTO_MS = {8: 40, 64: 90, 256: 250, 1024: 1000}
_KV = {8: 3.0, 64: 2.0, 256: 1.6}
_ROWS = (
    Promise(
        "fcp_paper 2K",
        lambda: with_block(find_recipe("fcp_paper"), 2048),
        _PAPER_MS,
        over_bound=1.03,
        tokens=0.02,
        slots=True,
    ),
    Promise("fcp", _named("fcp"), _MS, {8: 0.02, 64: 0.01}, tokens=0.02, part_kb=AUTO_PART_KB),
    Promise("blend", _named("blend"), _MS, {64: 0.02}, tokens=0.02, slots=True, kv=_KV, node=5.0),
    Promise("mixed", _named("mixed"), _MS, {8: 0.02, 64: 0.02}, tokens=0.02),
    Promise("distca", _named("distca"), _MS, {8: 0.05}, tokens=0.02),
    Promise("zeppelin", _named("zeppelin"), _MS),
    Promise("ulysses", _named("ulysses"), _HEADS_MS),
    Promise("upipe", _named("upipe"), _HEADS_MS),
    Promise("ring", _named("ring"), _RING_MS),
    Promise("usp", _named("usp"), _RING_MS),
    Promise("dcp", _named("dcp"), {32: 50}, tokens=0.02, tokens_per_rank=131072 // 32, ranks=(32,)),
    Promise("auto", _named("auto"), _AUTO_MS, {8: 0.02, 64: 0.01}, tokens=0.02, kv=_KV, part_kb=AUTO_PART_KB),
)
PROMISES = {row.name: row for row in _ROWS}


def promise_for(by_ranks: Mapping[int, float], ranks: int) -> float | None:
    """The promise for `ranks` ranks; each holds from its number of ranks up to the next."""
    rank_counts = [least for least in by_ranks if least <= ranks]
    return by_ranks[max(rank_counts)] if rank_counts else None


# --- measuring


@dataclass(frozen=True)
class Effort:
    """Extent of the measurement. patience: seconds per plan above which larger sizes are skipped."""

    ranks: tuple[int, ...]
    seeds: tuple[int, ...]
    repeats: int
    patience: float


def measure(promise: Promise, recipe: Recipe, effort: Effort) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of ranks and seed."""
    for ranks in promise.ranks or effort.ranks:
        for seed in effort.seeds:
            batch, _ = Source().batch(ranks * promise.tokens_per_rank, seed)
            job = BenchJob(batch, cluster_of(ranks), Model(), recipe, seed)
            try:
                row = _row(promise, job, effort)
            except ApportionError as error:
                row = {"refused": str(error).splitlines()[0]}
            yield {"name": promise.name, "ranks": ranks, "seed": seed} | row
            if row.get("planning_ms", {"p50": 0.0})["p50"] > effort.patience * 1e3:
                say(
                    f"{promise.name}: no more than {ranks} ranks, which take {row['planning_ms']['p50']:.0f} ms"
                )
                return


def _row(promise: Promise, job: BenchJob, effort: Effort) -> dict[str, Any]:
    plan, first, _ = timed_plan(job)  # warms the caches
    timed_verify(plan)
    repeats = effort.repeats if first < effort.patience * 1e3 else 1
    runs = [timed_plan(job) for _ in range(repeats)]
    plan, steps = runs[-1][0], {step: median(run[2][step] for run in runs) for step in runs[0][2]}
    checked = Times(tuple(timed_verify(plan) for _ in range(min(repeats, 3))))
    report = plan.report
    names = ("imbalance", "imbalance_bound", "slots", "max_degree", "rounds", "bytes", "bounds", "plan_bytes")
    return {
        "recipe": plan.request.policy.recipe.to_data(),
        "tokens": report["tokens"],
        "block_tokens": report["block_tokens"],
        "tasks": _tasks(plan),
        "planning_ms": Times(tuple(total for _, total, _ in runs), steps).summary(),
        "verify_ms": checked.summary(),
        **{key: report[key] for key in names},
        "inter_node_bytes_off_over_on": None if promise.node is None else _node_ratio(job),
    }


def _tasks(plan: Plan) -> int:
    lists = dict(zip(PHASES, ("tasks", "grads"), strict=True))
    return sum(len(program[lists[phase]]) for (_, phase), program in plan.programs.items())


def _node_ratio(job: BenchJob) -> float | None:
    """How many times more bytes travel between nodes if tiles go directly to all ranks that need them."""
    recipe, volumes = find_recipe(job.recipe), []
    for route in ("star", "node"):
        steps = [step for step in recipe if step.step != "route"]
        routed = Recipe(recipe.name, (*steps, Step("route", route, {})))
        volumes.append(timed_plan(replace(job, recipe=routed))[0].report["bytes"]["inter_node"])
    return volumes[0] / volumes[1] if volumes[1] else None


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# --- figures and promises


@dataclass(frozen=True)
class Figure:
    """A number and its promise: an upper limit, or with `least` a lower one; None: no promise."""

    value: float | None
    promise: float | None
    digits: int = 2
    least: bool = False

    @property
    def is_met(self) -> bool:
        if self.promise is None or self.value is None:
            return True
        excess = self.value - self.promise
        return (-excess if self.least else excess) <= 1e-9

    def __str__(self) -> str:
        """Formats the number, bold if the promise is broken."""
        text = "-" if self.value is None else f"{self.value:.{self.digits}f}"
        return text if self.is_met else f"**{text}**"


Rows = Sequence[Mapping[str, Any]]


def quality(promise: Promise, rows: Rows) -> dict[str, Figure]:
    """The worst figures over all seeds for one number of ranks."""
    ranks = rows[0]["ranks"]
    compute = max(row["imbalance"]["compute"] for row in rows)
    tokens = max(row["imbalance"]["tokens"] for row in rows)
    excess = max((1 + row["imbalance"]["compute"]) / row["imbalance_bound"] for row in rows)
    gaps = [gap for row in rows if (gap := row["bounds"]["kv_bytes"]["gap"])]
    shares = [row["slots"] / row["max_degree"] for row in rows if row["max_degree"]]
    node = [ratio for row in rows if (ratio := row["inter_node_bytes_off_over_on"])]
    part = max(row["plan_bytes"]["largest_rank"] for row in rows) / 1024  # KB
    slower = max(row["verify_ms"]["p50"] / row["planning_ms"]["p50"] for row in rows)
    return {
        "compute %": Figure(100 * compute, _percent(promise_for(promise.compute, ranks))),
        "max/mean over bound": Figure(excess, promise.over_bound, 3),
        "tokens %": Figure(100 * tokens, _percent(promise.tokens)),
        "slots / Δ": Figure(max(shares, default=None), 1.0 if promise.slots else None),
        "KV bytes over bound": Figure(max(gaps, default=None), promise_for(promise.kv, ranks)),
        "inter-node bytes, off / on": Figure(
            min(node, default=None), promise.node if ranks >= max(RANKS) else None, 1, least=True
        ),
        "largest part KB": Figure(part, promise.part_kb, 1),
        "verify / plan": Figure(slower, promise_for(VERIFY, ranks)),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


# --- the page


def tables(rows: Rows) -> dict[str, str]:
    """Marker -> Markdown table."""
    return {"targets-times": _times_table(rows), "targets-quality": _quality_table(rows)}


def _group(rows: Rows) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """(name, ranks) -> the rows of all seeds."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "refused" not in row:
            groups.setdefault((row["name"], row["ranks"]), []).append(row)
    return groups


def _times_table(rows: Rows) -> str:
    groups = _group(rows)
    columns = sorted({ranks for _, ranks in groups})
    lines = head(["ms", *map(str, columns)])
    for name in dict.fromkeys(name for name, _ in groups):
        cells = [_times_cell(PROMISES[name], ranks, groups.get((name, ranks), [])) for ranks in columns]
        lines.append(line([name, *cells]))
    return "\n".join(lines)


def _times_cell(promise: Promise, ranks: int, rows: Rows) -> str:
    """The times of planning and verification (each the median over seeds of medians), and the promise for planning."""
    goal = promise.ms.get(ranks)
    aim = "" if goal is None else f" ({goal:g})"
    if not rows:
        return f"-{aim}"
    plan, check = (median(row[key]["p50"] for row in rows) for key in ("planning_ms", "verify_ms"))
    return f"{Figure(plan, goal, 1)} / {check:.1f}{aim}"


def _quality_table(rows: Rows) -> str:
    lines: list[str] = []
    for (name, ranks), group in _group(rows).items():
        figures = quality(PROMISES[name], group)
        if not lines:
            lines = head(["recipe", "ranks", *figures])
        lines.append(line([name, str(ranks), *map(str, figures.values())]))
    refused = {(row["name"], row["ranks"]): row["refused"] for row in rows if "refused" in row}
    return "\n".join(
        [*lines, *(f"\n{name}, {ranks} ranks: {reason}" for (name, ranks), reason in refused.items())]
    )


# --- the command


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="names of rows, separated by commas; none writes only the tables")
    parser.add_argument("--ranks", type=_numbers, default=RANKS)
    parser.add_argument("--large", action="store_true", help=f"also measure {LARGE} ranks")
    parser.add_argument("--seeds", type=_numbers, default=(0, 1, 2))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--patience", type=float, default=2.0, help="seconds per plan; skip larger sizes above it"
    )
    parser.add_argument("--json", action="store_true", help="print the rows, write nothing")
    options = parser.parse_args()
    options.names = [name for name in (options.only or ",".join(PROMISES)).split(",") if name != "none"]
    if unknown := [name for name in options.names if name not in PROMISES]:
        parser.error(f"no row {', '.join(unknown)}: rows are {', '.join(PROMISES)}")
    return options


def measure_all(names: Sequence[str], effort: Effort) -> Iterator[dict[str, Any]]:
    """Yields the rows of the known recipes; progress goes to stderr."""
    for name in names:
        try:
            recipe = PROMISES[name].recipe()
        except UnknownNameError:
            say(f"{name}: unknown recipe")
            continue
        for row in measure(PROMISES[name], recipe, effort):
            time = f"{row['planning_ms']['p50']:.1f} ms" if "planning_ms" in row else row["refused"]
            say(f"{name}, {row['ranks']} ranks, seed {row['seed']}: {time}")
            yield row


def merge(old_rows: Rows, new_rows: Rows) -> list[Mapping[str, Any]]:
    """All rows in the order of the tables, with new rows replacing old ones."""
    names = list(PROMISES)
    combined = [row for row in (*old_rows, *new_rows) if row["name"] in names]
    rows = {(names.index(row["name"]), row["ranks"], row["seed"]): row for row in combined}
    return [rows[key] for key in sorted(rows)]


def main() -> None:
    options = _arguments()
    ranks = (*options.ranks, LARGE) if options.large and LARGE not in options.ranks else options.ranks
    effort = Effort(ranks, options.seeds, options.repeats, options.patience)
    new_rows = list(measure_all(options.names, effort))
    if options.json:
        print(json.dumps(new_rows, indent=1))
        return
    rows = merge(json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else [], new_rows)
    RESULTS.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    write_tables(tables(rows))
    print(f"rows are in {RESULTS}")


if __name__ == "__main__":
    main()
