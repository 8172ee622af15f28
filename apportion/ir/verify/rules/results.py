"""Rule 5, of rows that arrive as results: they are rounded to the model's dtype, so nothing may be added to them.

A row of a sum gets results in all of its heads or in none, each once; they come from work rows; and nothing else than
`finish` touches the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Bools, Ints, offsets
from apportion.ir.isa import ADDED, OPERAND_COLUMNS, RESULTS, Op
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.ir.verify.report import Violation, at_instruction, describe_operand
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import HOME, Program

RULE = "results"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `results`."""
    for program in subject.programs:
        if not _has_results(program):
            continue
        given, others, wrong = _uses(program)
        yield from wrong
        for added in ADDED[program.phase].values():
            yield from _of_sum(program, added.tensors[0], given, others)


def _has_results(program: Program) -> bool:
    """Whether anything arrives, or leaves, as a result."""
    instructions = program.source["instructions"]  # whose mode is 0 but in launches
    return bool((instructions["mode"] & RESULTS).any() or program.uses(Op.DELIVER))


def _uses(program: Program) -> tuple[Ints, Ints, list[Violation]]:
    """Operands by where they are named, int64 [2, uses] each, (operand, instruction): those that take results, and all
    others but those of `finish`; and what travels as a result and cannot."""
    operands, instructions = program["operands"], program["instructions"]
    sums = [added.tensors[0] for added in ADDED[program.phase].values()]
    given, others, wrong = [], [], []
    for table, columns in OPERAND_COLUMNS.items():
        rows, at = program[table], program.instruction_of(table)
        op, first = instructions["op"][at], operands.ptr[rows.rank]
        results = instructions["mode"][at] & RESULTS > 0 if table == "transfers" else op == Op.DELIVER
        for column in columns:
            named = np.stack([first + rows[column], at])
            if not results.any():
                others.append(named[:, op != Op.FINISH])
                continue
            takes, leaves = results & (column == "c"), results & (column == "a")
            if table == "transfers":
                takes, leaves = results & (rows["send"] == 0), results & (rows["send"] > 0)
            given.append(named[:, takes])
            others.append(named[:, ~takes & (op != Op.FINISH)])
            space, tensor = operands["space"][named[0]], operands["tensor"][named[0]]
            bad = (takes & (space != HOME)) | (leaves & (space == HOME))
            bad |= (takes | leaves) & ~np.isin(tensor, sums)
            for x, step in named[:, bad].T.tolist():
                what = describe_operand(operands.at(x))
                message = f"{what} cannot be a result: sums go from work rows to home rows"
                wrong.append(at_instruction(RULE, program, step, message))
    given.append(np.zeros((2, 0), np.int64))
    return np.concatenate(given, axis=1), np.concatenate(others, axis=1), wrong


def _of_sum(program: Program, tensor: Tensor, given: Ints, others: Ints) -> Iterator[Violation]:
    """Of one sum."""
    operands = program["operands"]
    given, others = (
        named[:, _at_home(operands["tensor"], operands["space"], named[0], tensor)]
        for named in (given, others)
    )
    if not given.size:
        return
    span = int((operands["row"] + operands["rows"]).max()) + 1
    begin = operands.rank * span + operands["row"]
    points = np.unique(np.concatenate([begin[given[0]], (begin + operands["rows"])[given[0]]]))
    low, high = (np.searchsorted(points, edge[given[0]]) for edge in (begin, begin + operands["rows"]))
    heads = np.zeros(len(points), np.int64)
    np.add.at(heads, low, program.head_count[given[0]])
    np.subtract.at(heads, high, program.head_count[given[0]])
    heads = np.cumsum(heads)
    wanted = (program.kv_sets if tensor == Tensor.DKV else program.q_sets).heads
    for part in np.flatnonzero((heads != 0) & (heads != wanted)).tolist():
        rank, row = divmod(int(points[part]), span)
        message = (
            f"{TENSOR_NAMES[tensor]} home row {row} gets results in {heads[part]} heads of {wanted}: in all of them or "
            "in none"
        )
        yield Violation(RULE, rank, program.kind, program.phase, None, message)
    covered = offsets(np.append(np.diff(points), 0) * (heads > 0))
    start, stop = begin[others[0]], (begin + operands["rows"])[others[0]]
    touched = _below(points, covered, heads, stop) - _below(points, covered, heads, start)
    for x, step in others[:, touched > 0].T.tolist():
        what = describe_operand(operands.at(x))
        yield at_instruction(RULE, program, step, f"uses {what}, which arrive as results")


def _at_home(tensor: Ints, space: Ints, operand: Ints, wanted: Tensor) -> Bools:
    found: Bools = (tensor[operand] == wanted) & (space[operand] == HOME)
    return found


def _below(points: Ints, covered: Ints, heads: Ints, at: Ints) -> Ints:
    """int64 [n]: how many covered rows there are before each place."""
    part = np.searchsorted(points, at, "right") - 1
    inside = np.where((part >= 0) & (heads[part] > 0), at - points[part], 0)
    found: Ints = covered[np.maximum(part, 0)] + inside
    return found
