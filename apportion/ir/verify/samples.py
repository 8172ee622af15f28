"""Rule 2 again, by definition: sampled (query, key, head) points are computed once where the mask allows them.

Written apart from `coverage.py`, with nothing of its sums and sweeps: a point is inside a band or it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from apportion.ir.plan import Ints
from apportion.ir.verify.coverage import Tasks
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

Bools = NDArray[np.bool_]

RULE = "samples"
_COMPARISONS = 1_000_000  # about a millisecond a program
_QUERIES = (4, 8)
_BANDS = 3  # of the mask, tried for each query


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `samples`. The points follow from the plan's id."""
    seed = int.from_bytes(subject.plan.id[:8], "little")
    for program in subject.runnable:
        tasks = subject.tasks(program)
        if tasks.complete and not subject.coverage(program) and not subject.repeats(program):
            draw = np.random.Generator(np.random.PCG64(seed))
            yield from _sample(program, subject.mask(program.kind), tasks, draw)


def _sample(program: Program, mask: Ints, tasks: Tasks, draw: np.random.Generator) -> Iterator[Violation]:
    tokens = int(program.home_rows.sum())
    count = int(np.clip(_COMPARISONS // (len(tasks.task) + len(mask) + 1), *_QUERIES))
    queries, heads = draw.integers(0, tokens, count), draw.integers(0, program.q_sets.heads, count)
    between = draw.random((count, _BANDS + 1))
    for query, head, chance in zip(queries.tolist(), heads.tolist(), between.tolist(), strict=True):
        allowed = mask[(mask[:, 0] <= query) & (query < mask[:, 1])]
        near = np.flatnonzero((tasks.bands[0] <= query) & (query < tasks.bands[1]))
        if program.splits_heads:
            near = near[_has_head(program, tasks.heads[near], head)]
        computed = tasks.bands[:, near].T
        keys = _keys(query, allowed[:_BANDS], tokens, chance)
        wanted, found = _times(allowed, query, keys), _times(computed, query, keys)
        for i in np.flatnonzero(wanted != found).tolist():
            message = f"query {query}, key {keys[i]}, head {head}: allowed {wanted[i]} times, computed {found[i]} times"
            yield Violation(RULE, None, program.kind, program.phase, None, message)


def _has_head(program: Program, heads: Ints, head: int) -> Bools:
    """bool [tasks]: whether each task computes the head. heads: the head set of each."""
    having = np.zeros(len(program.q_sets.members), bool)
    for number in np.flatnonzero(np.bincount(heads)).tolist():
        having[number] = head in program.q_sets.members[number]
    return having[heads]


def _keys(query: int, bands: Ints, tokens: int, chance: list[float]) -> Ints:
    """Any key, and of a few bands the first and last key that the query sees, their neighbours, one between."""
    keys = {int(chance[0] * tokens)}
    for (_, _, k0, k1, dmin, dmax), part in zip(bands.tolist(), chance[1:], strict=False):
        low, high = max(k0, query - dmax), min(k1 - 1, query - dmin)
        if low <= high:
            keys |= {low - 1, low, low + int(part * (high - low)), high, high + 1}
    return np.array(sorted(key for key in keys if 0 <= key < tokens), np.int64)


def _times(bands: Ints, query: int, keys: Ints) -> Ints:
    """int64 [keys]: how many bands that hold the query have the pair (query, key), by the definition of a band."""
    _, _, k0, k1, dmin, dmax = bands.T[:, :, None]
    inside = (k0 <= keys) & (keys < k1) & (dmin <= query - keys) & (query - keys <= dmax)
    times: Ints = inside.sum(axis=0)
    return times
