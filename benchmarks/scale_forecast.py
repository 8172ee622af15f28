"""Scale on paper: steps on 1,024 to 65,536 GPUs forecast, and what planning, wire, service and memory are beside them.

Run: python -m benchmarks.scale_forecast [--gpus 1024,4096,16384,65536] [--steps] [--json]. Llama-3-70B, 4K tokens a
GPU and step, log-normal documents, eight GPUs a node. Steps are forecast; plans are made, verified and encoded here,
on one core; what is planned for fewer ranks and extrapolated has a star. Writes
benchmarks/results/scale_forecast.json and the tables of docs/forecast.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import apportion as ap
from apportion.bench import Source, cluster_of, warm_up
from apportion.cli.environment import versions
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.forecast.parallelism import Degrees, Parallelism
from apportion.planner.recipe.recipes import find_recipe, with_block, with_pods

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/scale_forecast.json", ROOT / "docs/forecast.md"
GPUS = (1024, 4096, 16384, 65536)
H100 = Hardware.load("h100")
MODEL = Model(64, 8, 128, hidden=8192, ffn=28672, layers=80)
TRAINING = ap.Training(recompute="full")
#: tokens of a step, a GPU
TOKENS = 4096
POD = 1024
#: tried: tensor parallel in a node, with and without pipeline stages
LAYOUTS = (Degrees(8, 1), Degrees(8, 4))
#: most planner ranks that are planned here; beyond, time and bytes grow with the ranks
MOST_PLANNED, MOST_AUTO = 16384, 256
LOOKAHEAD = 8  # iterations: trainer/loading/loader.py
#: docs/performance.md, "Serving": CPU of the server for a frame of up to 13 KB
FRAME_US, FRAME_BYTES = 101.0, 13_000


def recipe(name: str) -> Recipe:
    """`auto` searches, and plans all ranks at once; others plan pods of documents, `fcp_paper` in blocks of 2,048."""
    found = find_recipe(name)
    if name == "auto":
        return found
    return with_pods(with_block(found, 2048) if name == "fcp_paper" else found, POD)


def batch_of(tokens: int) -> Batch:
    return Source(None).batch(tokens, 0)[0]


def step_of(gpus: int) -> dict[str, Any]:
    """The fastest layout that fits, its step and parts in seconds."""
    forms = [Parallelism(recipe("fcp_paper"), degrees) for degrees in LAYOUTS]
    found = ap.forecast(
        [batch_of(gpus * TOKENS)], cluster_of(gpus, 8, H100), MODEL, forms, TRAINING, hardware=H100
    ).record()
    row = next((one for one in found["rows"] if one["name"] == found["best"]), None)
    if row is None:
        raise SystemExit(f"{gpus} GPUs: nothing fits: {found['rows']}")
    kept = {name: row[name] for name in ("name", "parallelism", "step_s", "parts_s", "mfu")}
    others = {one["name"]: one.get("step_s", one["reason"]) for one in found["rows"] if one is not row}
    return {**kept, "memory_gib": row["memory_gib"]["total"], "others": others}


def planned(form: Parallelism, gpus: int, tokens: int) -> dict[str, Any]:
    """One plan of a microbatch of so many tokens, the better of two: processor time, and bytes."""
    cluster, model, found = form.stage(cluster_of(gpus, 8, H100)), form.rank_model(MODEL), []
    for _ in range(2):
        batch, started = batch_of(tokens), time.process_time()
        made = ap.plan(batch, cluster, model, recipe=form.recipe, hardware=H100, verify=False)
        planning = time.process_time() - started
        ap.verify(made)
        verify = time.process_time() - started - planning
        sizes = made.report["plan_bytes"]
        found.append((planning, verify, sizes["total"], sizes["largest_rank"]))
    planning, verify, total, largest = min(found)
    return {
        "planning_s": planning,
        "verify_s": verify,
        "bytes": total,
        "largest_part": largest,
        "measured": True,
    }


def plan_of(name: str, degrees: Degrees, gpus: int, most: int) -> dict[str, Any]:
    """The plan of a microbatch on so many GPUs; above `most` planner ranks that of fewer GPUs, times the ratio."""
    form = Parallelism(recipe(name), degrees)
    ranks, tokens = gpus // (degrees.tensor * degrees.pipeline), gpus * TOKENS // form.steps()
    times = max(1, ranks // most)
    found = planned(form, gpus // times, tokens // times)
    grown = {key: found[key] * times for key in ("planning_s", "verify_s", "bytes")}
    return {**found, **grown, "ranks": ranks, "plans": form.steps(), "measured": times == 1}


def demands(plan: Mapping[str, Any], gpus: int, step_s: float) -> dict[str, float]:
    """What a plan for every microbatch of every step asks for. processes: planners that keep up with the trainer;
    of_step: one plan over a step; frames: a second, one a GPU and plan, and the server's cores for them at the measured
    CPU; gb_s: what the server sends; rank_mb, service_gb: encoded plans of the lookahead."""
    plans, copies = plan["plans"], gpus / plan["ranks"]
    frames = gpus * plans / step_s
    sizes = max(1.0, plan["bytes"] / plan["ranks"] / FRAME_BYTES)
    return {
        "processes": plans * (plan["planning_s"] + plan["verify_s"]) / step_s,
        "of_step": (plan["planning_s"] + plan["verify_s"]) / step_s,
        "frames_s": frames,
        "server_cores": frames * FRAME_US * sizes / 1e6,
        "gb_s": plan["bytes"] * copies * plans / step_s / 1e9,
        "rank_mb": LOOKAHEAD * plans * plan["largest_part"] / 1e6,
        "service_gb": LOOKAHEAD * plans * plan["bytes"] / 1e9,
    }


def kept_rows() -> Iterator[dict[str, Any]]:
    """The rows of the last run with their steps forecast anew; plans and their times stay."""
    for row in json.loads(RESULTS.read_text())["rows"]:
        step = step_of(row["gpus"])
        plans = {
            name: plan | demands(plan, row["gpus"], step["step_s"]["value"])
            for name, plan in row["plans"].items()
        }
        yield {**row, "step": step, "plans": plans}


def rows(gpus: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One record a number of GPUs: the step, plans for its layout, by `auto` too, and one of a planner rank a GPU."""
    for count in gpus:
        step = step_of(count)
        form = step["parallelism"]
        degrees = Degrees(form["tensor"], form["pipeline"])
        asked = {
            "fcp_paper 2K": ("fcp_paper", degrees, count, MOST_PLANNED),
            "auto": ("auto", degrees, count, MOST_AUTO),
            "fcp_paper 2K, TP 1": ("fcp_paper", Degrees(), count, MOST_PLANNED),
        }
        plans = {name: plan_of(*told) for name, told in asked.items()}
        step_s = step["step_s"]["value"]
        told_plans = {name: plan | demands(plan, count, step_s) for name, plan in plans.items()}
        yield {"gpus": count, "step": step, "plans": told_plans}


