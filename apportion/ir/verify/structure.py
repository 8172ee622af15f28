"""Instructions are well formed: each op gets operands of its tensors, of equal rows and heads, inside their rows.

`ir.structure` has checked codes, indexes and counts before; here operands meet layouts, arenas and ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from apportion.ir import structure
from apportion.ir.errors import DecodeError
from apportion.ir.isa import OP_NAMES, TABLES, TENSOR_NAMES, Op, Tensor
from apportion.ir.jit import jit
from apportion.ir.plan import Ints
from apportion.ir.structure import OPERAND_COLUMNS
from apportion.ir.verify.report import Violation, at_instruction, describe_operand, span
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import HOME, LISTS, WORK, Program

RULE, OPERANDS_RULE = "structure", "operands"
T = Tensor
ACCUMULATORS = (T.O, T.DX, T.DQ, T.DKV)
_BACKWARD_ONLY = (T.DX, T.DQ, T.DKV, T.DO, T.DELTA)
FORBIDDEN_OPS = {
    "forward": (Op.ATTEND_GRAD, Op.DELTA, Op.ADD, Op.PROJECT_GRAD),
    "backward": (Op.ATTEND, Op.MERGE, Op.FINISH),
}

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

_SLOTS = 6
TENSOR_WRONG, ROWS_DIFFER, HEADS_DIFFER, NOT_HOME, OVERLAP, BAND_WIDE, BAND_EMPTY = range(1, 8)
_MOST = 16


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `structure`."""
    plan = subject.plan
    try:
        structure.check_header(plan.header)
        tokens = dict.fromkeys(plan.layouts, plan.request.batch.tokens)
        structure.check(
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
        yield from _lists(program)


def _header(subject: Subject) -> Iterator[Violation]:
    """Every rank reads the header alone: it must repeat the request."""
    header, request = subject.plan.header, subject.plan.request
    facts = [
        ("ranks", header.ranks, request.cluster.ranks),
        ("kinds", tuple(header.kinds), tuple(request.batch.kinds)),
        ("v_head_dim", header.v_head_dim, request.model.v_head_dim or request.model.head_dim),
        *(
            (name, getattr(header, name), getattr(request.model, name))
            for name in ("q_heads", "kv_heads", "head_dim", "dtype")
        ),
    ]
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
    table = program["operands"]
    tensor, rank, work = table["tensor"], table.rank, table["space"] == WORK
    arena_rows, arena_heads = program.arena_rows[rank, tensor], program.arena_heads[rank, tensor]
    limit = np.where(work, arena_rows, program.home_rows[rank])
    headless = (tensor == T.X) | (tensor == T.DX)
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
        for operand in np.flatnonzero(wrong & (tensor != T.NONE))[:_MOST].tolist():
            yield operand_violation(program, operand, message.format(number[operand]))


def _phase(program: Program) -> Iterator[Violation]:
    """Ops and tensors belong to the phase."""
    instructions = program["instructions"]
    for op in FORBIDDEN_OPS[program.phase]:
        for at in np.flatnonzero(instructions["op"] == op)[:_MOST].tolist():
            message = f"{OP_NAMES[op]} does not belong to a {program.phase} program"
            yield at_instruction(OPERANDS_RULE, program, at, message)
    if program.phase == "forward":
        for operand in np.flatnonzero(np.isin(program["operands"]["tensor"], _BACKWARD_ONLY))[
            :_MOST
        ].tolist():
            yield operand_violation(program, operand, "names a tensor of the backward phase")


def _lists(program: Program) -> Iterator[Violation]:
    for number, name in enumerate(LISTS):
        faults = scan_list(program, number, name)
        if len(faults):
            instruction = program.instruction_of(name)
            for row, code, slot in faults.tolist():
                message = _describe(program, name, row, code, slot)
                yield at_instruction(OPERANDS_RULE, program, int(instruction[row]), message)


def scan_list(program: Program, number: int, name: str) -> Ints:
    """[faults, 3]: row of the list, code and operand column; at most a few."""
    rows, columns = program[name], OPERAND_COLUMNS[name]
    at = np.flatnonzero(program.list_of == number)
    instructions = program["instructions"]
    ops = np.repeat(instructions["op"][at], instructions["count"][at])
    slots = np.array([TABLES[name].index(column) for column in columns], np.int64)
    band = TABLES[name].index("dmin") if "dmin" in TABLES[name] else -1
    faults = np.zeros((_MOST, 3), np.int64)
    found = _scan(
        ops,
        rows.data,
        rows.ptr,
        slots,
        band,
        program.packed,
        program["operands"].data,
        program["operands"].ptr,
        program.head_count,
        _RULES,
        faults,
    )
    return faults[:found]


def _rule_table() -> Ints:
    """int64 [ops, slots, 4]: allowed tensors as bits, row group, head group, flags (1: home, 2: mover)."""
    table = np.zeros((max(Op) + 1, _SLOTS, 4), np.int64)
    for op, tensors in OPERANDS.items():
        groups = ROW_GROUPS.get(op, (1,) * len(tensors))
        for slot, (allowed, group) in enumerate(zip(tensors, groups, strict=True)):
            bits = sum(1 << tensor for tensor in allowed)
            own = slot + 1 if op in OWN_HEADS else group
            flags = (slot in AT_HOME.get(op, ())) + 2 * (op in MOVERS)
            table[op, slot] = bits, group, own, flags
    return table


_RULES = _rule_table()


@jit
def _scan(
    ops: Ints,
    rows: Ints,
    ptr: Ints,
    slots: Ints,
    band: int,
    packed: Ints,
    operands: Ints,
    operand_ptr: Ints,
    head_count: Ints,
    rules: Ints,
    faults: Ints,
) -> int:
    """Checks every row of a list against the rules of its op; fills `faults` and returns their number."""
    found = 0
    seen = np.zeros(4, np.int64)  # the first operand of each row group
    seen_heads = np.zeros(8, np.int64)  # and of each head group
    for rank in range(len(ptr) - 1):
        base = operand_ptr[rank]
        for row in range(ptr[rank], ptr[rank + 1]):
            op = ops[row]
            seen[:] = -1
            seen_heads[:] = -1
            code = 0
            for slot in range(len(slots)):
                local = rows[slots[slot], row]
                tensor = packed[base + local, 0] if local else 0
                if not (rules[op, slot, 0] >> tensor) & 1:
                    code = TENSOR_WRONG
                elif tensor:
                    x = base + local
                    group, own = rules[op, slot, 1], rules[op, slot, 2]
                    if seen[group] < 0:
                        seen[group] = x
                    elif packed[x, 2] != packed[seen[group], 2]:
                        code = ROWS_DIFFER
                    if seen_heads[own] < 0:
                        seen_heads[own] = x
                    elif packed[x, 3] != packed[seen_heads[own], 3]:
                        code = HEADS_DIFFER
                    if rules[op, slot, 3] & 1 and packed[x, 1] != HOME:
                        code = NOT_HOME
                    if rules[op, slot, 3] & 2 and x != seen[group]:
                        other = seen[group]
                        if tensor != packed[other, 0]:
                            code = TENSOR_WRONG
                        elif _overlap(operands, head_count, x, other):
                            code = OVERLAP
                    elif rules[op, slot, 3] & 2 and slot == 2:
                        code = OVERLAP
                if code:
                    break
            if code == 0 and band >= 0:
                slot = 0
                dmin, dmax = rows[band, row], rows[band + 1, row]
                q_rows = packed[base + rows[slots[0], row], 2]
                kv_rows = packed[base + rows[slots[1], row], 2]
                if dmin < 1 - kv_rows or dmax > q_rows - 1:
                    code = BAND_WIDE
                elif dmin > dmax:
                    code = BAND_EMPTY
            if code and found < len(faults):
                faults[found, 0] = row
                faults[found, 1] = code
                faults[found, 2] = slot
                found += 1
    return found


@jit
def _overlap(operands: Ints, head_count: Ints, x: int, y: int) -> bool:
    """Whether two operands of one tensor and equal heads share a row and a column."""
    if operands[1, x] != operands[1, y]:
        return False
    rows = (
        operands[2, x] < operands[2, y] + operands[3, y] and operands[2, y] < operands[2, x] + operands[3, x]
    )
    return bool(rows and abs(operands[4, x] - operands[4, y]) < head_count[x])


def _describe(program: Program, name: str, row: int, code: int, slot: int) -> str:
    rows, columns = program[name], OPERAND_COLUMNS[name]
    rank = int(rows.rank[row])
    values = rows.at(row)
    instruction = int(program.instruction_of(name)[row])
    op = Op(int(program["instructions"]["op"][instruction]))
    base = int(program["operands"].ptr[rank])
    named = {
        column: describe_operand(program["operands"].at(base + values[column]))
        for column in columns
        if values[column]
    }
    listed = "; ".join(f"{column} = {text}" for column, text in named.items())
    where = f"{OP_NAMES[op]}, row {rows.local(row)} of {name}: "
    return f"{where}{_reason(op, columns[slot], code, slot, values)} ({listed})"


def _reason(op: Op, column: str, code: int, slot: int, values: dict[str, int]) -> str:
    allowed = " or ".join(TENSOR_NAMES[tensor] for tensor in OPERANDS[op][slot])
    return {
        TENSOR_WRONG: f"operand {column} must be {allowed}" + (", the tensor of a" if op in MOVERS else ""),
        ROWS_DIFFER: f"operand {column} has another number of rows",
        HEADS_DIFFER: f"operand {column} has other heads",
        NOT_HOME: f"operand {column} must be at home",
        OVERLAP: "operands a and c overlap",
        BAND_WIDE: f"the band {_band(values)} goes beyond the rows: dmin >= 1 - key rows, dmax <= query rows - 1",
        BAND_EMPTY: f"the band {_band(values)} is empty",
    }[code]


def _band(values: dict[str, int]) -> str:
    return span(values.get("dmin", 0), values.get("dmax", 0) - values.get("dmin", 0) + 1)
