"""Executes a plan's moves between layouts with numpy, for all ranks at once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion import ExecutionError, Plan
from apportion.ir.plan.tables import Table

Array = NDArray[Any]


def remap(plan: Plan, index: int, parts: Sequence[Array], inverse: bool = False) -> list[Array]:
    """Moves each rank's rows [rows, ...] from the source layout of `plan.moves[index]` to the target layout.

    With `inverse`, moves rows of the target layout back. Raises ExecutionError if sends and receives differ.
    """
    move, messages = plan.moves[index], defaultdict[tuple[int, int], deque[Array]](deque)
    names = (move.target, move.source) if inverse else (move.source, move.target)
    source_rows, target_rows = (plan.layout(name).rows_per_rank.tolist() for name in names)
    assert [len(part) for part in parts] == source_rows
    for rank, peer, row, rows in _rows(move.table, not inverse):
        messages[rank, peer].append(parts[rank][row : row + rows])
    result = [np.full((rows, *part.shape[1:]), np.nan) for rows, part in zip(target_rows, parts, strict=True)]
    for rank, peer, row, rows in _rows(move.table, inverse):
        if not messages[peer, rank] or len(messages[peer, rank][0]) != rows:
            sends = "which sends another number"
            raise ExecutionError(f"rank {rank} receives {rows} rows from rank {peer}, {sends}")
        result[rank][row : row + rows] = messages[peer, rank].popleft()
    if any(np.isnan(part).any() for part in result) or any(messages.values()):
        raise ExecutionError("rows of the target are not written, or more are sent than received")
    return result


def _rows(table: Table, send: bool) -> Iterator[tuple[int, ...]]:
    """(rank, peer, row, rows) of all sends or all receives."""
    chosen = table["send"] == send
    columns = (table.rank_of_row(), *(table[name] for name in ("peer", "row", "rows")))
    return zip(*(column[chosen].tolist() for column in columns), strict=True)
