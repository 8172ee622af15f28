"""Executes a plan's moves between layouts with numpy, for all ranks at once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ExecutionError
from apportion.ir.plan.tables import Table

Array = NDArray[Any]


def remap(plan: Plan, index: int, parts: Sequence[Array], inverse: bool = False) -> list[Array]:
    """Moves each rank's rows [rows, ...] from the source layout of `plan.moves[index]` to the target layout.

    `inverse` moves rows of the target layout back. Raises ExecutionError if sends and receives differ.
    """
    move, mail = plan.moves[index], defaultdict[tuple[int, int], deque[Array]](deque)
    names = (move.target, move.source) if inverse else (move.source, move.target)
    held, wanted = (plan.layout(name).rows_per_rank.tolist() for name in names)
    assert [len(part) for part in parts] == held
    for rank, peer, row, rows in _rows(move.table, not inverse):
        mail[rank, peer].append(parts[rank][row : row + rows])
    moved = [np.full((rows, *part.shape[1:]), np.nan) for rows, part in zip(wanted, parts, strict=True)]
    for rank, peer, row, rows in _rows(move.table, inverse):
        if not mail[peer, rank] or len(mail[peer, rank][0]) != rows:
            raise ExecutionError(f"rank {rank} receives {rows} rows from rank {peer}, which sends others")
        moved[rank][row : row + rows] = mail[peer, rank].popleft()
    if any(np.isnan(part).any() for part in moved) or any(mail.values()):
        raise ExecutionError("rows of the target are not written, or more are sent than received")
    return moved


def _rows(table: Table, send: bool) -> Iterator[tuple[int, ...]]:
    """(rank, peer, row, rows) of all sends or of all receives."""
    chosen = table["send"] == send
    columns = (table.rank_of_row(), *(table[name] for name in ("peer", "row", "rows")))
    return zip(*(column[chosen].tolist() for column in columns), strict=True)
