"""Destinations of complete work rows that attention writes directly into messages or results.

    sum's work rows    ├──── sent to 2 ────┤── delivered ──┤── sent to 3 ──┤
    written to         a tile of a message   home rows       a tile of a message

The rows follow from the program (`ir.plan.fusion`), the destinations from the places of messages in staging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.backends.interp import Operand, Program
from apportion.backends.torch.memory.arenas import Arenas
from apportion.backends.torch.memory.rounds import Message, Rounds, tile_arrays
from apportion.backends.torch.stage.worklists import ROLES, Targets
from apportion.ir.isa import RESULTS, Op
from apportion.ir.plan.fusion import CompleteRows, gaps
from apportion.ir.plan.messages import ALIGNMENT
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space


@dataclass(frozen=True)
class DirectRows:
    """Complete work rows [row, stop) of a sum that a task writes to a tile of a message, from the tile's row `first`
    on, or, if there is no message, to the results from home row `first` on. number: index of `operand`."""

    row: int
    stop: int
    first: int
    number: int
    operand: Operand
    message: Message | None = None
    tile: int = 0


@dataclass(frozen=True)
class DirectWrites:
    """All destinations. rows: column of the tasks' list -> the complete work rows of its sum, with destinations."""

    rows: Mapping[str, list[DirectRows]]
    arenas: Arenas

    @staticmethod
    def of(
        programs: ProgramSet,
        program: Program,
        arenas: Arenas,
        rounds: Rounds,
        complete: Mapping[str, CompleteRows],
    ) -> DirectWrites:
        tiles: dict[int, tuple[Message, int]] = {}
        for step in program.steps:
            if step.op == Op.LAUNCH and step.mode & RESULTS:
                for message in rounds.of_step[step.index].sends:
                    tiles |= {index: (message, tile) for tile, (index, _) in enumerate(message.tiles)}
        sent, source, target = (
            programs[table][name]
            for table, name in (("transfers", "operand"), ("rowops", "a"), ("rowops", "c"))
        )
        result: dict[str, list[DirectRows]] = {}
        for column, ranges in complete.items():
            result[column] = entries = []
            for position, row, stop in zip(*(part.tolist() for part in ranges.sent), strict=True):
                number = int(sent[position])
                operand, (message, tile) = program.operands[number], tiles[number]
                entries.append(DirectRows(row, stop, row - operand.row, number, operand, message, tile))
            for position, row, stop in zip(*(part.tolist() for part in ranges.delivered), strict=True):
                number, home = int(source[position]), program.operands[int(target[position])]
                operand = program.operands[number]
                entries.append(DirectRows(row, stop, home.row + row - operand.row, number, operand))
        return DirectWrites(result, arenas)

    def targets(self, column: str) -> Targets:
        """The destinations of the rows of one sum."""
        return Targets.of([self._target(entry) for entry in self.rows.get(column, ())])

    def _target(self, entry: DirectRows) -> tuple[int, int, int, int, int, int, int]:
        header, message = self.arenas.header, entry.message
        if message is None:
            return entry.row, entry.stop, 0, entry.first, header.heads_of(entry.operand.tensor), 0, 0
        offset, *lse_offsets = (
            offset for offset, _ in tile_arrays(entry.operand, header, self.arenas.hidden, True)
        )
        start = message.at + message.tiles[entry.tile][1]
        lse = start + lse_offsets[0] if lse_offsets else 0
        columns = len(entry.operand.heads)
        return entry.row, entry.stop, 1, entry.first, columns, (start + offset) // ALIGNMENT, lse // ALIGNMENT

    def remaining(self, number: int, operand: Operand) -> list[tuple[int, int]]:
        """The rows of operand `number` that are not written in place."""
        return gaps(self._ranges_by_operand.get(number, ()), operand.row, operand.row + operand.rows)

    @cached_property
    def _ranges_by_operand(self) -> dict[int, list[tuple[int, int]]]:
        """Number of an operand -> the ranges written in place, ascending."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for entry in sorted(
            (entry for rows in self.rows.values() for entry in rows), key=lambda entry: entry.row
        ):
            ranges.setdefault(entry.number, []).append((entry.row, entry.stop))
        return ranges


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
