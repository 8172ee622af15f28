"""What the walk saw, in words: of each rank the first thing that is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from apportion.ir.errors import CapacityError
from apportion.ir.isa import OPERAND_COLUMNS
from apportion.ir.tensors import HEADLESS, PARTIALS, TENSOR_NAMES, Space, Tensor
from apportion.ir.verify.explain.operands import misfits
from apportion.ir.verify.explain.transfers import mismatches
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.report import Violation, at_instruction, span
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program
from apportion.ir.verify.walk import judge as w
from apportion.ir.verify.walk.trace import Fault

_END = 2**60  # after every instruction
_DATAFLOW, _DELIVERY, _RESULTS, _HEADS = "dataflow", "delivery", "results", "heads"

_MESSAGES = {
    w.READ_UNWRITTEN: (_DATAFLOW, "reads {rows}, which nothing has written"),
    w.READ_IN_FLIGHT: (_DATAFLOW, "reads {rows}, which a receive not yet waited for is filling"),
    w.READ_PARTIAL: (_DATAFLOW, "reads {rows}, which hold a partial and no finished value"),
    w.READ_OTHER_HEADS: (_DATAFLOW, "takes {rows} as heads of set {wanted}, they hold heads of set {holds}"),
    w.WRITE_SENDING: (_DATAFLOW, "overwrites {rows}, which a send not yet waited for is reading"),
    w.WRITE_IN_FLIGHT: (_DATAFLOW, "writes {rows}, which a receive not yet waited for is filling"),
    w.WRITE_GIVEN: (_DATAFLOW, "writes {rows}, which the program is given"),
    w.ADD_TO_UNWRITTEN: (_DATAFLOW, "adds to {rows}, which nothing has written"),
    w.NOT_SAME_TOKENS: (_DATAFLOW, "pairs {rows} of {held} with {other}"),
    w.MANY_SENDS: (
        _DATAFLOW,
        "sends {rows} while 7 rounds not yet waited for send them: more are not followed",
    ),
    w.MANY_RUNS: (_DATAFLOW, "takes {rows}, which are of more runs of tokens than are followed"),
    w.PARTIAL_SPENT: (_DELIVERY, "uses {rows}, whose partial was merged, added or sent before"),
    w.PARTIAL_LOST: (
        _DELIVERY,
        "overwrites {rows}, which hold a partial of {held} that has not reached its home",
    ),
    w.PARTIAL_MIXED: (_DELIVERY, "adds {other} to {rows}, which hold {held}"),
    w.PARTIAL_LEFT: (_DELIVERY, "ends with a partial of {held} in {rows}, which never reaches its home"),
    w.PARTIAL_FROM_HOME: (_DELIVERY, "moves a partial out of {rows}: partials leave work rows only"),
    w.WRONG_HOME: (_DELIVERY, "writes {other} to {rows}, the home of {held}"),
    w.WRITTEN_TWICE: (_DELIVERY, "changes {rows}, which are finished"),
    w.NOT_FINISHED: (_DELIVERY, "ends with a partial that was not finished in {rows} of {held}"),
    w.NOT_PRODUCED: (_DELIVERY, "ends with no result in {rows} of {held}"),
    w.NO_RESULT: (_RESULTS, "{rows} cannot be a result: sums go from work rows to home rows"),
    w.RESULT_TOUCHED: (_RESULTS, "uses {rows}, which arrive as results"),
    w.RESULT_HEADS: (_RESULTS, "{rows} get results in {holds} heads of {wanted}: in all of them or in none"),
    w.OTHER_KEYS: (_HEADS, "query head {wanted} needs KV head {holds}, which its keys do not have"),
}


def violations(subject: Subject) -> tuple[Violation, ...]:
    """Of the rules that the walk proves: none where it did."""
    if subject.holds:
        return ()
    return tuple(
        one
        for program in subject.programs
        for one in subject.once("words", program, partial(_of_program, subject))
    )


def _of_program(subject: Subject, program: Program) -> tuple[Violation, ...]:
    """Operands that do not fit, else sends and receives that do not meet, else where ranks stopped."""
    found = list(misfits(program)) or list(mismatches(program))
    if found:
        return tuple(found)
    try:
        faults = subject.trace(program).faults
    except CapacityError as error:
        message = f"cannot be verified: {error}"
        return (Violation("operands", None, program.kind, program.phase, None, message),)
    told = (_violation(program, subject.homes, fault) for fault in faults)
    return tuple(sorted(told, key=lambda violation: violation.order))


def _violation(program: Program, homes: Homes, fault: Fault) -> Violation:
    tensor, space = Tensor(fault.place // 2), Space(fault.place % 2)
    rule, words = _MESSAGES.get(fault.code, ("operands", "is of no form that the verifier follows"))
    if fault.code == w.WRONG_HOME and tensor not in PARTIALS:
        rule = _DATAFLOW
    if fault.code == w.WRITTEN_TWICE and tensor not in PARTIALS:
        words = "computes {rows} a second time"
    rows = f"{TENSOR_NAMES[tensor]} {space.name.lower()} rows {span(fault.low, fault.high - fault.low)}"
    rows += _heads(program, fault)
    held, other = (_tokens(homes, address, fault) for address in (fault.holds, fault.wanted))
    holds, wanted = _numbers(program, fault)
    message = words.format(rows=rows, held=held, other=other, holds=holds, wanted=wanted)
    if fault.instruction < 0:
        cause = "coverage" if fault.code in (w.NOT_PRODUCED, w.NOT_FINISHED) else ""
        place = rule, fault.rank, program.kind, program.phase, None
        return Violation(*place, message, order=_END, cause=cause)
    unfed = fault.code in (w.ADD_TO_UNWRITTEN, w.READ_UNWRITTEN) and tensor in PARTIALS
    found = at_instruction(rule, program, fault.instruction, f"{_item(program, fault)}{message}")
    order = int(program.clock[fault.instruction])
    return replace(found, order=order, cause="coverage" if unfed else "")


def _heads(program: Program, fault: Fault) -> str:
    """The head set of the operand that names the rows, where it has not all heads."""
    name = program.list_name(fault.instruction)
    if name is None:
        return ""
    operands, rows = program["operands"], program[name]
    for column in OPERAND_COLUMNS[name]:
        x = int(rows[column][fault.item] + operands.ptr[fault.rank])
        tensor, space, row, count, _, heads = operands.values[:, x].tolist()
        if fault.place == 2 * tensor + space and row <= fault.low < row + count and heads:
            return f" of head set {heads}" * (Tensor(tensor) not in HEADLESS)
    return ""


def _tokens(homes: Homes, address: int, fault: Fault) -> str:
    return "no tokens" if address <= w.NOWHERE else homes.describe(address, fault.high - fault.low)


def _numbers(program: Program, fault: Fault) -> tuple[int, int]:
    """The two numbers of a message about heads."""
    if fault.code == w.RESULT_HEADS:
        return (fault.holds & ~w.TOUCHED).bit_count(), fault.wanted.bit_count()
    if fault.code != w.OTHER_KEYS:
        return fault.holds, fault.wanted
    queries, keys = program.q_sets.members[fault.wanted], program.kv_sets.members[fault.holds]
    own = queries // (program.q_sets.heads // program.kv_sets.heads)
    lacking = int(np.flatnonzero(~np.isin(own, keys))[0])
    return int(own[lacking]), int(queries[lacking])


def _item(program: Program, fault: Fault) -> str:
    """Which row of an instruction's list, where it has several."""
    if (
        program.list_name(fault.instruction) is None
        or program["instructions"]["count"][fault.instruction] < 2
    ):
        return ""
    return f"item {fault.item - int(program.starts[fault.instruction])}: "
