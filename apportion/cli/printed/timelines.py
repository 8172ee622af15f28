"""Printed output of `apportion simulate`: timelines as bars, and the critical path in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from apportion.cli.output import count
from apportion.cli.printed.tables import table
from apportion.ir.arrays import Bools, Floats
from apportion.ir.isa import Op
from apportion.ir.plan.summary import human_bytes
from apportion.planner.simulate import PathStep, RecurrentRun, Run, Simulation

CELLS = 60  # characters of a timeline
MIXED = 0.15, 0.85  # shares of work in a cell between which it is drawn as work and waiting


def headline(simulation: Simulation) -> str:
    """A summary of the whole simulation in a few lines."""
    busiest, losses = simulation.busiest, simulation.lost
    breakdown = ", ".join(
        f"{name.replace('rows', 'row work')} {100 * us / sum(losses):.1f}"
        for name, us in losses._asdict().items()
        if us
    )
    return (
        f"recipe {simulation.plan.header.recipe} on {simulation.plan.header.ranks} ranks, hardware "
        f"{simulation.hardware}: forward {simulation.forward_ms:.3f} ms, backward {simulation.backward_ms:.3f} ms\n"
        f"{100 * simulation.efficiency:.1f} % of the time is useful, balanced work: "
        f"{100 * simulation.of_attainable:.1f} % of what is attainable\n"
        f"shares of the time in %: {breakdown or 'none'}\n"
        f"the longest wait of a rank is {simulation.exposed_ms:.3f} ms\n"
        f"the busiest rank, {busiest['rank']}, starts {count(busiest['launches'], 'kernel')} for "
        f"{count(busiest['instructions'], 'instruction')} and posts {count(busiest['messages'], 'message')} in "
        f"{count(busiest['rounds'], 'round')}"
        + "".join(f"\n{_recurrent(run)}" for run in simulation.recurrent.values())
    )


def _recurrent(run: RecurrentRun) -> str:
    times = f"{run.makespan_us / 1e3:.3f} ms, lower bound {run.ideal_us / 1e3:.3f}"
    parts = f"halo {run.halo_us:.0f} us, states {sum(run.states_us):.0f} us, fold {run.fold_us:.0f} us"
    longest = f"transitions at most {run.summary_us.max() / 1e3:.3f} ms on a rank"
    return f"{run.kind} {run.phase}, a recurrent layer: {times} ({parts}, {longest}; {human_bytes(run.bytes)} moved)"


def run_view(run: Run, ranks: int, steps: int) -> RenderableType:
    """One phase: timelines, and the critical path in words."""
    title = f"\n{run.kind} {run.phase}: {run.makespan_us / 1e3:.3f} ms"
    parts: list[RenderableType] = [Text(title, "bold")]
    if ranks:
        parts += [_timelines(run, ranks)]
    return Group(
        *parts, *(Text(line, no_wrap=True, overflow="ignore") for line in _path(run.critical_path(), steps))
    )


def _timelines(run: Run, limit: int) -> RenderableType:
    """A bar for each of the ranks that wait longest, with its milliseconds."""
    ranks = np.sort(np.argsort(-run.exposed_us, kind="stable")[:limit])
    titles = ("rank", f"0 to {run.makespan_us / 1e3:.3f} ms", "work", "waiting", "ends")
    rows = list[tuple[str | Text, ...]]()
    for rank in ranks.tolist():
        times = (column[rank] / 1e3 for column in (run.compute_us, run.exposed_us, run.finish_us))
        rows.append((str(rank), _bar(run, rank), *(f"{time:.3f}" for time in times)))
    chart = table(titles, rows, titles[1:2])
    hidden = len(run.exposed_us) - len(ranks)
    return Group(chart, Text(f"and {count(hidden, 'rank')} that wait less", "dim")) if hidden else chart


def _bar(run: Run, rank: int) -> Text:
    edges = np.linspace(0.0, run.makespan_us, CELLS + 1)
    is_compute = (run.spans.rank == rank) & (run.spans.stream == 0)
    is_wait = run.spans.op == Op.WAIT
    work, waiting = (share(run, is_compute & (is_wait == waits), edges) for waits in (False, True))
    low, high = MIXED
    cells = [
        "█" if busy >= high else "▒" if busy > low else "·" if idle > low else " "
        for busy, idle in zip(work, waiting, strict=True)
    ]
    return Text("".join(cells), "cyan")


def share(run: Run, mask: Bools, edges: Floats) -> Floats:
    """float64 [cells]: the fraction of the time between two edges that spans of a run cover, with overlapping spans
    counted once."""
    start, end = run.spans.start_us[mask], run.spans.end_us[mask]
    if not len(start):
        return np.zeros(len(edges) - 1)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    start = np.maximum(start, np.append(0.0, end[:-1]))
    cumulative = np.cumsum(end - start)
    points, sums = (
        np.stack(pair, axis=1).ravel() for pair in ((start, end), (cumulative - (end - start), cumulative))
    )
    return np.asarray(np.diff(np.interp(edges, points, sums)) / np.maximum(np.diff(edges), 1e-12))


def _path(path: Sequence[PathStep], limit: int) -> Iterator[str]:
    """The longest steps of a critical path, in order, under a line that sums all of them."""
    sums = {
        kind: sum(step.us for step in path if step.kind == kind) / 1e3 for kind in ("compute", "transfer")
    }
    longest = sorted(sorted(path, key=lambda step: -step.us)[:limit], key=lambda step: step.start_us)
    scope = "" if len(longest) == len(path) else f", the longest {len(longest)}"
    yield (
        f"critical path: {count(len(path), 'step')}, {sums['compute']:.3f} ms of work, {sums['transfer']:.3f} ms of "
        f"transfers{scope}:"
    )
    for step in longest:
        yield f"  {step.start_us / 1e3:9.3f} ms  {step.text}"
