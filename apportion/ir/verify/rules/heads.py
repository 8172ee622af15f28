"""Rule 7: every (task, query head) uses that head's own KV head, and all heads are covered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.verify.report import Violation, at_instruction
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

RULE = "heads"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `heads`."""
    for program in subject.programs:
        yield from _pairing(program)
        if len(subject.mask(program.kind)):
            yield from _covered(program)


def _pairing(program: Program) -> Iterator[Violation]:
    if not program.splits_heads:
        return
    heads = program["operands"]["heads"]
    sets = len(program.q_sets.size)
    key = heads[program.task_operand("q")] * sets + heads[program.task_operand("kv")]
    used, first = np.unique(key, return_index=True)
    name = program.task_list
    instruction = program.instruction_of(name)
    for pair, task in zip(used.tolist(), first.tolist(), strict=True):
        missing = _missing(program, *divmod(pair, sets))
        if missing:
            row = program[name].local(task)
            q_head, kv_head = missing
            message = f"row {row} of {name}: query head {q_head} needs KV head {kv_head}, which its keys do not have"
            yield at_instruction(RULE, program, int(instruction[task]), message)


def _missing(program: Program, q_set: int, kv_set: int) -> tuple[int, int] | None:
    q_heads, kv_heads = program.q_sets.members[q_set], program.kv_sets.members[kv_set]
    own = q_heads // (program.q_sets.heads // program.kv_sets.heads)
    lacking = np.flatnonzero(~np.isin(own, kv_heads))
    return (int(q_heads[lacking[0]]), int(own[lacking[0]])) if len(lacking) else None


def _covered(program: Program) -> Iterator[Violation]:
    if len(program[program.task_list]) and not program.splits_heads:
        return
    heads = program["operands"]["heads"]
    used = np.flatnonzero(np.bincount(heads[program.task_operand("q")]))
    covered = np.zeros(program.q_sets.heads, bool)
    for number in used.tolist():
        covered[program.q_sets.members[number]] = True
    if not covered.all():
        names = ", ".join(map(str, np.flatnonzero(~covered)[:8]))
        message = f"no task computes query heads {names} ({int((~covered).sum())} of {len(covered)} heads)"
        yield Violation(RULE, None, program.kind, program.phase, None, message)
