"""Exact grouping: group sizes and the group of each sequence, minimizing the slowest group's time (FlexSP, section 4).

Works from both sides: a greedy mix and local search (`mixing`) give answers, integer programs (`programs`) bounds and
better answers. First the relaxed program is solved for time limits between the bound and the best answer, by bisection:
infeasibility raises the bound, a feasible answer gives the search counts of groups to try. Then the full program
redistributes the contents of a few groups at a time, to close the remaining gap. It solves a small problem as a
whole; its bound then proves the answer.

FlexSP solves one program per number of microbatches under a wall-clock limit. Here the limit is in steps, so that equal
problems have equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError, MissingDependencyError
from apportion.planner.solvers.contracts import Grouping, GroupingProblem
from apportion.planner.solvers.grouping.mixing import Mix, anneal, greedy_mix, improve, mix_of, polish
from apportion.planner.solvers.status import Budget, Limit, Status, Termination

#: default limit on the nodes of each search tree
DEFAULT_NODES = 100
# Sequences x ranks up to which these limits apply in full; larger problems get fewer steps, for the same total work:
_USUAL_SIZE = 4096
# local search: counts of groups to try; how many of the best mixes to anneal, and for how many steps; how many of the
# best of these to kick, and how often
_STEPS, _ANNEALED, _ANNEALS, _POLISHED, _KICKS = 1500, 40, 100_000, 12, 500
# relative effort of the local search that goes with each program
_BRIEF = 0.4
# searches after the last program, with different random draws
_LAST = 2
# local search does not aim below this share of the best value: unreachable goals only mislead it
_AIM = 0.985
# maximum number of bisection steps, and the gap at which bisection ends
_PROBES, _FINE = 16, 1.001
# bisection also ends after this many undecided programs: further ones are just as hard
_UNDECIDED = 2
# largest number of choices of a problem solved as a whole by its program
_COMPLETE = 1200
# number of parts of a larger problem to solve, and choices in the program of each
_PARTS, _PART = 6, 150
# larger parts are skipped: two groups of very many sequences, for which a program is worse than local search
_MAX_PART = 600
# HiGHS keeps constraints within 1e-6
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class _SearchState:
    """State of the search: the best mix, a lower bound, counts of groups not refuted by a program, and the number of
    programs and searches so far, which seeds the next."""

    best: Mix | None
    bound: float
    counts: tuple[int, ...] | None = None
    probes: int = 0

    def with_mix(self, mix: Mix | None) -> _SearchState:
        is_better = mix is not None and (self.best is None or mix.value < self.best.value)
        return replace(self, best=mix) if is_better else self

    def seeds(self, columns: int) -> list[tuple[int, ...]]:
        """Initial counts of groups for the search."""
        result = [] if self.best is None else [self.best.counts(columns)]
        return result if self.counts is None else [*result, self.counts]

    def done(self, budget: Budget) -> bool:
        return self.best is not None and budget.reached(self.best.value, self.bound)


def solve(problem: GroupingProblem, budget: Budget) -> Grouping:
    """Groups and assignment, never slower than `greedy`'s.

    OPTIMAL if value and bound agree within 1e-6; FEASIBLE(gap) if they are within the budget's gap; else FEASIBLE or
    NO_SOLUTION with the first limit reached. Raises CapacityError if a sequence, or all together, exceed the ranks'
    capacity, and MissingDependencyError.
    """
    order, case = _canonical(problem)
    check_capacity(case)
    state = _SearchState(None, _simple_bound(case))
    if not np.isfinite(state.bound):
        return _no_groups(problem, Termination(Status.INFEASIBLE, state.bound))
    state = state.with_mix(greedy_mix(case, state.bound))
    state, limit = _search(case, state, budget)
    if state.best is None:
        status = Status.INFEASIBLE if limit is None else Status.NO_SOLUTION
        return _no_groups(problem, Termination(status, state.bound, limit=limit))
    return _answer(problem, order, state.best, state.bound, limit)


def greedy(problem: GroupingProblem) -> Grouping:
    """The greedy mix alone, with the simple bound: the larger of rank-time over ranks and the slowest sequence's time
    at its best degree."""
    order, case = _canonical(problem)
    check_capacity(case)
    bound = _simple_bound(case)
    mix = greedy_mix(case, bound) if np.isfinite(bound) else None
    if mix is None:
        return _no_groups(problem, Termination(Status.NO_SOLUTION, bound))
    return _answer(problem, order, mix, bound, None)


def check_capacity(problem: GroupingProblem) -> None:
    """Raises CapacityError if a sequence, or all together, exceed the ranks' capacity."""
    degrees = problem.degrees[problem.degrees <= problem.ranks]
    largest = int(degrees.max(initial=0))
    longest, total = int(problem.sizes.max(initial=0)), int(problem.sizes.sum())
    if longest > largest * problem.cap:
        raise CapacityError(
            f"a sequence of {longest} tokens: the largest group, {largest} of {problem.ranks} ranks at {problem.cap} "
            f"tokens each, holds {largest * problem.cap}: use more ranks, a higher cap or a shorter sequence"
        )
    if total > problem.ranks * problem.cap:
        raise CapacityError(
            f"{total} tokens: {problem.ranks} ranks at {problem.cap} tokens each hold {problem.ranks * problem.cap}: "
            f"use more ranks, a higher cap or fewer sequences"
        )


