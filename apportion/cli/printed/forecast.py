"""Printed output of `apportion forecast`: a table, the parts of a step, and the gain in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from apportion.cli.output import WIDTH, count
from apportion.cli.printed.tables import table

Record = Mapping[str, Any]

BAR = 56  # characters of the bar of the longest step
#: part of a step -> its letter in the bar
LETTERS = {
    "attention": "A",
    "recurrent": "R",
    "linear": "L",
    "experts": "E",
    "rows": "r",
    "remap": "m",
    "head": "H",
    "recomputation": "c",
    "tensor_parallel": "t",
    "data_parallel": "d",
    "all_to_all": "x",
    "host": "h",
    "optimizer": "o",
    "bubble": ".",
}


def views(record: Record, wide: bool) -> tuple[Callable[[], RenderableType], ...]:
    """The parts of the output: a headline, the table, bars, the saving, and the reasons for refused rows."""
    rows = _visible_rows(record, wide)
    return (
        lambda: _headline(record),
        lambda: _table(rows, record["baseline"]),
        lambda: _bars(rows),
        lambda: _saving(record),
        lambda: _experts(record),
        lambda: "\n".join(_remarks(record["rows"], record["refused_baseline"])),
    )


def _visible_rows(record: Record, wide: bool) -> list[Record]:
    """The planned rows, fastest first; of a recipe's static grids only the fastest that fits, unless `wide`."""
    ordered = sorted(
        (row for row in record["rows"] if row["status"] != "refused"),
        key=lambda row: float(row["step_s"]["value"]),
    )
    if wide:
        return ordered
    visible, keys = [], set()
    for row in ordered:
        form = row["parallelism"]
        key = (form["recipe"], form["context"] is None, form["context"] is None and row["name"])
        is_baseline = row["name"] == record["baseline"]
        if is_baseline or (key not in keys and (form["context"] is None or row["status"] == "ok")):
            keys.add(key)
            visible.append(row)
    return visible


def _headline(record: Record) -> str:
    cluster, training = record["cluster"], record["training"]
    ranks = cluster["nodes"] * cluster["ranks_per_node"]
    refused = record["refused_baseline"]
    baseline = record["baseline"] or (f"{refused} (refused)" if refused else "none")
    kernels, grids = (record[field]["name"] for field in ("hardware", "grid_hardware"))
    kernels += f" (static grids: {grids})" if grids != kernels else ""
    return (
        f"{ranks} ranks, {count(record['batches'], 'step')} of {record['tokens']:,} tokens ({record['workload']}), "
        f"hardware {kernels},\n{training['sharding']}, recomputation {training['recompute']}, "
        f"baseline {baseline}\n"
    )


def _table(rows: Sequence[Record], baseline: str | None) -> Table:
    """The table, with the range of the gain, not of the step; `pairs kept` only if some row drops pairs."""
    drops = any(row["pairs_kept"] < 0.995 for row in rows)
    figures = ("step s", "tokens/s\n/GPU", "MFU", "GiB", "atten-\ntion")
    titles = ("parallelism", *figures, *(["pairs\nkept"] if drops else []), "speed-up\n(range)")
    return table(titles, (_cells(row, baseline, drops) for row in rows), ("parallelism",))


def _cells(row: Record, baseline: str | None, drops: bool) -> list[str]:
    gain, memory = row["gain"], row["memory_gib"]
    return [
        row["name"] + (" *" if row["name"] == baseline else ""),
        f"{row['step_s']['value']:.2f}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        f"{100 * row['mfu']:.1f} %",
        f"{memory['total']:.1f}" + ("" if memory["fits"] else " !"),
        f"{100 * row['shares']['attention']:.0f} %",
        *([f"{100 * row['pairs_kept']:.0f} %"] if drops else []),
        "-" if gain is None else f"{gain['value']:.2f} ({gain['low']:.2f}-{gain['high']:.2f})",
    ]


