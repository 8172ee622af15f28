"""Finds which rank computes which part of the mask: the tasks of a plan's programs, as bands of batch tokens.

A plan does not record the tokens of work rows; they follow from the dataflow, which the verifier traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import VerifyError
from apportion.ir.plan.ops import instruction_of
from apportion.ir.verify.subject import Subject


class Pieces(NamedTuple):
    """Pieces of attention. bands: int64 [6, pieces]. All others int64 [pieces]: rank; instruction, its number on the
    rank; heads, the head set of the queries (0: all)."""

    bands: Ints
    rank: Ints
    instruction: Ints
    heads: Ints


def pieces(plan: Plan) -> Iterator[tuple[tuple[str, str], Pieces]]:
    """Yields ((kind, phase), its pieces). Raises VerifyError for rows read before any write, CapacityError for too many
    pieces."""
    subject = Subject(plan)
    for program in subject.programs:
        tasks = subject.traced_tasks(program)
        if not tasks.complete:
            rule = "reads rows that were never written; verify the plan"
            raise VerifyError(f"{program.kind} {program.phase} {rule}")
        table = program["instructions"]
        number = instruction_of(table["op"], table["count"], program.task_list)[tasks.task]
        rank = program[program.task_list].rank_of_row()[tasks.task]
        first = table.ptr
        heads = np.asarray(tasks.heads, np.int64)
        yield (program.kind, program.phase), Pieces(tasks.bands, rank, number - first[rank], heads)


def columns(parts: Pieces) -> dict[str, Ints]:
    """Columns for drawing: first query and key, sizes in tokens, and how many diagonals are cut off at two corners."""
    q0, q1, k0, k1, dmin, dmax = parts.bands
    return {
        "query": q0,
        "rows": q1 - q0,
        "key": k0,
        "keys": k1 - k0,
        "future": np.maximum(dmin - (q0 - k1 + 1), 0),
        "past": np.maximum((q1 - 1 - k0) - dmax, 0),
        "rank": parts.rank,
        "instruction": parts.instruction,
        "heads": parts.heads,
    }
