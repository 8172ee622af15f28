"""Instructions are well formed: each op gets operands of its tensors, of equal rows and heads, inside their rows.

`ir.plan.wellformed` has checked codes, indexes and counts before; here operands meet layouts, arenas and ops.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.errors import DecodeError
from apportion.ir.isa import OP_NAMES, Op, Rule
from apportion.ir.plan import wellformed
from apportion.ir.plan.ops import IS_HEADLESS
from apportion.ir.plan.plain import diagonals_of
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.ir.verify.report import Violation, at_instruction, describe_operand, span
from apportion.ir.verify.scan import (
    BAND_EMPTY,
    BAND_WIDE,
    HEADS_DIFFER,
    NOT_HOME,
    OVERLAP,
    ROWS_DIFFER,
    TENSOR_WRONG,
    allowed,
)
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import WORK, Program

RULE, OPERANDS_RULE = "structure", "operands"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `structure`."""
    plan = subject.plan
    try:
        wellformed.check_header(plan.header)
        tokens = dict.fromkeys(plan.layouts, plan.request.batch.tokens)
        wellformed.check(
            plan.header,
            tokens,
            {name: layout.spans for name, layout in plan.layouts.items()},
            {key: program.tables for key, program in plan.programs.items()},
            {(move.source, move.target): move.table for move in plan.moves},
        )
    except DecodeError as error:
        yield Violation(RULE, None, None, None, None, str(error))
        return
    yield from _header(subject)


def check_operands(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `operands`."""
    for program in subject.programs:
        yield from _operands(program)
    for program in subject.programs:
        yield from _phase(program)
        yield from _lists(subject, program)


def _header(subject: Subject) -> Iterator[Violation]:
    """Every rank reads the header alone: it must repeat the request."""
    header, request = subject.plan.header, subject.plan.request
    facts = [
        ("ranks", header.ranks, request.cluster.ranks),
        ("kinds", tuple(header.kinds), tuple(request.batch.kinds)),
        ("v_head_dim", header.v_head_dim, request.model.v_head_dim or request.model.head_dim),
        *(
            (name, getattr(header, name), getattr(request.model, name))
            for name in ("q_heads", "kv_heads", "head_dim", "dtype", "sent_gradients")
        ),
    ]
    facts.append(("diagonals", dict(header.diagonals), diagonals_of(request.batch, header.kinds)))
    wanted = {(kind, phase) for kind in header.kinds for phase in ("forward", "backward")}
    facts.append(("programs", sorted(subject.plan.programs), sorted(wanted)))
    for name, ours, asked in facts:
        if ours != asked:
            message = f"the plan has {name} = {ours}, the request asks for {asked}"
            yield Violation(RULE, None, None, None, None, message)


def operand_violation(program: Program, operand: int, message: str) -> Violation:
    table = program["operands"]
    text = f"operand {table.local(operand)} ({describe_operand(table.at(operand))}) {message}"
    return Violation(OPERANDS_RULE, int(table.rank[operand]), program.kind, program.phase, None, text)


def _operands(program: Program) -> Iterator[Violation]:
    """Operands lie inside their home rows or arena."""
    if program.facts.misplaced == 0:
        return
    table = program["operands"]
    tensor, rank, work = table["tensor"], table.rank, table["space"] == WORK
    arena_rows, arena_heads = program.arena_rows[rank, tensor], program.arena_heads[rank, tensor]
    limit = np.where(work, arena_rows, program.home_rows[rank])
    headless = IS_HEADLESS[tensor]
    checks = [
        (table["row"] + table["rows"] > limit, "ends after the last of {} rows", limit),
        (~work & (table["col"] != 0), "is at home, where the column must be 0", limit),
        (
            headless & (table["col"] + table["heads"] != 0),
            "has no heads: column and head set must be 0",
            limit,
        ),
        (
            work & ~headless & (table["col"] + program.head_count > arena_heads),
            "needs more head columns than the {} of its arena",
            arena_heads,
        ),
    ]
    for wrong, message, number in checks:
        for operand in np.flatnonzero(wrong & (tensor != Tensor.NONE)).tolist():
            yield operand_violation(program, operand, message.format(number[operand]))


def _phase(program: Program) -> Iterator[Violation]:
    """Ops and tensors belong to the phase."""
    instructions = program["instructions"]
    for op in (op for op in Op if program.phase not in op.rule.phases):
        for at in np.flatnonzero(instructions["op"] == op).tolist():
            message = f"{OP_NAMES[op]} does not belong to a {program.phase} program"
            yield at_instruction(OPERANDS_RULE, program, at, message)
    foreign = [tensor for tensor in Tensor if program.phase not in tensor.contents.phases]
    for operand in np.flatnonzero(np.isin(program["operands"]["tensor"], foreign)).tolist():
        yield operand_violation(program, operand, "names a tensor of the backward phase")


def _lists(subject: Subject, program: Program) -> Iterator[Violation]:
    for name, faults in subject.scan(program).faults.items():
        if len(faults):
            instruction = program.instruction_of(name)
            for row, code, slot in faults.tolist():
                message = _describe(program, name, row, code, slot)
                yield at_instruction(OPERANDS_RULE, program, int(instruction[row]), message)


def _describe(program: Program, name: str, row: int, code: int, slot: int) -> str:
    rows = program[name]
    rank = int(rows.rank[row])
    values = rows.at(row)
    instruction = int(program.instruction_of(name)[row])
    op = Op(int(program["instructions"]["op"][instruction]))
    base = int(program["operands"].ptr[rank])
    named = {
        column: describe_operand(program["operands"].at(base + values[column]))
        for column in op.rule.columns
        if values[column]
    }
    listed = "; ".join(f"{column} = {text}" for column, text in named.items())
    where = f"{OP_NAMES[op]}, row {rows.local(row)} of {name}: "
    return f"{where}{_reason(op.rule, op.rule.columns[slot], code, values)} ({listed})"


def _reason(rule: Rule, column: str, code: int, values: dict[str, int]) -> str:
    argument, tensors = rule.argument(column), " or ".join(TENSOR_NAMES[one] for one in allowed(rule, column))
    moves = argument is not None and rule.source(argument) is not None
    return {
        TENSOR_WRONG: f"operand {column} must be {tensors}" + (", the tensor of a" if moves else ""),
        ROWS_DIFFER: f"operand {column} has another number of rows",
        HEADS_DIFFER: f"operand {column} has other heads",
        NOT_HOME: f"operand {column} must be at home",
        OVERLAP: "operands a and c overlap",
        BAND_WIDE: f"the band {_band(values)} goes beyond the rows: dmin >= 1 - key rows, dmax <= query rows - 1",
        BAND_EMPTY: f"the band {_band(values)} is empty",
    }[code]


def _band(values: dict[str, int]) -> str:
    return span(values.get("dmin", 0), values.get("dmax", 0) - values.get("dmin", 0) + 1)
