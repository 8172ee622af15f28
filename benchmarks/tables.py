"""Writes a benchmark's rows to a JSON file and writes its Markdown tables between markers in the documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.cli.environment import versions

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(titles: Sequence[str], words: int = 1) -> list[str]:
    """The first two lines of a Markdown table; the first `words` columns hold text, the others numbers."""
    return [line(titles), line(["---"] * words + ["--:"] * (len(titles) - words))]


def write_tables(tables: Mapping[str, str], pages: Iterable[Path] = PAGES) -> None:
    """Replaces the text between `<!-- table: NAME -->` and `<!-- end -->` on the pages; prints the tables."""
    print("\n\n".join(tables.values()))
    for page in pages:
        original = text = page.read_text(encoding="utf-8")
        for name, table in tables.items():
            start, marker, tail = text.partition(f"<!-- table: {name} -->\n")
            if marker:
                text = f"{start}{marker}{table}\n{tail[tail.index('<!-- end -->') :]}"
        if text != original:
            page.write_text(text, encoding="utf-8")


def run(
    cases: Mapping[str, Callable[[], dict[str, Any]]],
    results: Path,
    table: Callable[[Mapping[str, Any]], str],
    prefix: str = "",
) -> None:
    """Runs a command that measures cases by name, writes their rows to `results`, and writes each table between its
    markers, named `prefix` plus the case's name."""
    parser = argparse.ArgumentParser(description=f"Rows of {results.name} and tables of docs")
    parser.add_argument("--only", help="names of cases, separated by commas; none writes only the tables")
    selection = parser.parse_args().only
    names = list(cases) if selection is None else [] if selection == "none" else selection.split(",")
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"no case {', '.join(unknown)}: cases are {', '.join(cases)}")
    rows: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for name in names:
        rows[name] = cases[name]() | {"versions": versions()}
        rows = {case: rows[case] for case in cases if case in rows}
        lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
        results.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    write_tables({prefix + name: table(rows[name]) for name in cases if name in rows})
    print(f"rows are in {results}")
