"""Printed output of `apportion compare`: a row per recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from apportion.cli.output import count
from apportion.cli.printed.tables import table
from apportion.ir.plan.summary import human_bytes, percent

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the comparison. text: the cell of a row that is not refused; wide: only in the wide table."""

    title: str
    text: Callable[[Record], str]
    wide: bool = False


def _speedup(row: Record) -> str:
    spread = row["speedup"]
    if spread is None:
        return "-"
    median = f"{spread['median']:.2f}"
    if row["batches"] == 1:
        return median
    return f"{median} ({spread['min']:.2f}-{spread['max']:.2f})"


def _verify_ms(row: Record) -> str:
    return f"{row['verify_ms']['p50']:.0f}" if row["verify_ms"] else "-"


def _gap(row: Record, name: str) -> str:
    gap = row["bounds"][name]["gap"]
    return "-" if gap is None else f"{gap:.2f}"


COLUMNS = (
    Column("recipe", lambda row: str(row["recipe"])),
    Column("forward\nms", lambda row: f"{row['forward_ms']:.2f}"),
    Column("backward\nms", lambda row: f"{row['backward_ms']:.2f}"),
    Column("speed-up\n(min-max)", _speedup),
    Column("effi-\nciency", lambda row: f"{100 * row['efficiency']:.0f} %"),
    Column("attain-\ned", lambda row: f"{100 * row['of_attainable']:.0f} %", wide=True),
    Column("exposed\nms", lambda row: f"{row['exposed_ms']:.2f}", wide=True),
    Column("compute\nimbalance", lambda row: percent(row["imbalance"]["compute"]), wide=True),
    Column("time\nimbalance", lambda row: percent(row["time_imbalance"]), wide=True),
    Column("token\nimbalance", lambda row: percent(row["imbalance"]["tokens"]), wide=True),
    Column("bytes\nmoved", lambda row: human_bytes(row["bytes"]["total"])),
    Column("between\nnodes", lambda row: human_bytes(row["bytes"]["inter_node"]), wide=True),
    Column("busiest\nrank", lambda row: human_bytes(row["bytes"]["max_rank"]), wide=True),
    Column("slots", lambda row: f"{row['slots']:,}", wide=True),
    Column("rounds", lambda row: f"{row['rounds']:,}", wide=True),
    Column("peak work\nrows", lambda row: f"{row['peak_rows']:,}", wide=True),
    Column("block\ntokens", lambda row: f"{row['block_tokens']:,}", wide=True),
    Column("plan\nms", lambda row: f"{row['planning_ms']['p50']:.0f}"),
    Column("verify\nms", _verify_ms, wide=True),
    Column("plan\nbytes", lambda row: human_bytes(row["plan_bytes"]["total"]), wide=True),
    Column("largest\npart", lambda row: human_bytes(row["plan_bytes"]["largest_rank"]), wide=True),
    Column("makespan\n/ bound", lambda row: _gap(row, "makespan"), wide=True),
    Column("KV bytes\n/ bound", lambda row: _gap(row, "kv_bytes"), wide=True),
    Column("slots\n/ bound", lambda row: _gap(row, "slots"), wide=True),
)

# only for models with recurrent layers
RECURRENT = Column("recurrent\nms", lambda row: f"{row['recurrent_ms']:.2f}")


def comparison(record: Record, wide: bool) -> tuple[Callable[[], RenderableType], ...]:
    """The parts of the output: a headline, the table, and the reasons for refused batches."""
    return (
        lambda: _headline(record),
        lambda: comparison_table(record["rows"], wide),
        lambda: "\n".join(remarks(record["rows"])),
    )


def _headline(record: Record) -> str:
    cluster = record["cluster"]
    tokens = max((row["tokens"] for row in record["rows"] if row["tokens"]), default=0)
    hardware = record["hardware"]["name"] if record["hardware"] else "h100"
    ranks = cluster["nodes"] * cluster["ranks_per_node"]
    batches = count(record["batches"], "batch", "batches")
    return (
        f"{ranks} ranks, {batches} of {tokens:,} tokens ({record['workload']}),\nhardware {hardware}, "
        f"baseline {record['baseline']}\n"
    )


def comparison_table(rows: Sequence[Record], wide: bool = False) -> Table:
    """One line per recipe."""
    columns = [column for column in COLUMNS if wide or not column.wide]
    if any(row.get("recurrent_ms") for row in rows):
        columns.insert(3, RECURRENT)
    titles = [column.title for column in columns]
    return table(titles, (comparison_cells(row, columns) for row in rows), ("recipe",))


def comparison_cells(row: Record, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """The texts of one row; for a recipe that planned no batch, its name and dashes."""
    if row["status"] == "ok":
        return [column.text(row) for column in columns]
    return [row["recipe"], "refused", *["-"] * (len(columns) - 2)]


def remarks(rows: Sequence[Record]) -> list[str]:
    """A line for each row with refused or unverified batches."""
    return [
        f"{row['recipe']}: {text}"
        for row in rows
        for text in (row["reason"], row["unverified"] and f"its plans are not verified: {row['unverified']}")
        if text
    ]
