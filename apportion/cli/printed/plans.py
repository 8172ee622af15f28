"""Tables and pictures of plans and of benchmarks, with rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from apportion.cli.printed.tables import table
from apportion.ir.bytes.codec import Plan
from apportion.ir.plan.summary import Record, human_bytes, loads, percent, tokens
from apportion.ir.request.model import Model

BAR = 28  # cells of the longest bar
SHOWN = 64  # ranks drawn one by one; larger plans get one row per node


def summary(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A two-column table of names and values."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def model_line(file: Path | None, model: Model) -> str:
    """Name, heads and layers of the planned model."""
    heads, layers = (value for _, value in model.figures()[:2])
    return f"{file or 'the default'}: heads {heads}; layers {layers}"


def faster_rows(faster: Record | None) -> list[tuple[str, str]]:
    """A note that another recipe is forecast to be faster."""
    if faster is None:
        return []
    ratio = faster["own_ms"] / faster["ms"]
    times = f"{faster['ms']:.2f} ms per call, forward and backward, instead of {faster['own_ms']:.2f}"
    return [("faster", f"{faster['recipe']}, {ratio:.2f} times as fast by forecast ({times}): --recipe auto")]


def bench_table(records: Sequence[Record]) -> Table:
    """One line per row of the planning benchmark."""
    names = ("ranks", "seed", "block", "plan ms", "verify ms", "compute", "tokens", "moved")
    return table((*names, "slots", "largest rank"), map(_bench_cells, records))


def _bench_cells(record: Record) -> list[str]:
    return [
        str(record["ranks"]),
        str(record["seed"]),
        str(record["block_tokens"]),
        f"{record['planning_ms']['p50']:.1f}",
        f"{record['verify_ms']['p50']:.1f}",
        percent(record["imbalance"]["compute"]),
        percent(record["imbalance"]["tokens"]),
        human_bytes(record["bytes"]["total"]),
        str(record["slots"]),
        human_bytes(record["plan_bytes"]["largest_rank"]),
    ]


def attention_table(records: Sequence[Record]) -> Table:
    """One line per timed row of the attention benchmark; columns without figures are left out."""
    timed = [record for record in records if record["host_ms"] is not None]
    columns = {
        name: cells
        for name, cell_of in _ATTENTION_COLUMNS.items()
        if any(cells := [cell_of(record) for record in timed])
    }
    return table([*columns], zip(*columns.values(), strict=True), ("recipe", "phase", "engine"))


def _number(name: str, digits: int = 0) -> Callable[[Record], str]:
    """Formats a field; empty if it was not measured."""
    return lambda record: "" if record[name] is None else f"{record[name]:,.{digits}f}"


_ATTENTION_COLUMNS: Mapping[str, Callable[[Record], str]] = {
    **{name: itemgetter(name) for name in ("recipe", "phase", "engine")},
    **{name: _number(name) for name in ("ranks", "rank", "instructions", "launches", "rounds", "messages")},
    "host ms": _number("host_ms", 3),
    "prepare": _number("prepare_ms", 1),
    "simulated": _number("simulated_ms", 3),
    "ms": _number("ms", 3),
    "TFLOP/s": _number("tflops", 1),
    "exposed": _number("exposed_ms", 3),
}


# --- pictures of a plan


def picture(plan: Plan) -> RenderableType:
    """Two bars per rank (per node if there are many ranks): attention work and tokens, relative to their means."""
    work, token_counts, per_node = loads(plan), tokens(plan), plan.request.cluster.ranks_per_node
    group = per_node if len(work) > SHOWN else 1
    unit = f"node: the busiest of its {per_node} ranks" if group > 1 else "rank"
    bars = zip(_bars(work, group, "cyan"), _bars(token_counts, group, "green"), strict=True)
    titles = (unit[:4], "attention work / mean", "tokens / mean")
    rows = ((str(index), *cells) for index, cells in enumerate(bars))
    return Group(table(titles, rows, titles[1:]), Text(f"one line per {unit}", "dim"))


def _bars(values: NDArray[Any], group: int, style: str) -> list[Text]:
    """A bar for the largest of each `group` consecutive values, with its ratio to the mean of all values."""
    mean, peaks = float(values.mean()), values.reshape(-1, group).max(axis=1)
    return [
        _bar(float(peak) / mean if mean else 0.0, float(peaks.max()) / mean if mean else 1.0, style)
        for peak in peaks
    ]


def _bar(share: float, longest: float, style: str) -> Text:
    length = round(BAR * share / longest)
    return Text.assemble(("█" * length, style), " " * (BAR - length), f" {share:.3f}")


def search_table(search: Record) -> Table:
    """Table of a search's candidates, in order: milliseconds per layer, or why one was refused. The best is bold."""
    rows = (
        (Text(cell, "bold" * (trial["recipe"] == search["recipe"])) for cell in cells)
        for trial in search["tried"]
        for cells in [(trial["recipe"]["name"], _trial_ms(trial), _steps(trial))]
    )
    return table(("tried", "ms", "steps"), rows, ("tried", "steps"), 2, ("steps",))


def _trial_ms(trial: Record) -> str:
    if trial["refused"] is not None:
        return "refused"
    return f"> {trial['least_ms']:.3f}" if trial["ms"] is None else f"{trial['ms']:.3f}"


def _steps(trial: Record) -> str:
    """The steps with their parameters, or why the candidate was refused."""
    if trial["refused"] is not None:
        return str(trial["refused"])
    steps = trial["recipe"]["steps"].items()
    return ", ".join(_step(step, setting) for step, setting in steps if setting)


def _step(step: str, setting: Any) -> str:
    if setting is True:  # a switch
        return step
    ((name, params),) = setting.items()
    return f"{step} {name}{_params(params)}"


def _params(params: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name}: {value}' for name, value in params.items())})" if params else ""


def program_sizes(plan: Plan, rank: int | None = None) -> list[dict[str, Any]]:
    """Number of rows of each table per kind and phase, of one rank or of all."""
    records = []
    for (kind, phase), programs in plan.programs.items():
        selected = programs if rank is None else programs.rank(rank)
        sizes = {name: len(rows) for name, rows in selected.tables.items()}
        records.append({"kind": kind, "phase": phase, **sizes})
    return records


def programs_table(sizes: Sequence[Record]) -> Table:
    """The rows of `program_sizes` as a table."""
    rows = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in record.values()] for record in sizes]
    return table([*sizes[0]], rows, ("kind", "phase"))
