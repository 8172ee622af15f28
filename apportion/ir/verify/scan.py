"""One look at every row of every list: operands fit their op, and what the ops write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import OPERAND_COLUMNS, RULES, TABLES, Argument, Rule
from apportion.ir.loops.jit import lean
from apportion.ir.plan.ops import LIST_OF_OP, LISTS
from apportion.ir.tensors import HEADLESS, Tensor
from apportion.ir.verify.view import HOME, Program

_COLUMNS = 6
TENSOR_WRONG, ROWS_DIFFER, HEADS_DIFFER, NOT_HOME, OVERLAP, BAND_WIDE, BAND_EMPTY = range(1, 8)
_MOST = 16
# flags of an operand column: must be at home; what moves into it is of its tensor and elsewhere; may be written
_AT_HOME, _MOVER, _WRITTEN = 1, 2, 4


@dataclass(frozen=True, eq=False)
class Scan:
    """faults: list -> int64 [faults, 3] (row, code, operand column), at most a few. written_at_home: tensors, as
    bits, whose home rows an op or a receive writes."""

    faults: Mapping[str, Ints]
    written_at_home: int


def scan(program: Program) -> Scan:
    written = np.zeros(1, np.int64)
    faults = {name: _scan_list(program, number, name, written) for number, name in enumerate(LISTS)}
    return Scan(faults, int(written[0]))


def _scan_list(program: Program, number: int, name: str, written: Ints) -> Ints:
    rows, columns, instructions = program[name], OPERAND_COLUMNS[name], program["instructions"]
    faults = np.zeros((_MOST, 3), np.int64)
    if len(rows) == 0:
        return faults[:0]
    found = _scan(
        instructions.data,
        instructions.ptr,
        LIST_OF_OP,
        number,
        rows.data,
        rows.ptr,
        np.array([TABLES[name].index(column) for column in columns], np.int64),
        TABLES[name].index("dmin") if "dmin" in TABLES[name] else -1,
        program.facts.packed,
        program["operands"].data,
        program["operands"].ptr,
        program.facts.head_count,
        _RULES,
        faults,
        written,
    )
    return faults[:found]


def allowed(rule: Rule, column: str) -> tuple[Tensor, ...]:
    """The tensors that an op's operand in a column may be of; NONE: it may be absent."""
    found = rule.argument(column)
    if found is None:
        return (Tensor.NONE,)
    return (Tensor.NONE, *found.tensors) if found.optional else found.tensors


def rule_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes, columns, 4]: allowed tensors as bits, the column of equal rows and that of equal heads (-1 for
    none), flags."""
    table = np.zeros((max(rules) + 1, _COLUMNS, 4), np.int64)
    for op, rule in rules.items():
        for number, column in enumerate(rule.columns):
            found = rule.argument(column)
            bits = sum(1 << tensor for tensor in allowed(rule, column))
            rows, heads = _likeness(rule, found) if found else (-1, -1)
            table[op, number] = bits, rows, heads, _flags(rule, found) if found else 0
    return table


def _likeness(rule: Rule, argument: Argument) -> tuple[int, int]:
    other = rule.argument(argument.like or "")
    if other is None:
        return -1, -1
    column = rule.columns.index(other.column)
    return column, -1 if HEADLESS.issuperset(other.tensors) else column


def _flags(rule: Rule, argument: Argument) -> int:
    moves = rule.source(argument) is not None
    return _AT_HOME * argument.at_home + _MOVER * moves + _WRITTEN * (not argument.use.reads)


_RULES = rule_table(RULES)


@lean
def _scan(
    instructions: Ints,
    instruction_ptr: Ints,
    list_of_op: Ints,
    number: int,
    rows: Ints,
    ptr: Ints,
    columns: Ints,
    band: int,
    packed: Ints,
    operands: Ints,
    operand_ptr: Ints,
    head_count: Ints,
    rules: Ints,
    faults: Ints,
    written: Ints,
) -> int:
    """Checks every row of a list against the rules of its op; fills `faults` and returns their number."""
    found, count = 0, len(columns)
    for rank in range(len(ptr) - 1):
        base, end = operand_ptr[rank], ptr[rank]
        for step in range(instruction_ptr[rank], instruction_ptr[rank + 1]):
            op = instructions[0, step]
            if list_of_op[op] != number:
                continue
            first, end = end, end + instructions[4, step]
            for row in range(first, end):
                code, at = 0, 0
                for column in range(count):
                    x = base + rows[columns[column], row]
                    tensor, like, flags = packed[x, 0], rules[op, column, 1], rules[op, column, 3]
                    y = base + rows[columns[like], row] if like >= 0 else base
                    if not (rules[op, column, 0] >> tensor) & 1:
                        code = TENSOR_WRONG
                    elif x != base and y != base:
                        code = _unlike(packed, x, y, rules[op, column, 2])
                        if flags & _MOVER and code == 0:
                            code = _overlap(packed, operands, head_count, x, y)
                    if flags & _AT_HOME and packed[x, 1] != HOME and code == 0:
                        code = NOT_HOME
                    if flags & _WRITTEN and packed[x, 1] == HOME and (count > 1 or rows[0, row] == 0):
                        written[0] |= 1 << tensor
                    if code:
                        at = column
                        break
                if code == 0 and band >= 0:
                    q, kv = base + rows[columns[0], row], base + rows[columns[1], row]
                    code = _band_code(rows[band, row], rows[band + 1, row], packed[q, 2], packed[kv, 2])
                if code and found < len(faults):
                    faults[found, 0], faults[found, 1], faults[found, 2] = row, code, at
                    found += 1
    return found


@lean
def _unlike(packed: Ints, x: int, y: int, same_heads: int) -> int:
    if packed[x, 2] != packed[y, 2]:
        return ROWS_DIFFER
    return HEADS_DIFFER if same_heads >= 0 and packed[x, 3] != packed[y, 3] else 0


@lean
def _band_code(dmin: int, dmax: int, q_rows: int, kv_rows: int) -> int:
    if dmin < 1 - kv_rows or dmax > q_rows - 1:
        return BAND_WIDE
    return BAND_EMPTY if dmin > dmax else 0


@lean
def _overlap(packed: Ints, operands: Ints, head_count: Ints, x: int, y: int) -> int:
    """Whether what moves between two operands is not of one tensor, or onto itself: they share a row and a column."""
    if packed[x, 0] != packed[y, 0]:
        return TENSOR_WRONG
    if packed[x, 1] != packed[y, 1]:
        return 0
    below, above = (
        operands[2, x] < operands[2, y] + operands[3, y],
        operands[2, y] < operands[2, x] + operands[3, x],
    )
    beside = abs(operands[4, x] - operands[4, y]) >= head_count[x]
    return OVERLAP if below and above and not beside else 0
