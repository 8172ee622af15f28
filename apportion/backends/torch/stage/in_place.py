"""Destinations of complete work rows that attention writes directly into messages or results.

    sum's work rows    ├──── sent to 2 ────┤── delivered ──┤── sent to 3 ──┤
    written to         a tile of a message   home rows       a tile of a message

The rows follow from the program (`ir.plan.fusion`), the destinations from the places of messages in staging.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from apportion.backends.interp import Operand, Program
from apportion.backends.torch.memory.rounds import Message, Rounds, tile_arrays
from apportion.backends.torch.stage.worklists import ROLES
from apportion.ir.isa import RESULTS, Op
from apportion.ir.plan.fusion import CompleteRows
from apportion.ir.plan.messages import ALIGNMENT
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space


class DirectRows(NamedTuple):
    """Complete work rows [row, stop) of a sum that a task writes to tile `tile` of a message, or to the results if it
    has no message. The columns before `operand` are those of `worklists.Targets`."""

    row: int
    stop: int
    staged: int
    first: int
    columns: int
    at: int
    lse: int
    operand: Operand
    message: Message | None = None
    tile: int = 0


def direct_writes(
    programs: ProgramSet, program: Program, hidden: int, rounds: Rounds, complete: Mapping[str, CompleteRows]
) -> dict[str, list[DirectRows]]:
    """Column of the tasks' list -> the complete work rows of its sum, with their destinations. hidden: width of X."""
    tiles: dict[int, tuple[Message, int]] = {}
    for step in program.steps:
        if step.op == Op.LAUNCH and step.mode & RESULTS:
            for message in rounds.of_step[step.index].sends:
                tiles |= {index: (message, tile) for tile, (index, _) in enumerate(message.tiles)}
    sent, source, target = (
        programs[table][name] for table, name in (("transfers", "operand"), ("rowops", "a"), ("rowops", "c"))
    )
    result: dict[str, list[DirectRows]] = {}
    for column, ranges in complete.items():
        result[column] = entries = []
        for position, row, stop in zip(*(part.tolist() for part in ranges.sent), strict=True):
            operand, (message, tile) = program.operands[sent[position]], tiles[int(sent[position])]
            start = message.at + message.tiles[tile][1]
            offsets = (offset for offset, _ in tile_arrays(operand, program.header, hidden, True))
            at, lse = (*((start + offset) // ALIGNMENT for offset in offsets), 0)[:2]
            place = 1, row - operand.row, len(operand.heads), at, lse
            entries.append(DirectRows(row, stop, *place, operand, message, tile))
        for position, row, stop in zip(*(part.tolist() for part in ranges.delivered), strict=True):
            operand, home = (program.operands[side[position]] for side in (source, target))
            place = 0, home.row + row - operand.row, program.header.heads_of(operand.tensor), 0, 0
            entries.append(DirectRows(row, stop, *place, operand))
    return result


def earliest_writes(programs: ProgramSet, complete: Mapping[str, CompleteRows]) -> dict[int, int]:
    """Launch -> the first instruction that may write rows into its messages."""
    instructions = programs["instructions"]
    earliest: dict[int, int] = {}
    launch_of = instruction_of(instructions["op"], instructions.wide("count"), "transfers")
    for roles in ROLES.values():
        if roles.owner not in complete:
            continue
        ranges, table = complete[roles.owner], programs[roles.table]
        instruction = instruction_of(instructions["op"], instructions.wide("count"), roles.table)
        work = programs["operands"]["space"][table[roles.owner][ranges.tasks.of]] == Space.WORK
        first = int(instruction[ranges.tasks.of[work]].min(initial=len(instructions)))
        for launch in np.unique(launch_of[ranges.sent.of]).tolist():
            earliest[launch] = min(first, earliest.get(launch, launch))
    return earliest
