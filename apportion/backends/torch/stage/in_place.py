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
from apportion.ir.plan.fusion import Complete, gaps
from apportion.ir.plan.messages import ALIGNMENT
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space


@dataclass(frozen=True)
class DirectRows:
    """Complete work rows [row, stop) of a sum, of an operand of this number, that a task writes to their destination: a
    tile of a message from its row `first` on, or, without a message, the results from that home row on."""

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
        complete: Mapping[str, Complete],
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
        found: dict[str, list[DirectRows]] = {}
        for column, one in complete.items():
            found[column] = listed = []
            for at, row, stop in zip(*(part.tolist() for part in one.sent), strict=True):
                number = int(sent[at])
                operand, (message, tile) = program.operands[number], tiles[number]
                listed.append(DirectRows(row, stop, row - operand.row, number, operand, message, tile))
            for at, row, stop in zip(*(part.tolist() for part in one.delivered), strict=True):
                number, home = int(source[at]), program.operands[int(target[at])]
                operand = program.operands[number]
                listed.append(DirectRows(row, stop, home.row + row - operand.row, number, operand))
        return DirectWrites(found, arenas)

    def targets(self, column: str) -> Targets:
        """The destinations of the rows of one sum."""
        return Targets.of([self._target(one) for one in self.rows.get(column, ())])

    def _target(self, placed: DirectRows) -> tuple[int, int, int, int, int, int, int]:
        header, message = self.arenas.header, placed.message
        if message is None:
            return placed.row, placed.stop, 0, placed.first, header.heads_of(placed.operand.tensor), 0, 0
        at, *beside = (at for at, _ in tile_arrays(placed.operand, header, self.arenas.hidden, True))
        start = message.at + message.tiles[placed.tile][1]
        lse = start + beside[0] if beside else 0
        columns = len(placed.operand.heads)
        return placed.row, placed.stop, 1, placed.first, columns, (start + at) // ALIGNMENT, lse // ALIGNMENT

    def rest(self, number: int, operand: Operand) -> list[tuple[int, int]]:
        """The rows of the operand of this number that are not written in place."""
        return gaps(self._done.get(number, ()), operand.row, operand.row + operand.rows)

    @cached_property
    def _done(self) -> dict[int, list[tuple[int, int]]]:
        """Number of an operand -> the ranges written in place, ascending."""
        found: dict[int, list[tuple[int, int]]] = {}
        for one in sorted((one for rows in self.rows.values() for one in rows), key=lambda one: one.row):
            found.setdefault(one.number, []).append((one.row, one.stop))
        return found


def written_from(programs: ProgramSet, complete: Mapping[str, Complete]) -> dict[int, int]:
    """Launch -> the first instruction that may write rows into its messages."""
    instructions = programs["instructions"]
    found: dict[int, int] = {}
    launch_of = instruction_of(instructions["op"], instructions.wide("count"), "transfers")
    for roles in ROLES.values():
        if roles.owner not in complete:
            continue
        one, table = complete[roles.owner], programs[roles.table]
        at = instruction_of(instructions["op"], instructions.wide("count"), roles.table)
        work = programs["operands"]["space"][table[roles.owner][one.tasks.of]] == Space.WORK
        first = int(at[one.tasks.of[work]].min(initial=len(instructions)))
        for launch in np.unique(launch_of[one.sent.of]).tolist():
            found[launch] = min(first, found.get(launch, launch))
    return found
