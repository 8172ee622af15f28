"""Rule 2: the tasks of every query head cover the mask exactly, each allowed pair once and nothing else.

Exact at any size, by three sums and sweeps over bands: the area of each task equals its area inside the mask, so
nothing forbidden is computed; no two tasks share a pair, so nothing is computed twice; and the areas add up to the
mask's, so nothing is missing.

Kinds that choose keys at run time have tasks only at their queries' home ranks, with all heads; the rows gathered there
must include every row that any query of the rank may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.masks import bands as algebra
from apportion.ir.plan.visible import obstacle
from apportion.ir.verify.attended import Tasks, areas_inside, corner_order, overlaps
from apportion.ir.verify.report import Violation, at_instruction, first_few
from apportion.ir.verify.view import Program

if TYPE_CHECKING:
    from apportion.ir.verify.subject import Subject

RULE = "coverage"
_MOST = 16


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `coverage`."""
    for kind in subject.plan.request.model.balance:
        tables = subject.plan.programs.get((kind, "forward"))
        if tables is not None and (text := obstacle(tables)):
            message = (
                f"does not gather all visible rows of its queries, as `balance` of the model requires: {text}"
            )
            yield Violation(RULE, None, kind, "forward", None, message)
    if not subject.holds:
        for program in subject.programs:
            yield from first_few(_violations(subject, program))


def _violations(subject: Subject, program: Program) -> Iterator[Violation]:
    """Violations of the first list of tasks that has any."""
    columns, tasks = np.ascontiguousarray(subject.mask(program.kind).T), subject.tasks(program)
    if tasks.complete and len(subject.mask(program.kind)):
        yield from _check_heads(program, tasks)
    for heads, index in _lists_by_head(program, tasks):
        bands = tasks.bands if index is None else np.ascontiguousarray(tasks.bands[:, index])
        numbers = tasks.task if index is None else tasks.task[index]
        try:
            violations = list(_check_list(subject, program, bands, numbers, columns, tasks.complete, heads))
        except CapacityError as error:
            violations = [Violation(RULE, None, program.kind, program.phase, None, str(error))]
        yield from violations
        if violations:
            return  # lists of other heads have the same errors


def _check_heads(program: Program, tasks: Tasks) -> Iterator[Violation]:
    """Checks that every query head has tasks."""
    computed = np.zeros(program.q_sets.heads, bool)
    for number in np.unique(tasks.heads).tolist():
        computed[program.q_sets.members[number]] = True
    if not computed.all():
        names = ", ".join(map(str, np.flatnonzero(~computed)[:8]))
        message = f"no task computes query heads {names} ({int((~computed).sum())} of {len(computed)} heads)"
        yield Violation("heads", None, program.kind, program.phase, None, message)


def _lists_by_head(program: Program, tasks: Tasks) -> Iterator[tuple[str, Ints | None]]:
    """Yields (phrase for the heads, pieces of their tasks or None for all) for every distinct list of bands among the
    query heads."""
    if not program.splits_heads:
        yield "", None
        return
    sets = tasks.heads
    numbers = np.flatnonzero(np.bincount(sets)).tolist()
    member = np.zeros((len(numbers), program.q_sets.heads), bool)
    for i, number in enumerate(numbers):
        member[i, program.q_sets.members[number]] = True
    if numbers and (member.sum(axis=0) == 1).all() and _are_copies(tasks, len(numbers)):
        yield f" of query heads {_abbreviate(np.flatnonzero(member[0]))}", np.flatnonzero(sets == numbers[0])
        return
    groups, first, inverse = np.unique(member, axis=1, return_index=True, return_inverse=True)
    earlier: list[Ints] = []
    for group in np.argsort(first).tolist():
        has_group = np.zeros(len(program.q_sets.members), bool)
        has_group[np.array(numbers, np.int64)[groups[:, group]]] = True
        index = np.flatnonzero(has_group[sets])
        bands = tasks.bands[:, index]
        # two bands with the same corner may come in either order; then both lists are checked
        sorted_bands = bands[:, corner_order(bands)]
        if not any(np.array_equal(sorted_bands, other) for other in earlier):
            earlier.append(sorted_bands)
            yield f" of query heads {_abbreviate(np.flatnonzero(inverse.ravel() == group))}", index


