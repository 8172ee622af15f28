"""Violation messages for the walk's faults, the first fault of each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from apportion._core.verify import NOWHERE, Code, Fault
from apportion.ir.errors import CapacityError
from apportion.ir.isa import OPERAND_COLUMNS
from apportion.ir.plan.ops import starts_of
from apportion.ir.tensors import HEADLESS, PARTIALS, TENSOR_NAMES, Space, Tensor
from apportion.ir.verify.explain.operands import misfits
from apportion.ir.verify.explain.transfers import mismatches
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.report import Violation, at_instruction, span
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

_END = 2**60  # after every instruction
_DATAFLOW, _DELIVERY, _RESULTS, _HEADS = "dataflow", "delivery", "results", "heads"

_MESSAGES = {
    Code.READ_UNWRITTEN: (_DATAFLOW, "reads {rows}, which nothing has written"),
    Code.READ_IN_FLIGHT: (_DATAFLOW, "reads {rows}, which a pending receive is still filling"),
    Code.READ_PARTIAL: (_DATAFLOW, "reads {rows}, which hold a partial instead of a finished value"),
    Code.READ_OTHER_HEADS: (
        _DATAFLOW,
        "takes {rows} as heads of set {wanted}, but they hold heads of set {holds}",
    ),
    Code.WRITE_SENDING: (_DATAFLOW, "overwrites {rows}, which a pending send is still reading"),
    Code.WRITE_IN_FLIGHT: (_DATAFLOW, "writes {rows}, which a pending receive is still filling"),
    Code.WRITE_GIVEN: (_DATAFLOW, "writes {rows}, which are inputs of the program"),
    Code.ADD_TO_UNWRITTEN: (_DATAFLOW, "adds to {rows}, which nothing has written"),
    Code.NOT_SAME_TOKENS: (_DATAFLOW, "pairs {rows} of {held} with {other}"),
    Code.PARTIAL_SPENT: (_DELIVERY, "uses {rows}, whose partial was merged, added or sent before"),
    Code.PARTIAL_LOST: (
        _DELIVERY,
        "overwrites {rows}, which hold a partial of {held} that has not reached its home",
    ),
    Code.PARTIAL_MIXED: (_DELIVERY, "adds {other} to {rows}, which hold {held}"),
    Code.PARTIAL_LEFT: (_DELIVERY, "ends with a partial of {held} in {rows}, which never reaches its home"),
    Code.PARTIAL_FROM_HOME: (_DELIVERY, "moves a partial out of {rows}: partials leave only work rows"),
    Code.WRONG_HOME: (_DELIVERY, "writes {other} to {rows}, the home of {held}"),
    Code.WRITTEN_TWICE: (_DELIVERY, "changes {rows}, which are finished"),
    Code.NOT_FINISHED: (_DELIVERY, "ends with an unfinished partial in {rows} of {held}"),
    Code.NOT_PRODUCED: (_DELIVERY, "ends with no result in {rows} of {held}"),
    Code.NO_RESULT: (_RESULTS, "{rows} cannot be a result: sums go from work rows to home rows"),
    Code.RESULT_TOUCHED: (_RESULTS, "uses {rows}, which arrive as results"),
    Code.RESULT_HEADS: (_RESULTS, "{rows} receive results in {holds} of {wanted} heads: must be all or none"),
    Code.OTHER_KEYS: (_HEADS, "query head {wanted} needs KV head {holds}, which its keys do not have"),
}


def violations(subject: Subject) -> tuple[Violation, ...]:
    """Violations of the rules that the walk checks; none if it proved them."""
    if subject.holds:
        return ()
    return tuple(
        violation
        for program in subject.programs
        for violation in subject.cached("words", program, partial(_program_violations, subject))
    )


def _program_violations(subject: Subject, program: Program) -> tuple[Violation, ...]:
    """Operand errors, else transfer mismatches, else the faults at which ranks stopped."""
    result = list(misfits(program)) or list(mismatches(program))
    if result:
        return tuple(result)
    try:
        trace = subject.trace(program)
    except CapacityError as error:
        message = f"cannot be verified: {error}"
        return (Violation("operands", None, program.kind, program.phase, None, message),)
    fault_violations = (
        _violation(program, subject.homes, fault) for fault in (trace.faults if trace else ())
    )
    return tuple(sorted(fault_violations, key=lambda violation: violation.order))


def _violation(program: Program, homes: Homes, fault: Fault) -> Violation:
    tensor, space = Tensor(fault.tensor), Space(fault.space)
    rule, template = _MESSAGES.get(fault.code, ("operands", "has a form that the verifier does not support"))
    if fault.code == Code.WRONG_HOME and tensor not in PARTIALS:
        rule = _DATAFLOW
    if fault.code == Code.WRITTEN_TWICE and tensor not in PARTIALS:
        template = "computes {rows} a second time"
    rows = f"{TENSOR_NAMES[tensor]} {space.name.lower()} rows {span(fault.low, fault.high - fault.low)}"
    rows += _heads(program, fault)
    held_tokens, other = (_tokens(homes, address, fault) for address in (fault.holds, fault.wanted))
    number, expected = _head_numbers(program, fault)
    message = template.format(rows=rows, held=held_tokens, other=other, holds=number, wanted=expected)
    if fault.instruction < 0:
        cause = "coverage" if fault.code in (Code.NOT_PRODUCED, Code.NOT_FINISHED) else ""
        location = rule, fault.rank, program.kind, program.phase, None
        return Violation(*location, message, order=_END, cause=cause)
    lacks_sum = fault.code in (Code.ADD_TO_UNWRITTEN, Code.READ_UNWRITTEN) and tensor in PARTIALS
    violation = at_instruction(rule, program, fault.instruction, f"{_item(program, fault)}{message}")
    order = int(program.clock[fault.instruction])
    return replace(violation, order=order, cause="coverage" if lacks_sum else "")


def _heads(program: Program, fault: Fault) -> str:
    """The head set of the operand that has the rows, unless it has all heads."""
    name = program.list_name(fault.instruction)
    if name is None:
        return ""
    operands, rows = program["operands"], program[name]
    for column in OPERAND_COLUMNS[name]:
        x = int(rows[column][fault.item] + operands.ptr[fault.rank])
        tensor, space, row, count, _, heads = operands.values[:, x].tolist()
        if (fault.tensor, fault.space) == (tensor, space) and row <= fault.low < row + count and heads:
            return f" of head set {heads}" * (Tensor(tensor) not in HEADLESS)
    return ""


def _tokens(homes: Homes, address: int, fault: Fault) -> str:
    return "no tokens" if address == NOWHERE else homes.describe(address, fault.high - fault.low)


def _head_numbers(program: Program, fault: Fault) -> tuple[int, int]:
    """The two numbers in a message about heads."""
    if fault.code == Code.RESULT_HEADS:
        return fault.holds.bit_count(), fault.wanted.bit_count()
    if fault.code != Code.OTHER_KEYS:
        return fault.holds, fault.wanted
    queries, keys = program.q_sets.members[fault.wanted], program.kv_sets.members[fault.holds]
    key_heads = queries // (program.q_sets.heads // program.kv_sets.heads)
    index = int(np.flatnonzero(~np.isin(key_heads, keys))[0])
    return int(key_heads[index]), int(queries[index])


def _item(program: Program, fault: Fault) -> str:
    """Names the faulty row of an instruction, if it has several rows."""
    op, count = (program["instructions"][name] for name in ("op", "count"))
    if program.list_name(fault.instruction) is None or count[fault.instruction] < 2:
        return ""
    return f"item {fault.item - int(starts_of(op, count)[fault.instruction])}: "
