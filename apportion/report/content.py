"""Data of a page about one plan: figures with their bounds, per-rank columns, runs, documents, the search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError
from apportion.ir.plan import summary
from apportion.ir.plan.plain import request_data
from apportion.ir.tensors import Tensor
from apportion.planner.simulate import Simulation
from apportion.report.columns import pack
from apportion.report.mask import Pieces, columns, pieces
from apportion.report.timeline import run_data

#: bounds of a report: title and unit
_BOUNDS = {
    "makespan": ("pairs of the busiest rank", "pairs"),
    "slots": ("slots", "count"),
    "kv_bytes": ("bytes of KV, queries at home", "bytes"),
}


def plan_data(simulation: Simulation, name: str, masks: bool = True) -> dict[str, Any]:
    """Plain data of one simulated plan. name: the file or recipe. masks: True to include the pieces of each rank.
    Raises VerifyError for a plan that cannot run."""
    plan, cluster = simulation.plan, simulation.cluster
    runs = [run_data(run, cluster.ranks_per_node) for run in simulation.runs.values()]
    if masks:
        for run, mask in zip(runs, _masks(plan, list(simulation.runs)), strict=True):
            run["mask"] = mask
    return {
        "name": name,
        "id": plan.id.hex(),
        "recipe": plan.header.recipe,
        "hardware": simulation.hardware,
        "ranks": plan.header.ranks,
        "ranks_per_node": cluster.ranks_per_node,
        "summary": [*summary.plan_rows(plan.report), _time_imbalance(simulation)],
        "figures": list(_figures(simulation)),
        "lost_ms": simulation.lost_ms,
        "verdict": verdict(simulation),
        "of_ranks": pack(_rank_columns(simulation)),
        "documents": pack(
            {
                "start": plan.request.batch.starts[: len(plan.request.batch.lengths)],
                "length": plan.request.batch.lengths,
            }
        ),
        "head_sets": len(plan.header.head_sets),
        "runs": runs,
        "search": plan.report.get("search"),
        "model": request_data(plan.request)["model"],
    }


#: the main causes of a plan's time beyond balanced work, and what to try against each
_REMEDIES = {
    "inherent": (
        "short and sparse documents, which kernels process slowly",
        "other kernels, since no plan changes that",
    ),
    "cutting": ("documents cut into pieces", "larger blocks"),
    "launches": ("kernel launches", "larger blocks, or more tokens per rank"),
    "rows": ("work on rows, which are packed and added up", "a recipe that moves less"),
    "imbalance": ("uneven work", "smaller blocks, --block"),
    "contention": ("transfers that slow kernels down", "a recipe that moves less"),
    "stalls": ("waiting for transfers", "more tokens per rank"),
}
GOOD_SHARE = 0.85  # if balanced work takes this share of the time or more, there is little to gain


def verdict(simulation: Simulation) -> list[str]:
    """A sentence that rates the plan and suggests what to try next."""
    times = f"{simulation.forward_ms:.2f} ms forward and {simulation.backward_ms:.2f} ms backward"
    share = simulation.efficiency
    losses = {name: ms for name, ms in simulation.lost_ms.items() if name in _REMEDIES and ms > 0}
    if share >= GOOD_SHARE or not losses:
        return [
            f"A good plan: {share:.0%} of {times} is balanced work at full speed.",
            "Nothing else to try: train with it.",
        ]
    cause = max(losses, key=losses.__getitem__)
    part = losses[cause] / (simulation.forward_ms + simulation.backward_ms)
    cost, remedy = _REMEDIES[cause]
    sentence = (
        f"{share:.0%} of {times} is balanced work at full speed; the largest loss, {part:.0%}, is {cost}."
    )
    prefix = "" if "search" in simulation.plan.report else "--recipe auto, or "
    return [sentence, f"Try {prefix}{remedy}."]


def _time_imbalance(simulation: Simulation) -> tuple[str, str]:
    """The imbalance in time, which placement by time minimizes. Pairs stay uneven: those of short samples cost more."""
    return "time imbalance", f"{summary.percent(simulation.time_imbalance)} (simulated work, max/mean - 1)"


def _figures(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yields figures: name, unit, value, bound, gap (value over bound), and the reason if there is no gap."""
    ideal = {"forward": 0.0, "backward": 0.0}
    for (_, phase), run in simulation.runs.items():
        ideal[phase] += run.ideal_us / 1e3
    for phase, value in (("forward", simulation.forward_ms), ("backward", simulation.backward_ms)):
        if value:
            name = f"{phase}, one call of each kind; bound: balanced work without communication"
            yield _figure(name, "ms", value, ideal[phase], value / ideal[phase] if ideal[phase] else None)
    for (kind, phase), layer in simulation.recurrent.items():
        value, bound = layer.makespan_us / 1e3, layer.ideal_us / 1e3
        yield _figure(f"{phase}, a layer of {kind}, recurrent", "ms", value, bound, value / bound)
    for key, entry in simulation.plan.report["bounds"].items():
        name, unit = _BOUNDS.get(key, (key, "count"))
        yield _figure(name, unit, entry["value"], entry["bound"], entry["gap"], entry.get("void"))


def _figure(
    name: str, unit: str, value: float | None, bound: float | None, gap: float | None, void: str | None = None
) -> dict[str, Any]:
    return {"name": name, "unit": unit, "value": value, "bound": bound, "gap": gap, "void": void}


def _rank_columns(simulation: Simulation) -> dict[str, Any]:
    """Columns [ranks]: pairs (over heads and layers), tokens, bytes of work rows, bytes sent and received, busy and
    waiting microseconds."""
    plan, runs = simulation.plan, simulation.runs.values()
    result = {"work": summary.loads(plan), "tokens": summary.tokens(plan), "memory": _memory(plan)}
    for name in ("sent_bytes", "received_bytes", "compute_us", "exposed_us"):
        result[name] = np.sum([getattr(run, name) for run in runs], axis=0)
    return result


def _memory(plan: Plan) -> Ints:
    """int64 [ranks]: bytes of work rows of the rank's largest program."""
    peak, model = np.zeros(plan.header.ranks, np.int64), plan.request.model
    for programs in plan.programs.values():
        arenas = programs["arenas"]
        tiles = zip(*(arenas.wide(name).tolist() for name in ("tensor", "rows", "heads")), strict=True)
        sizes = [rows * model.row_bytes(Tensor(tensor), heads) for tensor, rows, heads in tiles]
        peak = np.maximum(peak, np.bincount(arenas.rank_of_row(), sizes, plan.header.ranks).astype(np.int64))
    return peak


def _masks(plan: Plan, keys: list[tuple[str, str]]) -> list[Any]:
    """For each run: its pieces, the number of an earlier run with equal pieces, or the reason why they are unknown."""
    try:
        by_key, masks = dict(pieces(plan)), list[Any]()
    except CapacityError as error:
        return [{"void": str(error)} for _ in keys]
    for index, key in enumerate(keys):
        duplicate = next((i for i in range(index) if _are_equal_pieces(by_key[keys[i]], by_key[key])), None)
        mask_columns = columns(by_key[key])
        if duplicate is None:
            masks.append(pack(mask_columns))
        else:
            masks.append({"same": duplicate, "instruction": pack(mask_columns)["instruction"]})
    return masks


def _are_equal_pieces(a: Pieces, b: Pieces) -> bool:
    """True if pieces are equal except for instruction numbers."""
    return all(np.array_equal(x, y) for x, y in ((a.bands, b.bands), (a.rank, b.rank), (a.heads, b.heads)))
