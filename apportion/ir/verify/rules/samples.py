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
    """Violations of the rule `samples`. The points are drawn by the plan's id."""
    seed = int.from_bytes(subject.plan.id[:8], "little")
    seen: list[Tasks] = []
    for program in subject.programs:
        tasks = subject.tasks(program)
        if not any(tasks is other for other in seen):  # skips tasks already sampled for forward
            seen.append(tasks)
            draw = np.random.Generator(np.random.PCG64(seed))
            yield from _sample(program, subject.mask(program.kind), tasks, draw)


def _sample(program: Program, mask: Ints, tasks: Tasks, draw: np.random.Generator) -> Iterator[Violation]:
    tokens, sets = int(program.home_rows.sum()), program.q_sets
    count = int(np.clip(_COMPARISONS // (tasks.bands.shape[1] + len(mask) + 1), *_QUERIES))
    queries, heads = draw.integers(0, tokens, count), draw.integers(0, sets.heads, count)
    between = draw.random((count, _BANDS + 1)).tolist()
    at, allowed = _bands_by_query(mask[:, 0], mask[:, 1], queries)
    of, computed = _bands_by_query(tasks.bands[0], tasks.bands[1], queries)
    if tasks.times is not None:
        often = tasks.times[tasks.heads[computed], heads[of]]
        of, computed = np.repeat(of, often), np.repeat(computed, often)
    first = np.searchsorted(at, np.arange(count))
    keys = np.full((count, 5 * _BANDS + 1), -1)  # -1: none
    for i, query in enumerate(queries.tolist()):
        seen = _keys(query, mask[allowed[first[i] :][at[first[i] :] == i][:_BANDS]], tokens, between[i])
        keys[i, : len(seen)] = seen
    wanted = _times(mask[allowed].T, at, queries, keys)
    found = _times(tasks.bands[:, computed], of, queries, keys)
    for i, j in np.argwhere(wanted != found).tolist():
        message = (
            f"query {queries[i]}, key {keys[i, j]}, head {heads[i]}: allowed {wanted[i, j]} times, "
            f"computed {found[i, j]} times"
        )
        yield Violation(RULE, None, program.kind, program.phase, None, message)


def _bands_by_query(begin: Ints, end: Ints, queries: Ints) -> tuple[Ints, Ints]:
    """(query number, band) of every query in a band, by query."""
    of, band = np.nonzero((begin <= queries[:, None]) & (queries[:, None] < end))
    return of, band


def _keys(query: int, bands: Ints, tokens: int, chance: list[float]) -> list[int]:
    """Sample keys for a query: a random one, and for a few bands its first and last visible key, their neighbours, and
    one in between."""
    keys = {int(chance[0] * tokens)}
    for (_, _, k0, k1, dmin, dmax), part in zip(bands.tolist(), chance[1:], strict=False):
        low, high = max(k0, query - dmax), min(k1 - 1, query - dmin)
        if low <= high:
            keys |= {low - 1, low, low + int(part * (high - low)), high, high + 1}
    return sorted(key for key in keys if 0 <= key < tokens)


def _times(bands: Ints, of: Ints, queries: Ints, keys: Ints) -> Ints:
    """int64 [queries, keys]: number of bands that contain the pair (query, key), by the definition of a band. of: int64
    [bands], the query number of each band."""
    (_, _, k0, k1, dmin, dmax), key = bands[:, :, None], keys[of]
    apart = queries[of, None] - key
    times = np.zeros(keys.shape, np.int64)
    np.add.at(times, of, (k0 <= key) & (key < k1) & (dmin <= apart) & (apart <= dmax))
    return times
