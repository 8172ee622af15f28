"""Timelines of ranks, and transfers between ranks, as columns of a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import Op
from apportion.ir.tensors import TENSOR_NAMES
from apportion.planner.simulate import Run
from apportion.planner.simulate.launches import PACK, UNPACK, WORK_NAMES
from apportion.report.columns import pack

#: maximum number of transfers of a run shown one by one; above it, those between two nodes in a round are merged
MAX_TRANSFERS = 600_000
NOBODY = -1


def run_data(run: Run, per_node: int) -> dict[str, Any]:
    """One kind and phase: activities of compute streams, transfers, the critical path."""
    transfers = _transfers(run)
    number: Ints = np.arange(len(transfers["bytes"]))  # index of the row that shows each transfer
    if is_folded := len(run.traffic.bytes) > MAX_TRANSFERS:
        transfers, number = _merge_transfers(transfers, per_node)
    return {
        "kind": run.kind,
        "phase": run.phase,
        "makespan_us": run.makespan_us,
        "ideal_us": run.ideal_us,
        "efficiency": run.efficiency,
        "folded": is_folded,
        "work": pack(_work(run, number)),
        "transfers": pack(transfers),
        "path": [step.to_data() for step in run.critical_path()],
        "names": {str(code): name for code, name in WORK_NAMES.items()},
        "tensors": {str(int(code)): name for code, name in TENSOR_NAMES.items()},
        "codes": {"wait": int(Op.WAIT), "pack": PACK, "unpack": UNPACK},
    }


def _work(run: Run, number: Ints) -> dict[str, Any]:
    """Spans of compute streams, rank after rank. transfer: the transfer that ends a wait."""
    spans = run.spans
    is_compute = spans.stream == 0
    columns = {
        "rank": spans.rank[is_compute],
        "op": spans.op[is_compute],
        "start": spans.start_us[is_compute],
        "end": spans.end_us[is_compute],
        "instruction": spans.instruction[is_compute],
        "round": spans.round[is_compute],
    }
    first, end = run.script.ptr[columns["rank"]], run.script.ptr[columns["rank"] + 1]
    index = np.minimum(first + columns["instruction"], end - 1)
    launch = np.where(columns["op"] == Op.WAIT, run.script.launch[index], NOBODY)
    transfer = np.append(run.times.last, NOBODY)[launch]
    return columns | {"transfer": np.append(number, NOBODY)[transfer]}


def _transfers(run: Run) -> dict[str, Any]:
    """Every send with its receive. cause: the previous transfer on the port, if this one had to wait for it."""
    script, traffic, times = run.script, run.traffic, run.times
    return {
        "source": script.rank[traffic.sender],
        "target": script.rank[traffic.receiver],
        "round": script.round[traffic.sender],
        "channel": script.channel[traffic.sender],
        "tensor": traffic.tensor,
        "bytes": traffic.bytes,
        "start": times.start,
        "end": times.start + traffic.wire_us + traffic.latency_us,
        "cause": np.where(times.start > times.ready, times.cause, NOBODY),
    }


def _merge_transfers(transfers: dict[str, Any], per_node: int) -> tuple[dict[str, Any], Ints]:
    """Merges transfers of a tensor between two nodes in a round; a merged one lasts from first start to last end."""
    source, target = transfers["source"] // per_node * per_node, transfers["target"] // per_node * per_node
    keys = np.stack([transfers["round"], source, target, transfers["tensor"]])
    unique, number = np.unique(keys, axis=1, return_inverse=True)
    number, count = number.ravel(), unique.shape[1]
    start, end = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(start, number, transfers["start"])
    np.maximum.at(end, number, transfers["end"])
    size = np.zeros(count, np.int64)
    np.add.at(size, number, transfers["bytes"])
    columns = {
        "source": unique[1],
        "target": unique[2],
        "round": unique[0],
        "channel": np.zeros(count, np.int64),
        "tensor": unique[3],
        "bytes": size,
        "start": start,
        "end": end,
        "cause": np.full(count, NOBODY),
    }
    return columns, number