def _bars(rows: Sequence[Record]) -> str:
    """A bar for each step, as long as the step, with a letter for each part."""
    if not rows:
        return ""
    longest = max(row["step_s"]["value"] for row in rows)
    width = max(len(row["name"]) for row in rows)
    lines = ["", "where the time of a step goes:"]
    for row in rows:
        bar, total = "", 0.0
        for name, letter in LETTERS.items():
            total += row["parts_s"][name]
            bar += letter * (round(BAR * total / longest) - len(bar))
        lines.append(f"{row['name']:<{width}} {bar}")
    names = [name for name in LETTERS if any(row["parts_s"][name] > 0 for row in rows)]
    legend = ", ".join(f"{LETTERS[name]} {name.replace('_', ' ')}" for name in names)
    return "\n".join([*lines, *wrap(legend, WIDTH)])


def _saving(record: Record) -> str:
    rows = {row["name"]: row for row in record["rows"]}
    best, base = rows.get(record["best"]), rows.get(record["baseline"])
    if best is None and all(row["status"] == "refused" for row in record["rows"]):
        return "\nnothing was planned: every row was refused, for the reasons below"
    if best is None and any(row["status"] == "ok" for row in record["rows"]):
        return "\nnothing is proposed: the grids that fit cut sequences and drop pairs; use larger groups, or --recipes"
    if best is None:
        return "\nnothing fits: try more ranks, --training '{recompute: full}' or fewer tokens per rank"
    if base is None or best is base:
        return f"\nfastest that fits: {best['name']}, {best['step_s']['value']:.2f} s per step"
    gain, hours = best["gain"], best["saved_gpu_hours_a_week"]
    changes = {name: base["parts_s"][name] - best["parts_s"][name] for name in best["parts_s"]}
    largest = sorted(
        (name for name in changes if abs(changes[name]) >= 0.005), key=lambda name: -abs(changes[name])
    )
    explanation = (
        ", ".join(f"{name.replace('_', ' ')} {-changes[name]:+.2f} s" for name in largest[:3])
        or "nothing in particular"
    )
    steps = ", ".join(f"{ratio:.2f}" for ratio in gain["steps"])
    return (
        f"\nfastest that fits: {best['name']}, {gain['value']:.2f} times as fast as {base['name']} (range "
        f"{gain['low']:.2f} to {gain['high']:.2f}; of each step: {steps});\n"
        f"{hours:,.0f} GPU-hours saved per week of training: {explanation}"
    )


def _experts(record: Record) -> str:
    """Counts of parameters, and rows per expert under the proposed parallelism, or else under the first planned one."""
    experts, params = record["training"]["experts"], record["parameters"]
    row = next((row for row in record["rows"] if row["name"] == record["best"]), None)
    row = row or next((row for row in record["rows"] if row["status"] != "refused"), None)
    if not experts["count"] or row is None:
        return ""
    rows = row["experts"]
    assumption = f"imbalance {experts['imbalance']:g} assumed, "
    capacity = (
        f"padded to {experts['capacity']:g} times an even share of the fullest rank's tokens"
        if experts["capacity"]
        else f"{assumption}dropless: uneven tokens change the rows that ranks send, not those that experts compute"
    )
    text = (
        f"{params['total'] / 1e9:.1f}B parameters, {params['active'] / 1e9:.1f}B active per token; {row['name']}: an "
        f"expert gets {rows['mean']:,.0f} rows per microbatch on average, the fullest rank's experts get "
        f"{rows['received']:,.0f}; the rank with the most tokens has {100 * (rows['uneven'] - 1):.1f} % more than "
        f"the mean ({capacity})"
    )
    return "\n".join(["", *wrap(text, WIDTH)])


def _remarks(rows: Sequence[Record], baseline: str | None) -> list[str]:
    """A line for each refusal of a recipe and of the named baseline; the number of other refused static grids."""
    refused = [row for row in rows if row["status"] == "refused"]
    refused_plans = [
        row for row in refused if row["parallelism"]["context"] is None or row["name"] == baseline
    ]
    remarks = [f"{row['name']}: {row['reason']}" for row in refused_plans]
    if len(refused) > len(refused_plans):
        remarks.append(
            f"{count(len(refused) - len(refused_plans), 'static grid')} refused; see --json for the reasons"
        )
    if any(row["status"] == "too large" for row in rows):
        remarks.append("! exceeds the memory of a rank")
    return ["", *remarks] if remarks else []
