"""Timelines as Chrome trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

    process   a rank
    thread 0  its compute stream: instructions, blocking waits, packing, unpacking, casts
    thread c  channel c - 1: rounds, from start to completion
    arrow     a transfer, from the sender's round to the receiver's; it ends halfway through the transfer, so that it
              points into the round and not to its edge

Format: "Trace Event Format" (Google), complete events (X), metadata (M) and flows (s, f); times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.planner.simulate.launches import WORK_NAMES
from apportion.planner.simulate.path import PathStep
from apportion.planner.simulate.timeline import Run

DEFAULT_RANKS = 64

Event = dict[str, Any]


def build_trace(
    plan: Plan, runs: Sequence[Run], path: Sequence[PathStep], ranks: Sequence[int] | None, limit: int
) -> dict[str, Any]:
    """Builds the trace of some ranks. Raises ConfigError for an unknown rank."""
    shown = _choose_ranks(plan.header.ranks, path, ranks, limit)
    events = [event for rank in shown for event in _names(plan, rank, _channels(runs, rank))]
    start, flow = 0.0, 0
    for run in runs:
        events += [event for rank in shown for event in _slices(run, rank, start)]
        arrows = list(_arrows(run, np.array(shown), start, flow))
        events += arrows
        flow += len(arrows) // 2
        start += run.makespan_us
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _metadata(plan, shown)}


def _choose_ranks(count: int, path: Sequence[PathStep], ranks: Sequence[int] | None, limit: int) -> list[int]:
    if ranks is None:
        first = dict.fromkeys([step.rank for step in path][::-1] + list(range(count)))
        return sorted(list(first)[:limit])
    for rank in ranks:
        if not 0 <= rank < count:
            raise ConfigError("ranks", rank, f"must be in [0, {count})", "name existing ranks")
    return sorted(set(ranks))


def _metadata(plan: Plan, shown: list[int]) -> dict[str, Any]:
    return {
        "recipe": plan.header.recipe,
        "plan": plan.id.hex(),
        "ranks": plan.header.ranks,
        "ranks_shown": shown,
        "complete": len(shown) == plan.header.ranks,
    }


def _channels(runs: Sequence[Run], rank: int) -> list[int]:
    return sorted({int(c) for run in runs for c in np.unique(run.script.channel[run.script.rank == rank])})


def _names(plan: Plan, rank: int, channels: list[int]) -> Iterator[Event]:
    node = plan.request.cluster.node_of(rank)
    yield _meta("process_name", rank, 0, name=f"rank {rank} (node {node})")
    yield _meta("process_sort_index", rank, 0, sort_index=rank)
    threads = {0: "compute"} | {1 + channel: f"channel {channel}" for channel in channels}
    for thread, name in threads.items():
        yield _meta("thread_name", rank, thread, name=name)
        yield _meta("thread_sort_index", rank, thread, sort_index=thread)


def _meta(event: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": event, "pid": rank, "tid": thread, "args": args}


def _slices(run: Run, rank: int, start: float) -> Iterator[Event]:
    script, spans = run.script, run.spans
    for row in np.flatnonzero((spans.rank == rank) & (spans.stream == 0)).tolist():
        name, round_ = WORK_NAMES[int(spans.op[row])], int(spans.round[row])
        if round_ >= 0:
            name += f" {round_}"
        number = int(spans.instruction[row])
        yield _slice(run, rank, 0, name, start, spans.start_us[row], spans.end_us[row], instruction=number)
    for launch in np.flatnonzero(script.rank == rank).tolist():
        yield _round(run, rank, launch, start)


def _round(run: Run, rank: int, launch: int, start: float) -> Event:
    script, traffic, times = run.script, run.traffic, run.times
    transfers: Ints = script.ends[script.end_ptr[launch] : script.end_ptr[launch + 1]]
    args = {
        key: int(traffic.bytes[transfers[side[transfers] == launch]].sum())
        for key, side in (("sent_bytes", traffic.sender), ("received_bytes", traffic.receiver))
    }
    name, thread = f"round {script.round[launch]}", 1 + int(script.channel[launch])
    return _slice(run, rank, thread, name, start, times.reached[launch], times.done[launch], **args)


def _slice(
    run: Run, rank: int, thread: int, name: str, start: float, begin: float, end: float, **args: int
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": f"{run.kind} {run.phase}",
        "pid": rank,
        "tid": thread,
        "ts": round(float(start + begin), 3),
        "dur": round(round(float(start + end), 3) - round(float(start + begin), 3), 3),
        "args": {name: int(value) for name, value in args.items()},
    }


def _arrows(run: Run, shown: Ints, start: float, number: int) -> Iterator[Event]:
    """Two events for each transfer between shown ranks."""
    script, traffic, times = run.script, run.traffic, run.times
    sides = [(script.rank[side], 1 + script.channel[side]) for side in (traffic.sender, traffic.receiver)]
    begin = start + times.start
    halfway = begin + (traffic.wire_us + traffic.latency_us) / 2
    for transfer in np.flatnonzero(np.isin(sides[0][0], shown) & np.isin(sides[1][0], shown)).tolist():
        name = TENSOR_NAMES[Tensor(int(traffic.tensor[transfer]))]
        for (rank, thread), times_us, ph in zip(
            sides, (begin, halfway), ({"ph": "s"}, {"ph": "f", "bp": "e"}), strict=True
        ):
            yield {
                **ph,
                "id": number,
                "name": name,
                "cat": "transfer",
                "pid": int(rank[transfer]),
                "tid": int(thread[transfer]),
                "ts": round(float(times_us[transfer]), 3),
            }
        number += 1
