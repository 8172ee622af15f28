"""One look at every row of every list: operands fit their op, and what the ops write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apportion.ir.isa import TABLES, Op, Tensor
from apportion.ir.jit import lean
from apportion.ir.plan import Ints
from apportion.ir.structure import OPERAND_COLUMNS
from apportion.ir.verify.view import HOME, LIST_OF_OP, LISTS, Program

T = Tensor
ACCUMULATORS = (T.O, T.DX, T.DQ, T.DKV)

#: op -> per operand column the tensors it may name; NONE: it may be absent
OPERANDS: Mapping[Op, tuple[tuple[Tensor, ...], ...]] = {
    Op.LAUNCH: ((T.X, T.Q, T.KV, T.O, T.DX, T.DQ, T.DKV, T.DO, T.DELTA),),
    Op.ATTEND: ((T.Q,), (T.KV,), (T.O,)),
    Op.ATTEND_GRAD: ((T.Q,), (T.KV,), (T.DO,), (T.DELTA,), (T.DQ,), (T.DKV,)),
    Op.DELTA: ((T.DO,), (T.O,), (T.DELTA,), (T.NONE,)),
    Op.MERGE: ((T.O,), (T.NONE,), (T.O,), (T.NONE,)),
    Op.ADD: ((T.DQ, T.DKV, T.DX), (T.NONE,), (T.DQ, T.DKV, T.DX), (T.NONE,)),
    Op.COPY: (tuple(T)[1:], (T.NONE,), tuple(T)[1:], (T.NONE,)),
    Op.CLEAR: ((T.NONE,), (T.NONE,), ACCUMULATORS, (T.NONE,)),
    Op.PROJECT: ((T.X,), (T.NONE, T.Q), (T.NONE, T.KV), (T.NONE,)),
    Op.PROJECT_GRAD: ((T.X,), (T.NONE, T.DQ), (T.NONE, T.DKV), (T.DX,)),
    Op.FINISH: ((T.NONE,), (T.NONE,), (T.O,), (T.NONE,)),
}
#: op -> per operand column a group: operands of one group have equal rows (0: no group); one group unless told
ROW_GROUPS: Mapping[Op, tuple[int, ...]] = {Op.ATTEND: (1, 2, 1), Op.ATTEND_GRAD: (1, 2, 1, 1, 1, 2)}
#: ops whose operands have their own heads; elsewhere operands of one group have equal heads
OWN_HEADS = (Op.PROJECT, Op.PROJECT_GRAD)
#: op -> operand columns that must be at home
AT_HOME: Mapping[Op, tuple[int, ...]] = {Op.DELTA: (0, 1, 2), Op.FINISH: (2,)}
#: ops whose operands a and c are one tensor and do not overlap
MOVERS = (Op.MERGE, Op.ADD, Op.COPY)
#: operand columns that an op writes; those of a launch are its receives
_WRITES: Mapping[Op, tuple[int, ...]] = {Op.LAUNCH: (0,), Op.ATTEND: (2,), Op.ATTEND_GRAD: (4, 5)}
_ROW_WRITES = (1, 2, 3)

_COLUMNS = 6
TENSOR_WRONG, ROWS_DIFFER, HEADS_DIFFER, NOT_HOME, OVERLAP, BAND_WIDE, BAND_EMPTY = range(1, 8)
_MOST = 16
# flags of an operand column
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


def _rule_table() -> Ints:
    """int64 [ops, columns, 4]: allowed tensors as bits, the column of equal rows and that of equal heads (the first
    one of the group; -1 for none), flags."""
    table = np.zeros((max(Op) + 1, _COLUMNS, 4), np.int64)
    for op, tensors in OPERANDS.items():
        groups = ROW_GROUPS.get(op, (1,) * len(tensors))
        for column, (allowed, group) in enumerate(zip(tensors, groups, strict=True)):
            bits = sum(1 << tensor for tensor in allowed)
            like = groups.index(group) if groups.index(group) < column else -1
            written = column in _WRITES.get(op, _ROW_WRITES)
            flags = _AT_HOME * (column in AT_HOME.get(op, ())) + _MOVER * (op in MOVERS) + _WRITTEN * written
            table[op, column] = bits, like, -1 if op in OWN_HEADS else like, flags
    return table


_RULES = _rule_table()


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
