"""Rule 2 again, by definition: sampled (query, key, head) points are computed once where the mask allows them.

Written apart from `coverage.py`, with nothing of its sums and sweeps: a point is inside a band or it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.plan import Ints
from apportion.ir.verify.coverage import Tasks
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

RULE = "samples"
_COMPARISONS = 1_500_000  # a few milliseconds a program
_QUERIES = (4, 64)


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `samples`. The points follow from the plan's id."""
    for program in subject.runnable:
        tasks = subject.tasks(program)
        if tasks.complete:
            seed = int.from_bytes(subject.plan.id[:8], "little")
            yield from _sample(
                program, subject.mask(program.kind), tasks, np.random.Generator(np.random.PCG64(seed))
            )


def _sample(program: Program, mask: Ints, tasks: Tasks, draw: np.random.Generator) -> Iterator[Violation]:
    bands = tasks.bands
    total = max(bands.shape[1] + len(mask), 1)
    tokens = int(program.home_rows.sum())
    for query in draw.integers(0, tokens, int(np.clip(_COMPARISONS // total, *_QUERIES))).tolist():
        head = int(draw.integers(program.q_sets.heads))
        allowed = mask[(mask[:, 0] <= query) & (query < mask[:, 1])].T
        near = np.flatnonzero((bands[0] <= query) & (query < bands[1]))
        computed = bands[:, near[_has_head(program, tasks.task[near], head)]]
        for key in _keys(query, allowed, tokens, draw):
            wanted, found = _count(allowed, query, key), _count(computed, query, key)
            if wanted != found:
                message = (
                    f"query {query}, key {key}, head {head}: allowed {wanted} times, computed {found} times"
                )
                yield Violation(RULE, None, program.kind, program.phase, None, message)


def _has_head(program: Program, task: Ints, head: int) -> Ints:
    sets = program["operands"]["heads"][program.task_operand("q")[task]]
    member = np.array([head in set(members.tolist()) for members in program.q_sets.members])
    return member[sets]


def _keys(query: int, bands: Ints, tokens: int, draw: np.random.Generator) -> list[int]:
    """The first and last key that each of a few bands allows, their neighbours outside, and keys between."""
    keys = {int(draw.integers(tokens))}
    for _, _, k0, k1, dmin, dmax in bands[:, :4].T.tolist():
        low, high = max(k0, query - dmax), min(k1 - 1, query - dmin)
        if low <= high:
            keys.update((low - 1, low, int(draw.integers(low, high + 1)), high, high + 1))
    return sorted(key for key in keys if 0 <= key < tokens)


def _count(bands: Ints, query: int, key: int) -> int:
    _, _, k0, k1, dmin, dmax = bands
    return int(((k0 <= key) & (key < k1) & (dmin <= query - key) & (query - key <= dmax)).sum())