def _are_copies(tasks: Tasks, sets: int) -> bool:
    """True if all head sets have the same bands in the same order, as members of a group do."""
    order = np.argsort(tasks.heads, kind="stable")
    if len(order) % sets or (np.diff(tasks.heads[order].reshape(sets, -1)[:, [0, -1]]) != 0).any():
        return False
    bands = tasks.bands[:, order].reshape(6, sets, -1)
    return bool((bands == bands[:, :1]).all())


def _abbreviate(heads: Ints) -> str:
    text = ", ".join(map(str, heads[:4]))
    return text if len(heads) <= 4 else f"{text}, … ({len(heads)})"


def _check_list(
    subject: Subject, program: Program, bands: Ints, task: Ints, mask: Ints, complete: bool, heads: str
) -> Iterator[Violation]:
    areas, inner_areas = areas_inside(bands, mask)
    wrong_tasks = np.flatnonzero(areas != inner_areas)
    for i in wrong_tasks[:_MOST].tolist():
        extra = int(areas[i] - inner_areas[i])
        message = f"{_task(program, task, i)}{heads} computes {extra} forbidden pairs: {_band(bands[:, i])}"
        yield at_instruction(RULE, program, _instruction(program, task, i), message)
    pairs = overlaps(bands)
    for i, j, shared in pairs.tolist():
        rank, instruction = _place(program, task, i)
        message = (
            f"{_task(program, task, j)}{heads} computes {shared} pairs that rank {rank}, instruction "
            f"{instruction} also computes: {_band(bands[:, j])} and {_band(bands[:, i])}"
        )
        yield at_instruction(RULE, program, _instruction(program, task, j), message)
    if complete and not len(pairs) and not len(wrong_tasks):
        yield from _check_missing(subject, program, bands, inner_areas, mask, heads)


def _instruction(program: Program, task: Ints, i: int) -> int:
    return int(program.instruction_of(program.task_list)[task[i]])


def _place(program: Program, task: Ints, i: int) -> tuple[int, int]:
    instruction, table = _instruction(program, task, i), program["instructions"]
    return table.rank_and_row(instruction)


def _task(program: Program, task: Ints, i: int) -> str:
    name = program.task_list
    return f"row {program[name].rank_and_row(int(task[i]))[1]} of {name}"


def _band(band: Ints) -> str:
    q0, q1, k0, k1, dmin, dmax = (int(x) for x in band)
    return f"queries [{q0}, {q1}) x keys [{k0}, {k1}), {dmin} <= q - k <= {dmax}"


def _check_missing(
    subject: Subject, program: Program, bands: Ints, inner_areas: Ints, mask: Ints, heads: str
) -> Iterator[Violation]:
    """Finds pairs that the mask allows but no task computes: the first band, then its first query and key."""
    areas = algebra.area(mask.T)
    missing = int(areas.sum()) - int(inner_areas.sum())
    if missing == 0:
        return
    order = np.lexsort((bands[2], bands[0]))
    tasks = np.ascontiguousarray(bands[:, order])
    gaps = np.flatnonzero(areas_inside(mask, tasks)[1] != areas)
    query, key = _first_missing(mask[:, gaps[:1]], tasks)
    rank, row = subject.home_of(query)
    message = (
        f"the tasks{heads} leave out {missing} of {int(areas.sum())} allowed pairs, in {len(gaps)} bands of the mask; "
        f"the first is query {query} (home row {row} of rank {rank}), key {key}, in {_band(mask[:, gaps[0]])}"
    )
    yield Violation(RULE, rank, program.kind, program.phase, None, message)


def _first_missing(band: Ints, tasks: Ints) -> tuple[int, int]:
    """(query, key): the first query of a band [6, 1] with a pair that no task computes, and its first such key, by
    bisection."""
    cut = band.copy()
    for side in (1, 3):
        low, high = int(cut[side - 1, 0]), int(cut[side, 0])
        while high - low > 1:  # invariant: the pair is in [low, high) and nothing is missing before low
            middle = (low + high) // 2
            cut[side, 0] = middle
            area, covered = areas_inside(cut, tasks)
            low, high = (low, middle) if area[0] != covered[0] else (middle, high)
        cut[side - 1, 0], cut[side, 0] = low, low + 1
    return int(cut[0, 0]), int(cut[2, 0])