def _canonical(problem: GroupingProblem) -> tuple[Ints, GroupingProblem]:
    """An order of the sequences, largest first, so that the given order does not matter; the problem in that order,
    without degrees above the number of ranks, and with infinite time where a sequence does not fit a group."""
    order = np.lexsort((*(-problem.times.T), -problem.sizes))
    degrees = problem.degrees[problem.degrees <= problem.ranks]
    times, sizes = problem.times[order][:, : len(degrees)].copy(), problem.sizes[order]
    times[sizes[:, None] > problem.cap * degrees] = np.inf
    if not len(degrees):
        degrees, times = problem.degrees[:1], np.full((len(order), 1), np.inf)
    return order, replace(problem, times=times, sizes=sizes, degrees=degrees)


def _simple_bound(problem: GroupingProblem) -> float:
    slowest = problem.times.min(1).max(initial=0.0)
    return float(max(slowest, (problem.times * problem.degrees).min(1).sum() / problem.ranks))


def _search(case: GroupingProblem, state: _SearchState, budget: Budget) -> tuple[_SearchState, Limit | None]:
    if state.done(budget):
        return state, Limit.GAP
    _check_packages()
    nodes = DEFAULT_NODES if budget.steps is None else int(budget.steps)
    if _is_small(case):
        state = _search_locally(case, state, budget, _BRIEF)
        return _solve_slots(case, state, budget, nodes)
    state = _bisect(case, state, budget, nodes)
    for _ in range(_LAST):
        if not state.done(budget):
            state = replace(_search_locally(case, state, budget), probes=state.probes + 1)
    state = _solve_parts(case, state, budget, nodes)
    if state.best is None and not np.isfinite(state.bound):
        return state, None
    if state.done(budget):
        return state, Limit.GAP
    return state, Limit.STEPS


def _search_locally(
    case: GroupingProblem, state: _SearchState, budget: Budget, effort: float = 1.0
) -> _SearchState:
    """Searches from the best mix's counts of groups and from `state.counts`."""
    goal = state.bound * (1 + budget.gap)
    if state.best is not None:
        goal = max(goal, _AIM * state.best.value)
    share = effort * min(1.0, _USUAL_SIZE / (len(case.sizes) * case.ranks))
    mixes = improve(case, state.seeds(len(case.degrees)), max(20, int(_STEPS * share)), goal)
    steps = max(1000, int(_ANNEALS * share))
    trials = [anneal(case, mix, steps, goal, state.probes) for mix in mixes[: max(4, int(_ANNEALED * share))]]
    for mix in sorted(trials, key=lambda mix: mix.value)[: max(2, int(_POLISHED * share))]:
        state = state.with_mix(polish(case, mix, max(20, int(_KICKS * share)), goal, state.probes))
        if state.done(budget):
            break
    return state


def _bisect(case: GroupingProblem, state: _SearchState, budget: Budget, nodes: int) -> _SearchState:
    """Raises the bound when the relaxed program is infeasible; else searches from the counts of its answer."""
    from apportion.planner.solvers.grouping.programs import mix_for

    # before the first answer, a time that no mix can exceed
    ceiling = 4 * float(case.times[np.isfinite(case.times)].sum())
    high = ceiling if state.best is None else state.best.value
    # slightly more, so that a value within the budget's gap of a refuted limit is accepted
    limit = high / (1 + max(budget.gap, _FINE - 1)) * (1 + _TOLERANCE)
    undecided = 0
    for probe in range(_PROBES):
        answer = mix_for(case, limit, nodes)
        undecided += not answer.refuted and answer.counts is None
        if answer.refuted:
            state = replace(state, bound=_bound_after(state, limit, ceiling), probes=probe + 1)
        else:
            high = limit
            state = replace(state, counts=answer.counts or state.counts, probes=probe + 1)
            state = _search_locally(case, state, budget, _BRIEF)
        high = high if state.best is None else min(high, state.best.value)
        if state.done(budget) or high <= _FINE * state.bound or undecided == _UNDECIDED:
            break
        limit = (max(state.bound, 1e-9 * high) * high) ** 0.5
    return state


