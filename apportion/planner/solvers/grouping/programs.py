"""The two integer programs of FlexSP's problem (its section 4), as PuLP models.

`slots` is the whole problem: x[k, g] is 1 if sequence k is in slot g, y[g] is 1 if slot g is used, and the largest
time is minimized. Equal slots are used in order, and the j-th of them takes no sequence before the j-th, which breaks
most symmetry.

`mix_for` is a relaxation: does some mix meet a time limit T? Groups of a degree are merged: x[k, c] is 1 if sequence k
is at degree c, and degree c has n[c] groups. The contents of n groups are bounded by their time and tokens, and by
dual feasible functions of both (Martello and Toth, 1990; Fekete and Schepers, 2001): functions f of a sequence's share
s of a group such that the f(s) of a group add up to at most 1 whenever the shares do. With integer variables only for
the heaviest sequences and the counts, the program is small; if it is infeasible, T is a lower bound. Many sequences are
merged by similar size into kinds, and x[k, c] is the part of a kind's work at degree c: each part takes the shortest
time of any member, so the bound holds, and the program does not grow with the number of sequences.

Needs pulp and highspy: import this module inside a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pulp

from apportion.ir.arrays import Bools, Floats, Ints, group_of
from apportion.planner.solvers.contracts import GroupingProblem
from apportion.planner.solvers.grouping.mixing import Mix, mix_of
from apportion.planner.solvers.highs import SolverRun, solve_model
from apportion.planner.solvers.status import Status

# `mix_for` has integer variables for sequences that need at least this share of a rank, but for at most this many
_HEAVY_SHARE, _MOST_HEAVY = 0.2, 32
# beyond this many sequences, the others are merged into this many kinds
_MOST_KINDS = 128
# thresholds of dual feasible functions: smaller shares are dropped, shares above the complement counted as whole
_DROPPED = (0.1, 0.15, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.45, 0.5)
# k of further dual feasible functions: floor((k + 1) * share) / k
_MULTIPLES = (1, 2, 3, 4, 5, 6)
# relative enlargement of groups, so that shares that fill one exactly are not counted above it
_SLACK = 1e-9


@dataclass(frozen=True)
class ProgramAnswer:
    """refuted: True if no mix meets the time limit; counts: number of groups of each degree in an answer."""

    refuted: bool
    counts: tuple[int, ...] | None


@dataclass(frozen=True)
class _Kinds:
    """Kinds of sequences that `mix_for` decides together. label: int64 [K], the kind of each sequence; part: float64
    [K], its weight in the kind, 1 in total; whole: bool [kinds], True for single heavy sequences."""

    label: Ints
    part: Floats
    whole: Bools

    def room(self, fits: Bools) -> Floats:
        """float64 [kinds, degrees]: largest fraction of each kind that may be placed at each degree."""
        rows = [np.bincount(self.label, self.part * column, len(self.whole)) for column in fits.T]
        limits: Floats = np.minimum(np.stack(rows, 1) * (1 + _SLACK), 1.0)
        return limits

    def minimum(self, items: Ints, row: Floats) -> Floats:
        """float64 [kinds]: least share that a whole kind takes, as if all of it were like its cheapest item."""
        result = np.full(len(self.whole), np.inf)
        np.minimum.at(result, self.label[items], row / self.part[items])
        return np.where(np.isfinite(result), result, 0.0)


def mix_for(problem: GroupingProblem, limit: float, nodes: int) -> ProgramAnswer:
    """Decides whether some mix may meet a time limit."""
    is_allowed = problem.times <= limit
    if not is_allowed.any(1).all():
        return ProgramAnswer(True, None)
    kinds = _kinds(problem, is_allowed, limit)
    model = pulp.LpProblem("mix", pulp.LpMinimize)
    variables, count = _mix_variables(model, problem, kinds, kinds.room(is_allowed))
    model += pulp.LpAffineExpression([(n, float(d)) for n, d in zip(count, problem.degrees, strict=True)])
    model += model.objective <= problem.ranks
    for k in range(len(kinds.whole)):
        model += _place_count(variables, k, len(count)) == 1
    for c, variable in enumerate(count):
        for shares in _shares(problem, kinds, np.flatnonzero(is_allowed[:, c]), c, limit):
            terms = [(variables[int(k), c], float(shares[k])) for k in np.flatnonzero(shares)]
            model += pulp.LpAffineExpression([*terms, (variable, -1.0)]) <= 0
    # any answer is enough: a gap of 100 % stops at the first
    run = solve_model(model, nodes, gap=1.0)
    if run.status in (Status.OPTIMAL, Status.FEASIBLE):
        return ProgramAnswer(False, tuple(round(variable.varValue) for variable in count))
    return ProgramAnswer(run.status is Status.INFEASIBLE, None)


def _kinds(problem: GroupingProblem, is_allowed: Bools, limit: float) -> _Kinds:
    """One kind per sequence; of many sequences, those of similar size and little work are merged."""
    work = np.where(is_allowed, problem.times * problem.degrees, np.inf).min(1)
    is_heavy = np.zeros(len(work), bool)
    is_heavy[np.argsort(-work, kind="stable")[:_MOST_HEAVY]] = True
    is_heavy &= work > _HEAVY_SHARE * limit
    if len(work) <= _MOST_KINDS:
        return _Kinds(np.arange(len(work)), np.ones(len(work)), is_heavy)
    # non-zero weights: any weights give a bound; weights by work give the best
    weight = np.maximum(work, 1e-9 * work.max() or 1.0)
    sums = np.cumsum(np.where(is_heavy, 0.0, weight))
    band = sums * _MOST_KINDS // sums[-1]
    is_first = is_heavy | np.roll(is_heavy, 1) | (band != np.roll(band, 1))
    is_first[0] = True
    label = np.cumsum(is_first) - 1
    is_whole = np.zeros(int(label.max()) + 1, bool)
    is_whole[label[is_heavy]] = True
    return _Kinds(label, weight / np.bincount(label, weight)[label], is_whole)


def _mix_variables(
    model: pulp.LpProblem, problem: GroupingProblem, kinds: _Kinds, room: Floats
) -> tuple[dict[tuple[int, int], pulp.LpVariable], list[pulp.LpVariable]]:
    variables = {
        (int(k), int(c)): model.add_variable(
            f"x_{k}_{c}", 0, float(room[k, c]), "Integer" if kinds.whole[k] else "Continuous"
        )
        for k, c in zip(*np.nonzero(room), strict=True)
    }
    limits = problem.ranks // problem.degrees
    return variables, [model.add_variable(f"n_{c}", 0, int(limits[c]), "Integer") for c in range(len(limits))]


def _shares(
    problem: GroupingProblem, kinds: _Kinds, items: Ints, column: int, limit: float
) -> Iterator[Floats]:
    """Distinct rows of the kinds' shares, each of which adds up to at most 1 in a group."""
    earlier: set[bytes] = set()
    capacity = float(problem.cap * problem.degrees[column]) * (1 + _SLACK)
    for share in (problem.times[items, column] / (limit * (1 + _SLACK)), problem.sizes[items] / capacity):
        for row in (kinds.minimum(items, row) for row in _dual_feasible(share)):
            if row.any() and row.tobytes() not in earlier:
                earlier.add(row.tobytes())
                yield row


def _dual_feasible(share: Floats) -> Iterator[Floats]:
    yield share
    for threshold in _DROPPED:
        yield np.where(share > 1 - threshold, 1.0, np.where(share < threshold, 0.0, share))
    for multiple in _MULTIPLES:
        yield np.floor((multiple + 1) * share) / multiple


def _place_count(x: dict[tuple[int, int], pulp.LpVariable], k: int, columns: int) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression([(x[k, c], 1.0) for c in range(columns) if (k, c) in x])


# ---- the whole problem


def slots(
    problem: GroupingProblem, counts: Ints, start: Mix | None, bound: float, nodes: int, gap: float
) -> tuple[Mix | None, SolverRun]:
    """The best mix with at most `counts` groups of each degree (int64 [degrees]), and the solver's run; its bound is a
    time. The start must have at most these counts; the answer is never worse than the start."""
    column = group_of(counts)
    worst = np.inf if start is None else start.value
    unit = start.value if start else float(problem.times[np.isfinite(problem.times)].max())
    model = pulp.LpProblem("slots", pulp.LpMinimize)
    x, y, time = _slot_variables(model, problem, column, worst, bound / unit)
    model += time
    for k in range(len(problem.times)):
        model += _place_count(x, k, len(column)) == 1
    for g, c in enumerate(column):
        items = [k for k in range(len(problem.times)) if (k, g) in x]
        time_terms = [(x[k, g], float(problem.times[k, c] / unit)) for k in items]
        size_terms = [(x[k, g], float(problem.sizes[k] / (problem.cap * problem.degrees[c]))) for k in items]
        model += pulp.LpAffineExpression([*time_terms, (time, -1.0)]) <= 0
        model += pulp.LpAffineExpression([*size_terms, (y[g], -1.0)]) <= 0
        if g and column[g - 1] == c:
            model += y[g] <= y[g - 1]
    ranks = [(y[g], float(problem.degrees[c])) for g, c in enumerate(column)]
    model += pulp.LpAffineExpression(ranks) <= problem.ranks
    if start is not None:
        _set_start(start, column, x, y, time, unit)
    run = solve_model(model, nodes, gap)
    mix = _read_mix(problem, column, x) if run.status in (Status.OPTIMAL, Status.FEASIBLE) else None
    return mix, SolverRun(run.status, run.limit, run.bound * unit)


