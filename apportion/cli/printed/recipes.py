"""Printed output of `apportion recipes` and `apportion solvers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from apportion.cli.printed.tables import table

Record = Mapping[str, Any]


def recipes_table(rows: Sequence[Record]) -> Table:
    """Table of recipes."""
    return _catalogue(
        ("recipe", "what it does", "from", "needs"),
        [(row["name"], row["summary"], _source(row), row["needs"] or "") for row in rows],
    )


def recipe_file(row: Record) -> str:
    """A recipe as YAML that `--recipe` reads, with a comment that describes it."""
    import yaml

    facts = [row["summary"], f"from: {_source(row)}", f"needs: {row['needs'] or 'nothing'}"]
    for step, params in row["parameters"].items():
        (name,) = row["steps"][step]
        facts.append(f"{step} {name} has {'these parameters:' if params else 'no parameters'}")
        facts += [f"  {param}: {_yaml(spec['default'])}  # {spec['takes']}" for param, spec in params.items()]
    steps = {"name": row["name"], "steps": row["steps"]}
    body = yaml.safe_dump(steps, sort_keys=False, default_flow_style=None)
    return "".join(f"# {fact}\n" for fact in facts) + body.rstrip("\n")


def _yaml(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _source(row: Record) -> str:
    section = str(row["section"])
    suffix = f", section {section}" if section[:1].isdigit() else f", {section}" if section else ""
    return f"{row['paper']}{suffix}"


def solvers_table(rows: Sequence[Record]) -> Table:
    """Table of solvers."""
    return _catalogue(
        ("solver", "problem", "method", "used by", "from", "needs"),
        [
            (row["name"], row["kind"], row["summary"], ", ".join(row["steps"]), row["source"], _needs(row))
            for row in rows
        ],
    )


def solver_comparison_table(rows: Sequence[Record]) -> Table:
    """Table of solvers compared with the optimum."""
    cells = []
    for row in rows:
        ratios = ["-" if row[name] is None else f"{row[name]:.4f}" for name in ("mean", "worst")]
        counts = [f"{row[name]}/{row['problems']}" for name in ("solved", "optimal", "proven")]
        cells.append((row["kind"], row["solver"], *counts, *ratios, f"{row['ms']:.2f}"))
    titles = ("problem", "solver", "solved", "optimal", "proven", "mean", "worst", "ms")
    return table(titles, cells, titles[:2], gap=2)


def _needs(row: Record) -> str:
    if row["package"] is None:
        return ""
    hint = "installed" if row["installed"] else f"pip install '.[{row['extra']}]'"
    return f"{row['package']} ({hint})"


def _catalogue(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return table(titles, (map(Text, row) for row in rows), titles, 2, titles)