def _bound_after(state: _SearchState, limit: float, ceiling: float) -> float:
    """The bound after a refutation; infinity if even half the maximum possible time is refuted."""
    return np.inf if limit >= ceiling / 2 else max(state.bound, limit)


def _max_counts(case: GroupingProblem) -> Ints:
    """int64 [degrees]: largest useful number of groups of each degree."""
    limits: Ints = np.minimum(case.ranks // case.degrees, np.isfinite(case.times).sum(0))
    return limits


def _is_small(case: GroupingProblem) -> bool:
    return int(_max_counts(case).sum()) * len(case.sizes) <= _COMPLETE


def _solve_slots(
    case: GroupingProblem, state: _SearchState, budget: Budget, nodes: int
) -> tuple[_SearchState, Limit | None]:
    """Solves the whole problem by its program."""
    from apportion.planner.solvers.grouping.programs import slots

    mix, run = slots(case, _max_counts(case), state.best, state.bound, nodes, budget.gap)
    if run.status is Status.INFEASIBLE and state.best is None:
        return replace(state, bound=np.inf), None
    state = replace(state.with_mix(mix), bound=max(state.bound, run.bound))
    return state, Limit.GAP if state.done(budget) else run.limit


def _solve_parts(case: GroupingProblem, state: _SearchState, budget: Budget, nodes: int) -> _SearchState:
    """Repeatedly redistributes the sequences of the slowest group and some others, by the full program."""
    from apportion.planner.solvers.grouping.programs import slots

    rng = np.random.Generator(np.random.PCG64(0))
    for _ in range(_PARTS):
        if state.best is None or state.done(budget):
            break
        part = _slowest_part(state.best, rng)
        if np.isin(state.best.group, part).sum() * len(part) > _MAX_PART:
            continue
        items = np.flatnonzero(np.isin(state.best.group, part))
        column = state.best.column[part]
        start = Mix(column, np.searchsorted(part, state.best.group[items]), state.best.time[part])
        part_case = replace(
            case, times=case.times[items], sizes=case.sizes[items], ranks=int(case.degrees[column].sum())
        )
        counts = np.bincount(column, minlength=len(case.degrees))
        mix, _ = slots(part_case, counts, start, 0.0, nodes, _FINE - 1)
        if mix is not None and mix.value < start.value:
            state = state.with_mix(_merge_part(case, state.best, part, items, mix))
    return state


def _slowest_part(mix: Mix, rng: np.random.Generator) -> Ints:
    """Indices of the slowest group and of random others, ascending: as many as fit a program of `_PART` choices."""
    slowest = int(mix.time.argmax())
    others = rng.permutation(len(mix.time))
    order = np.append(slowest, others[others != slowest])
    item_counts = np.cumsum(np.bincount(mix.group, minlength=len(mix.time))[order])
    count = max(2, int((item_counts * np.arange(1, len(order) + 1) <= _PART).sum()))
    part: Ints = np.sort(order[:count])
    return part


def _merge_part(case: GroupingProblem, mix: Mix, part: Ints, items: Ints, part_mix: Mix) -> Mix:
    """The mix with the groups of a part redistributed; these have the same degrees, in order."""
    column, group = mix.column.copy(), mix.group.copy()
    column[part] = part_mix.column
    group[items] = part[part_mix.group]
    return mix_of(case, column, group)


def _check_packages() -> None:
    for package in ("pulp", "highspy"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependencyError(package, "solvers", "solver ilp") from error


def _no_groups(problem: GroupingProblem, termination: Termination) -> Grouping:
    empty = np.zeros(0, np.int64)
    return Grouping(empty, np.full(len(problem.sizes), -1), empty.astype(np.float64), termination)


def _answer(problem: GroupingProblem, order: Ints, mix: Mix, bound: float, limit: Limit | None) -> Grouping:
    """The mix in the caller's order of sequences, without empty groups, sorted by size, then time, both descending."""
    groups = np.unique(mix.group)
    group_order = groups[np.lexsort((groups, -mix.time[groups], -mix.column[groups]))]
    number = np.full(len(mix.column), -1)
    number[group_order] = np.arange(len(group_order))
    group = np.empty(len(order), np.int64)
    group[order] = number[mix.group]
    degree, time = problem.degrees[mix.column[group_order]], mix.time[group_order]
    return Grouping(degree, group, time, _termination(mix.value, bound, limit))


def _termination(value: float, bound: float, limit: Limit | None) -> Termination:
    if value <= bound * (1 + _TOLERANCE):
        return Termination(Status.OPTIMAL, min(bound, value), value)
    return Termination(Status.FEASIBLE, bound, value, limit)