def _slot_variables(
    model: pulp.LpProblem, problem: GroupingProblem, column: Ints, worst: float, bound: float
) -> tuple[dict[tuple[int, int], pulp.LpVariable], list[pulp.LpVariable], pulp.LpVariable]:
    nth = np.arange(len(column)) - np.searchsorted(column, column)
    x = {
        (k, g): model.add_variable(f"x_{k}_{g}", cat="Binary")
        for k in range(len(problem.times))
        for g in range(len(column))
        if nth[g] <= k and np.isfinite(problem.times[k, column[g]]) and problem.times[k, column[g]] <= worst
    }
    y = [model.add_variable(f"y_{g}", cat="Binary") for g in range(len(column))]
    return x, y, model.add_variable("time", max(0.0, bound))


def _set_start(
    start: Mix,
    column: Ints,
    x: dict[tuple[int, int], pulp.LpVariable],
    y: list[pulp.LpVariable],
    time: pulp.LpVariable,
    unit: float,
) -> None:
    """Sets variables from the start: groups of a degree take that degree's slots in the order of their first
    sequences."""
    groups, first = np.unique(start.group, return_index=True)
    order = groups[np.lexsort((first, start.column[groups]))]
    kinds = start.column[order]
    slot = np.full(len(start.column), -1)
    slot[order] = np.searchsorted(column, kinds) + np.arange(len(order)) - np.searchsorted(kinds, kinds)
    for (k, g), variable in x.items():
        variable.setInitialValue(float(slot[start.group[k]] == g))
    for g, variable in enumerate(y):
        variable.setInitialValue(float(g in slot))
    time.setInitialValue(start.value / unit)


def _read_mix(problem: GroupingProblem, column: Ints, x: dict[tuple[int, int], pulp.LpVariable]) -> Mix:
    group = np.zeros(len(problem.times), np.int64)
    for (k, g), variable in x.items():
        if variable.varValue > 0.5:
            group[k] = g
    return mix_of(problem, column, group)
