"""The tables of commands: no borders, figures right-aligned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import JustifyMethod, RenderableType
from rich.table import Table


def table(
    titles: Sequence[str],
    rows: Iterable[Iterable[RenderableType]],
    left: Sequence[str] = (),
    gap: int = 1,
    folds: Sequence[str] = (),
) -> Table:
    """Makes a table. left: titles of left-aligned columns; gap: blanks between columns; folds: titles of
    columns whose long cells wrap."""
    grid = Table(box=None, padding=(0, gap, 0, 0))
    for title in titles:
        justify: JustifyMethod = "left" if title in left else "right"
        grid.add_column(title, justify=justify, no_wrap=title not in folds, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid
