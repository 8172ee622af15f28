"""Human-readable figures of a plan: names and values, with units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.plan.tables import PlanTables
from apportion.ir.plan.totals import work

Record = Mapping[str, Any]


def human_bytes(count: float) -> str:
    """Formats bytes in powers of 1000, such as `1.50 GB`."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def plan_rows(record: Record) -> list[tuple[str, str]]:
    """Rows of a plan's summary, from its record (fields of `bench.Row.record`)."""
    volume, sizes, imbalance = record["bytes"], record["plan_bytes"], record["imbalance"]
    rows = [
        ("ranks, tokens", f"{record['ranks']} ranks, {record['tokens']:,} tokens"),
        ("block", f"{record['block_tokens']:,} tokens, {_heaviest(record)}"),
        (
            "imbalance",
            f"compute {percent(imbalance['compute'])}, tokens {percent(imbalance['tokens'])} (max/mean - 1)",
        ),
        (
            "imbalance bound",
            f"compute {percent(record['imbalance_bound'] - 1)} (lower bound for this recipe's unsplit pieces)",
        ),
        (
            "bytes moved",
            f"{human_bytes(volume['total'])} per layer of each kind, {human_bytes(volume['inter_node'])} between nodes",
        ),
        ("busiest rank", f"{human_bytes(volume['max_rank'])}"),
        ("bytes bound", _bytes_bound(record)),
        ("slots", f"{record['slots']}, at least {record['max_degree']} needed; in {record['rounds']} rounds"),
        (
            "plan size",
            f"{human_bytes(sizes['total'])} uncompressed, at most {human_bytes(sizes['largest_rank'])} per rank",
        ),
    ]
    return rows + _departure_rows(record) + _search_rows(record) + _time_rows(record)


def _bytes_bound(record: Record) -> str:
    limit = record["bounds"]["kv_bytes"]
    if limit["gap"] is None:
        return f"none for this batch: {limit['void']}" if limit.get("void") else "none for this batch"
    return f"{human_bytes(limit['bound'])} of KV with queries at home; {human_bytes(limit['value'])} moved"


def _heaviest(record: Record) -> str:
    return f"heaviest piece {record['heaviest_piece_over_mean']:.3f} of the mean load"


def _departure_rows(record: Record) -> list[tuple[str, str]]:
    """Rows for departures of passes from the request."""
    return [("instead", departure(entry)) for entry in record.get("departures", ())]


def departure(entry: Record) -> str:
    """Describes a departure from the request, an entry of a report's `departures`."""
    return f"{entry['field']}: {entry['used']} instead of {entry['asked']}, because {entry['why']}"


def _search_rows(record: Record) -> list[tuple[str, str]]:
    if "search" not in record:
        return []
    search = record["search"]
    outcome = f"stopped by its {search['stopped']} limit" if search["stopped"] else "search space exhausted"
    gap_text = f"{percent(search['gap'])} above the lower bound of {search['ideal_ms']:.3f} ms"
    return [
        ("search", f"{search['recipe']['name']} is the best of {search['steps']} tried ({outcome})"),
        ("gap", f"{search['ms']:.3f} ms per layer, {gap_text}"),
    ]


def _time_rows(record: Record) -> list[tuple[str, str]]:
    if "planning_ms" not in record:
        return []
    planning_ms, verify_ms = record["planning_ms"]["p50"], record["verify_ms"]["p50"]
    return [("time", f"planned in {planning_ms:.1f} ms, verified in {verify_ms:.1f} ms")]


def loads(plan: PlanTables) -> Floats:
    """float64 [ranks]: (query, key) pairs that each rank computes forward, or keys chosen by its queries, summed over
    heads and all layers."""
    model, total = plan.request.model, np.zeros(plan.header.ranks)
    for kind in plan.header.kinds:
        total += model.layers_of(kind) * work(plan, kind)
    return total


def tokens(plan: PlanTables) -> Ints:
    """int64 [ranks]: tokens per rank, in the attention layout if the plan has one."""
    name = "attention" if "attention" in plan.layouts else plan.header.home_layout
    return np.asarray(plan.layout(name).rows_per_rank, np.int64)
