"""Rule 2 again, by definition: sampled (query, key, head) points are computed once if the mask allows them, else never.

Independent of `coverage.py`, without its sums and sweeps: a point is inside a band or it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.verify.attended import Tasks
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

RULE = "samples"
_COMPARISONS = 1_000_000  # about a millisecond per program
_QUERIES = (4, 8)
_BANDS = 3  # bands of the mask tried per query


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `samples`. The plan's id is the seed of the points."""
    seed = int.from_bytes(subject.plan.id[:8], "little")
    earlier: list[Tasks] = []
    for program in subject.programs:
        tasks = subject.tasks(program)
        if not any(tasks is other for other in earlier):  # skips tasks already sampled for forward
            earlier.append(tasks)
            rng = np.random.Generator(np.random.PCG64(seed))
            yield from _check_sample(program, subject.mask(program.kind), tasks, rng)


def _check_sample(
    program: Program, mask: Ints, tasks: Tasks, rng: np.random.Generator
) -> Iterator[Violation]:
    tokens, sets = int(program.home_rows.sum()), program.q_sets
    count = int(np.clip(_COMPARISONS // (tasks.bands.shape[1] + len(mask) + 1), *_QUERIES))
    queries, heads = rng.integers(0, tokens, count), rng.integers(0, sets.heads, count)
    chances = rng.random((count, _BANDS + 1)).tolist()
    index, allowed = _bands_by_query(mask[:, 0], mask[:, 1], queries)
    task_query, computed = _bands_by_query(tasks.bands[0], tasks.bands[1], queries)
    if tasks.multiplicities is not None:
        repeats = tasks.multiplicities[tasks.heads[computed], heads[task_query]]
        task_query, computed = np.repeat(task_query, repeats), np.repeat(computed, repeats)
    first = np.searchsorted(index, np.arange(count))
    keys = np.full((count, 5 * _BANDS + 1), -1)  # -1: none
    for i, query in enumerate(queries.tolist()):
        points = _keys(query, mask[allowed[first[i] :][index[first[i] :] == i][:_BANDS]], tokens, chances[i])
        keys[i, : len(points)] = points
    expected = _count_bands(mask[allowed].T, index, queries, keys)
    actual = _count_bands(tasks.bands[:, computed], task_query, queries, keys)
    for i, j in np.argwhere(expected != actual).tolist():
        message = (
            f"query {queries[i]}, key {keys[i, j]}, head {heads[i]}: allowed {expected[i, j]} times, "
            f"computed {actual[i, j]} times"
        )
        yield Violation(RULE, None, program.kind, program.phase, None, message)


def _bands_by_query(begin: Ints, end: Ints, queries: Ints) -> tuple[Ints, Ints]:
    """(query number, band) of every query in a band, sorted by query."""
    query, band = np.nonzero((begin <= queries[:, None]) & (queries[:, None] < end))
    return query, band


def _keys(query: int, bands: Ints, tokens: int, chance: list[float]) -> list[int]:
    """Sample keys for a query: a random one and, for a few bands, its first and last visible key, their neighbours, and
    one in between."""
    keys = {int(chance[0] * tokens)}
    for (_, _, k0, k1, dmin, dmax), part in zip(bands.tolist(), chance[1:], strict=False):
        low, high = max(k0, query - dmax), min(k1 - 1, query - dmin)
        if low <= high:
            keys |= {low - 1, low, low + int(part * (high - low)), high, high + 1}
    return sorted(key for key in keys if 0 <= key < tokens)


def _count_bands(bands: Ints, number: Ints, queries: Ints, keys: Ints) -> Ints:
    """int64 [queries, keys]: number of bands that contain each (query, key), tested one by one. number: int64
    [bands], index in `queries` of each band's query."""
    (_, _, k0, k1, dmin, dmax), key = bands[:, :, None], keys[number]
    distance = queries[number, None] - key
    times = np.zeros(keys.shape, np.int64)
    np.add.at(times, number, (k0 <= key) & (key < k1) & (dmin <= distance) & (distance <= dmax))
    return times