def steps_table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| GPUs | layout | step s (low-high) | MFU | GiB | attention s | other parts above 1 %, s |"
    yield "|--:|---|--:|--:|--:|--:|---|"
    for row in found:
        step, seconds = row["step"], row["step"]["step_s"]
        parts = {name: part for name, part in step["parts_s"].items() if name != "attention"}
        told = sorted(
            (name for name in parts if parts[name] > 0.01 * seconds["value"]), key=lambda x: -parts[x]
        )
        others = ", ".join(f"{name.replace('_', ' ')} {parts[name]:.2f}" for name in told)
        value = f"{seconds['value']:.2f} ({seconds['low']:.2f}-{seconds['high']:.2f})"
        size = f"{100 * step['mfu']:.1f} % | {step['memory_gib']:.1f} | {step['parts_s']['attention']:.2f}"
        yield f"| {row['gpus']:,} | {step['name']} | {value} | {size} | {others} |"


def plans_table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| GPUs | plan | ranks x plans | planning + verification s | of a step | processes | KB a rank | MB a plan | "
        "frames/s | server cores | GB/s | lookahead: MB a rank, GB in the service |"
    )
    yield "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in found:
        for name, plan in row["plans"].items():
            times = f"{plan['planning_s']:.2f} + {plan['verify_s']:.2f}"
            cells = (
                f"{row['gpus']:,}",
                name if plan["measured"] else f"{name} *",
                f"{plan['ranks']:,} x {plan['plans']}",
                times,
                f"{100 * plan['of_step']:.1f} %",
                _marked(plan["processes"], 1, ".2f"),
                f"{plan['largest_part'] / 1e3:.1f}",
                f"{plan['bytes'] / 1e6:.2f}",
                f"{plan['frames_s']:,.0f}",
                _marked(plan["server_cores"], 1, ".2f"),
                f"{plan['gb_s']:.3f}",
                f"{plan['rank_mb']:.2f}, {plan['service_gb']:.3f}",
            )
            yield f"| {' | '.join(cells)} |"


def _marked(value: float, small: float, form: str) -> str:
    """Bold where it is no longer small."""
    return f"**{value:{form}}**" if value > small else f"{value:{form}}"


def write_tables(found: Sequence[Mapping[str, Any]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("scale-steps", steps_table(found)), ("scale-plans", plans_table(found))):
        marker, table = f"<!-- table: {name} -->\n", "\n".join(lines)
        pattern = re.escape(marker) + r".*?<!-- end -->"
        held = f"{marker}{table}\n<!-- end -->"
        text = re.sub(pattern, lambda _, held=held: held, text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--steps", action="store_true", help="steps alone: plans stay as they were measured")
    parser.add_argument("--json", action="store_true", help="print the whole record")
    told = parser.parse_args()
    for name in ("fcp_paper", "auto"):
        warm_up(recipe(name))
    found = []
    for row in kept_rows() if told.steps else rows([int(text) for text in told.gpus.split(",")]):
        found.append(row)
        print(f"{row['gpus']:,} GPUs: {row['step']['step_s']['value']:.2f} s", file=sys.stderr, flush=True)
    record = {"versions": versions(), "date": date.today().isoformat(), "rows": found}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write_tables(found)
    print(
        json.dumps(record, indent=1)
        if told.json
        else "\n".join((*steps_table(found), "", *plans_table(found)))
    )


if __name__ == "__main__":
    main()
