"""The tables of commands: no borders, figures at the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table


def table(
    titles: Sequence[str], rows: Iterable[Iterable[RenderableType]], left: Sequence[str] = (), gap: int = 1
) -> Table:
    """left: titles of columns whose cells begin at the left; gap: blanks between columns."""
    made = Table(box=None, padding=(0, gap, 0, 0))
    for title in titles:
        made.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made
