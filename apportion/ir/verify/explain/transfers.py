"""Finds unmatched sends and receives, rounds that do not ascend, and launches and waits without a partner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Ints, group_of
from apportion.ir.isa import ALL_TO_ALL, Op
from apportion.ir.tensors import HEADLESS, TENSOR_NAMES, Tensor
from apportion.ir.verify.report import Violation, at_instruction, span
from apportion.ir.verify.view import Program

RULE = "transfers"


def mismatches(program: Program) -> Iterator[Violation]:
    """Violations of the rule `transfers`."""
    yield from _check_order(program)
    yield from _check_waits(program)
    yield from _check_rounds(program)
    yield from _check_pairs(program)


def _check_order(program: Program) -> Iterator[Violation]:
    """Checks that rounds ascend in launch order on every rank, over all channels."""
    instructions = program["instructions"]
    launches = np.flatnonzero(instructions["op"] == Op.LAUNCH)
    rank, number = program.rank_of[launches], instructions["round"][launches]
    for i in np.flatnonzero((rank[1:] == rank[:-1]) & (number[1:] <= number[:-1])).tolist():
        message = (
            f"launches round {number[i + 1]} after round {number[i]} of instruction "
            f"{instructions.rank_and_row(int(launches[i]))[1]}: rounds must ascend"
        )
        yield at_instruction(RULE, program, int(launches[i + 1]), message)


def _check_waits(program: Program) -> Iterator[Violation]:
    """Checks that each launch has one later `wait`."""
    instructions, partner = program["instructions"], program.partner
    waits = np.flatnonzero(instructions["op"] == Op.WAIT)
    launch = partner[waits]
    for wait in waits[(launch < 0) | (launch > waits)].tolist():
        message = f"waits for round {instructions['round'][wait]}, which the rank has not launched before"
        yield at_instruction(RULE, program, wait, message)
    for wait in waits[(launch >= 0) & (partner[launch] != waits)].tolist():
        message = f"waits for round {instructions['round'][wait]} a second time"
        yield at_instruction(RULE, program, wait, message)
    launches = np.flatnonzero(instructions["op"] == Op.LAUNCH)
    for index in launches[partner[launches] < 0].tolist():
        message = f"launches round {instructions['round'][index]}, which the rank never waits for"
        yield at_instruction(RULE, program, index, message)


def _check_rounds(program: Program) -> Iterator[Violation]:
    """Checks that all ranks of a round agree on channel and mode, that every rank launches each all-to-all, and that no
    launch is idle."""
    instructions, launch_rounds = program["instructions"], program.launch_rounds
    order = launch_rounds.order
    turn = group_of(np.diff(launch_rounds.ptr))
    first = order[launch_rounds.ptr[turn]]
    for name in ("channel", "mode"):
        for i in np.flatnonzero(instructions[name][order] != instructions[name][first]).tolist():
            message = (
                f"launches round {launch_rounds.rounds[turn[i]]} with {name} {instructions[name][order[i]]}, but rank "
                f"{program.rank_of[first[i]]} with {name} {instructions[name][first[i]]}"
            )
            yield at_instruction(RULE, program, int(order[i]), message)
    idle = (instructions["mode"][order] & ALL_TO_ALL == 0) & (instructions["count"][order] == 0)
    for index in order[idle].tolist():
        message = f"launches round {instructions['round'][index]} with no transfers, but not as an all-to-all"
        yield at_instruction(RULE, program, index, message)
    yield from _check_ranks(program)


def _check_ranks(program: Program) -> Iterator[Violation]:
    instructions, launch_rounds = program["instructions"], program.launch_rounds
    for i in np.flatnonzero(np.diff(launch_rounds.ptr) < program.ranks).tolist():
        group = launch_rounds.order[launch_rounds.ptr[i] : launch_rounds.ptr[i + 1]]
        if (instructions["mode"][group] & ALL_TO_ALL).any():
            missing = np.setdiff1d(np.arange(program.ranks), program.rank_of[group])
            message = (
                f"round {launch_rounds.rounds[i]} is an all-to-all, but {len(missing)} ranks do not launch it; "
                f"the first is rank {missing[0]}"
            )
            yield Violation(RULE, int(missing[0]), program.kind, program.phase, None, message)


def _check_pairs(program: Program) -> Iterator[Violation]:
    """Checks that both sides of a transfer agree; an unmatched transfer is reported at its own instruction."""
    transfers, mate = program["transfers"], program.matches.mate
    receives = np.flatnonzero((transfers["send"] == 0) & (mate >= 0))
    mismatch = ~program.matches.agreed[receives]
    is_own = transfers["peer"] == transfers.rank_of_row()
    rows = np.concatenate([np.flatnonzero(is_own), receives[mismatch], np.flatnonzero((mate < 0) & ~is_own)])
    instruction = program.instruction_of("transfers") if len(rows) else mate
    for t in rows.tolist():
        yield at_instruction(RULE, program, int(instruction[t]), _mismatch(program, t, instruction))


def _mismatch(program: Program, t: int, instruction: Ints) -> str:
    transfers = program["transfers"]
    peer, mate = int(transfers["peer"][t]), int(program.matches.mate[t])
    number = program["instructions"]["round"][instruction[t]]
    verb, other = ("sends", "receives") if transfers["send"][t] else ("receives", "sends")
    prefix = f"{verb} {_tile(program, t)} in round {number}"
    if peer == transfers.rank_and_row(t)[0]:
        return f"{prefix} to or from itself: use copy"
    if mate >= 0:
        return f"{prefix}, but rank {peer} {other} {_tile(program, mate)}"
    return f"{prefix}, but rank {peer} {other} no matching tile"


def _tile(program: Program, t: int) -> str:
    transfers, operands = program["transfers"], program["operands"]
    values = operands.at(int(transfers["operand"][t] + operands.ptr[transfers.rank_and_row(t)[0]]))
    tensor = Tensor(values["tensor"])
    heads = "" if tensor in HEADLESS or not values["heads"] else f" of head set {values['heads']}"
    return f"{TENSOR_NAMES[tensor]} rows {span(values['row'], values['rows'])}{heads}"
