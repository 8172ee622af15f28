"""Finds operands outside their rows, of the wrong phase, or incompatible with their op (`ir.isa`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import OP_NAMES, OPERAND_COLUMNS, Argument, Op, Rule
from apportion.ir.plan.ops import IS_HEADLESS
from apportion.ir.tensors import HEADLESS, TENSOR_NAMES, Tensor
from apportion.ir.verify.report import Violation, at_instruction, describe_operand
from apportion.ir.verify.view import HOME, Program

RULE = "operands"


def misfits(program: Program) -> Iterator[Violation]:
    """Violations of the rule `operands`."""
    yield from _check_placement(program)
    yield from _check_phases(program)
    for name in OPERAND_COLUMNS:
        yield from _list_violations(program, name)


def _check_placement(program: Program) -> Iterator[Violation]:
    """Finds operands outside their home rows or arena."""
    table = program["operands"]
    tensor, space, row, rows, column, heads = table.values
    rank, is_work, headless = table.rank_of_row(), space != HOME, IS_HEADLESS[tensor]
    limit = np.where(is_work, program.arena_rows[rank, tensor], program.home_rows[rank])
    room = program.arena_heads[rank, tensor]
    checks = [
        (row + rows > limit, "ends after the last of {} rows", limit),
        (headless & (heads != 0), "has no heads: its head set must be 0", limit),
        (column != 0, "begins at head column {}: it must be 0", column),
        (is_work & ~headless & (program.head_count > room), "has more heads than the {} of its arena", room),
    ]
    for is_wrong, message, number in checks:
        for operand in np.flatnonzero(is_wrong & (tensor != Tensor.NONE)).tolist():
            yield _operand_violation(program, operand, message.format(number[operand]))


def _operand_violation(program: Program, operand: int, message: str) -> Violation:
    table = program["operands"]
    rank, row = table.rank_and_row(operand)
    text = f"operand {row} ({describe_operand(table.at(operand))}) {message}"
    return Violation(RULE, rank, program.kind, program.phase, None, text)


def _check_phases(program: Program) -> Iterator[Violation]:
    instructions = program["instructions"]
    for op in (op for op in Op if program.phase not in op.rule.phases):
        for instruction in np.flatnonzero(instructions["op"] == op).tolist():
            message = f"{OP_NAMES[op]} does not belong to a {program.phase} program"
            yield at_instruction(RULE, program, instruction, message)
    tensors = [tensor for tensor in Tensor if program.phase not in tensor.contents.phases]
    for operand in np.flatnonzero(np.isin(program["operands"]["tensor"], tensors)).tolist():
        yield _operand_violation(program, operand, "names a tensor of the backward phase")


def _list_violations(program: Program, name: str) -> Iterator[Violation]:
    """Finds list rows that their op does not accept; gives the first reason for each, in column order."""
    rows, instruction = program[name], program.instruction_of(name)
    ops, by_row = program["instructions"]["op"][instruction], dict[int, str]()
    columns = {
        column: program["operands"].ptr[rows.rank_of_row()] + rows[column] for column in OPERAND_COLUMNS[name]
    }
    for op in map(Op, np.unique(ops).tolist()):
        reasons = [
            *_reasons(program, op.rule, columns),
            *(_bands(program, name, columns) if op.rule.is_attention else ()),
        ]
        for is_wrong, reason in reasons:
            for row in np.flatnonzero(is_wrong & (ops == op)).tolist():
                by_row.setdefault(row, f"{OP_NAMES[op]}, row {rows.rank_and_row(row)[1]} of {name}: {reason}")
    for row, reason in sorted(by_row.items()):
        message = f"{reason} ({_describe_operands(program, columns, row)})"
        yield at_instruction(RULE, program, int(instruction[row]), message)


def _describe_operands(program: Program, columns: Mapping[str, Ints], row: int) -> str:
    table = program["operands"]
    return "; ".join(
        f"{column} = {describe_operand(table.at(int(index[row])))}"
        for column, index in columns.items()
        if table["tensor"][index[row]] != Tensor.NONE
    )


def _reasons(program: Program, rule: Rule, columns: Mapping[str, Ints]) -> Iterator[tuple[Bools, str]]:
    """Yields (bool [rows], message) for each check, assuming that all rows belong to one op."""
    tensor, space, row, rows = program["operands"].values[:4]
    for column in rule.columns:
        x, argument = columns[column], rule.argument(column)
        allowed = tensors_of(argument)
        text = f"operand {column} must be {' or '.join(TENSOR_NAMES[number] for number in allowed)}"
        moves = argument is not None and rule.source(argument) is not None
        yield ~np.isin(tensor[x], allowed), text + (", the same tensor as a" if moves else "")
        other = rule.argument(argument.like or "") if argument else None
        if argument and other:
            y = columns[other.column]
            present = (tensor[x] != Tensor.NONE) & (tensor[y] != Tensor.NONE)
            yield present & (rows[x] != rows[y]), f"operand {column} has a different number of rows"
            if not HEADLESS.issuperset(other.tensors):
                differ = present & (program.same_heads[x] != program.same_heads[y])
                yield differ, f"operand {column} has different heads"
            if moves:
                yield present & (tensor[x] != tensor[y]), f"{text}, the same tensor as a"
                overlap = (row[x] < row[y] + rows[y]) & (row[y] < row[x] + rows[x])
                yield present & (space[x] == space[y]) & overlap, "operands a and c overlap"
        if argument and argument.at_home:
            yield (space[x] != HOME), f"operand {column} must be at home"


def tensors_of(argument: Argument | None) -> tuple[Tensor, ...]:
    """Tensors that an operand may have; NONE: it may be absent."""
    if argument is None:
        return (Tensor.NONE,)
    return (Tensor.NONE, *argument.tensors) if argument.optional else argument.tensors


def _bands(program: Program, name: str, columns: Mapping[str, Ints]) -> Iterator[tuple[Bools, str]]:
    """Yields (bool [rows], message) for the bands of tasks."""
    count, dmin, dmax = program["operands"]["rows"], program[name]["dmin"], program[name]["dmax"]
    wide = (dmin < 1 - count[columns["kv"]]) | (dmax > count[columns["q"]] - 1)
    yield wide, "the band goes beyond the rows: dmin >= 1 - key rows, dmax <= query rows - 1"
    yield dmin > dmax, "the band is empty"
