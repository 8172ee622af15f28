"""Home rows of all ranks on one axis: their *addresses* stand for tokens in the dataflow.

    rank       0            1            2
    row        0 1 2 3 4    0 1 2 3      0 1 2 3 4
    address    0 1 2 3 4    5 6 7 8      9 ..
    tokens     [0,3) [90,92)  ..                      runs of consecutive tokens

Every token has one home row (the rule `layouts`), so its address identifies it. A tile of adjacent home rows is one run
of addresses but may be hundreds of runs of tokens: if sequences are cut over all ranks, a rank's rows hold a piece of
every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.plan.tables import Layout

_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Homes:
    """Home rows of all ranks.

    rows: int64 [ranks], row counts. first: int64 [ranks], address of each rank's row 0. starts: int64 [runs + 1],
    addresses at which runs of consecutive tokens begin, and the end. tokens: int64 [runs], first token of each run."""

    rows: Ints
    first: Ints
    starts: Ints
    tokens: Ints

    def spans(self, address: int, rows: int) -> list[tuple[int, int]]:
        """(first token, end) of the token runs in an address range; addresses beyond the axis have none."""
        first, last = np.searchsorted(self.starts, (address, address + rows - 1), side="right") - 1
        result = []
        for run in range(max(int(first), 0), min(int(last) + 1, len(self.tokens))):
            start, end = self.starts[run : run + 2].tolist()
            shift = int(self.tokens[run]) - start
            result.append((max(start, address) + shift, min(end, address + rows) + shift))
        return result

    def describe(self, address: int, rows: int) -> str:
        """Describes the tokens of an address range in words."""
        spans = [f"[{begin}, {end})" for begin, end in self.spans(address, rows)]
        text = ", ".join(spans[:_SHOWN]) + ", …" * (len(spans) > _SHOWN)
        return f"tokens {text}" if spans else "no tokens"


def find_homes(layout: Layout) -> Homes:
    """Builds the axis of a layout that holds every token once."""
    spans, rows = layout.spans, np.ascontiguousarray(layout.rows_per_rank, np.int64)
    rank = spans.rank_of_row()
    row, token, length = (np.asarray(spans[name], np.int64) for name in ("row", "token", "length"))
    order = np.lexsort((row, rank))
    first = np.cumsum(rows) - rows
    start, token, length = (first[rank] + row)[order], token[order], length[order]
    is_start = np.append(True, token[1:] != (token + length)[:-1])[: len(token)]
    return Homes(rows, first, np.append(start[is_start], rows.sum()), token[is_start])
