"""Rules 3 and 5, told from what the interpreter of `flow.py` found.

Rule 3, `dataflow`: every row read was written, received and waited for, or is home; nothing is overwritten while it
is needed or being sent. Rule 5, `delivery`: every partial result and gradient reaches its home exactly once. Both
come from one pass, so violations of the two are ordered by when they happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from apportion.ir.arrays import Ints
from apportion.ir.plan.ops import NO_LIST
from apportion.ir.tensors import HEADLESS, PARTIALS, TENSOR_NAMES, Space, Tensor
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.interpreter import machine as f
from apportion.ir.verify.interpreter.cells import MemoryCells
from apportion.ir.verify.interpreter.flow import left_over
from apportion.ir.verify.interpreter.machine import NOWHERE
from apportion.ir.verify.report import Violation, at_instruction, span
from apportion.ir.verify.rules import coverage
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import HOME, Program

DATAFLOW, DELIVERY = "dataflow", "delivery"
_END = 2**60  # after every instruction

_MESSAGES = {
    f.READ_UNWRITTEN: (DATAFLOW, "reads {rows}, which nothing has written"),
    f.READ_IN_FLIGHT: (DATAFLOW, "reads {rows}, which a receive not yet waited for is filling"),
    f.READ_OTHER_HEADS: (DATAFLOW, "reads {rows} as heads of unit {wanted}, they hold unit {holds}"),
    f.READ_PARTIAL: (DATAFLOW, "reads {rows}, which hold a partial and no finished value"),
    f.WRITE_SENDING: (DATAFLOW, "overwrites {rows}, which a send not yet waited for is reading"),
    f.WRITE_IN_FLIGHT: (DATAFLOW, "writes {rows}, which a receive not yet waited for is filling"),
    f.NOT_SAME_TOKENS: (DATAFLOW, "pairs {rows} of {held} with {other}"),
    f.ADD_TO_UNWRITTEN: (DATAFLOW, "adds to {rows}, which nothing has written"),
    f.UNREAD_LOST: (DATAFLOW, "overwrites {rows} of {held}, which nobody has read since they came"),
    f.PARTIAL_SPENT: (DELIVERY, "uses {rows}, whose partial was merged, added or sent before"),
    f.PARTIAL_LOST: (
        DELIVERY,
        "overwrites {rows}, which hold a partial of {held} that has not reached its home",
    ),
    f.PARTIAL_MIXED: (DELIVERY, "adds {other} to {rows}, which hold {held}"),
    f.NOT_A_PARTIAL: (DELIVERY, "takes {rows} as a partial, they hold a finished value"),
    f.WRONG_HOME: (DELIVERY, "writes {other} to {rows}, the home of {held}"),
    f.ALREADY_FINISHED: (DELIVERY, "changes {rows}, which are finished"),
    f.TWICE: (DELIVERY, "computes {rows} a second time"),
}


def check_dataflow(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `dataflow`."""
    yield from _faults(subject, DATAFLOW)
    for program in subject.runnable:
        if coverage.violations(subject, program) and not len(subject.flow(program).faults):
            for fault in subject.exact_flow(program).suspects:
                yield _violation(subject, program, fault)


def check_delivery(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `delivery`."""
    yield from _faults(subject, DELIVERY)
    for program in subject.runnable:
        yield from _undelivered(program, subject.flow(program).memory, subject.homes)


def _faults(subject: Subject, rule: str) -> Iterator[Violation]:
    for program in subject.runnable:
        faults = subject.flow(program).faults
        for fault in faults:
            order = int(program.clock[fault[f.AT]])
            if _MESSAGES[int(fault[f.CODE])][0] == rule:
                yield replace(_violation(subject, program, fault), order=order)


def _violation(subject: Subject, program: Program, fault: Ints) -> Violation:
    code, instruction, item, x, low, high, holds, wanted = (int(value) for value in fault)
    x -= subject.flow(
        program
    ).memory.slots  # the line of operand 0, by which the interpreter numbers operands
    tensor = Tensor(int(program["operands"]["tensor"][x]))
    rule, message = _MESSAGES[code]
    if code == f.WRONG_HOME and tensor not in PARTIALS:
        rule = DATAFLOW
    if code != f.READ_OTHER_HEADS:
        held, other = (_tokens(subject.homes, offset, low, high) for offset in (holds, wanted))
    else:
        held = other = ""
    text = message.format(
        rows=_rows(program, x, low, high), held=held, other=other, holds=holds, wanted=wanted
    )
    found = at_instruction(rule, program, instruction, f"{_item(program, instruction, item)}{text}")
    unfed = code in (f.ADD_TO_UNWRITTEN, f.READ_UNWRITTEN) and tensor in PARTIALS
    return replace(found, cause="coverage" if unfed else "")


def _rows(program: Program, x: int, low: int, high: int) -> str:
    operand = program["operands"].at(x)
    tensor = Tensor(operand["tensor"])
    heads = "" if tensor in HEADLESS or not operand["heads"] else f" of head set {operand['heads']}"
    return (
        f"{TENSOR_NAMES[tensor]} {Space(operand['space']).name.lower()} rows {span(low, high - low)}{heads}"
    )


def _tokens(homes: Homes, offset: int, low: int, high: int) -> str:
    return "no tokens" if offset == NOWHERE else homes.describe(low + offset, high - low)


def _item(program: Program, instruction: int, item: int) -> str:
    number = int(program.list_of[instruction])
    if number == NO_LIST or int(program["instructions"]["count"][instruction]) < 2:
        return ""
    return f"item {item - int(program.starts[instruction])}: "


def _undelivered(program: Program, memory: MemoryCells, homes: Homes) -> Iterator[Violation]:
    """At the end no partial is left in work rows, and every home row that is owed was produced."""
    at, lanes = left_over(program, memory)
    rank, tensor, space, _ = memory.place(lanes)
    for i, cell in enumerate(memory.lines[at]):
        lost = int(space[i]) != HOME or Tensor(int(tensor[i])) not in program.owed
        describe = _left if lost else _unproduced
        yield describe(program, homes, cell, int(rank[i]), Tensor(int(tensor[i])), Space(int(space[i])))


def _left(program: Program, homes: Homes, cell: Ints, rank: int, tensor: Tensor, space: Space) -> Violation:
    low, high = int(cell[f.ROW]), int(cell[f.STOP])
    name = f"{TENSOR_NAMES[tensor]} {space.name.lower()} rows {span(low, high - low)}"
    held = _tokens(homes, int(cell[f.OFFSET]), low, high)
    message = f"ends with a partial of {held} in {name}, which never reaches its home"
    return Violation(DELIVERY, rank, program.kind, program.phase, None, message, order=_END)


def _unproduced(
    program: Program, homes: Homes, cell: Ints, rank: int, tensor: Tensor, space: Space
) -> Violation:
    low, high = int(cell[f.ROW]), int(cell[f.STOP])
    held = _tokens(homes, int(cell[f.HOME_OFFSET]), low, high)
    rows = f"{TENSOR_NAMES[tensor]} {space.name.lower()} rows {span(low, high - low)} of {held}"
    state = "a partial that was not finished" if cell[f.STATE] == f.LIVE else "no result"
    message = f"ends with {state} in {rows}"
    return Violation(DELIVERY, rank, program.kind, program.phase, None, message, order=_END, cause="coverage")
