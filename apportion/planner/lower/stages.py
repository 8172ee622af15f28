"""When tasks run: the stage of each, and the order of a program; and which tasks of a stage become one.

A stage is a step of the compute schedule: some before the first round, one after each round, some behind the last.
Tasks that arrive by tile run in the stage of their round; those that need none fill the stages up.

Tiles that arrive together at a rank lie side by side there, in the order of their numbers, so that a task may reach
over several of them, as it may over blocks at home: fewer and larger kernel calls, though placement cut the keys.

    keys     tile 3   tile 4   tile 5        at home a block ends where a rank's rows go on
    queries  x x x x  x x x x  x . . .   \
             x x x x  x x x x  x x . .    } three tasks under one diagonal: one task
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import stages as core
from apportion.ir.arrays import Floats, Ints, changes
from apportion.ir.orders import ranked
from apportion.planner.problem import exact_sums
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Tasks


def program_order(
    tasks: Tasks, schedule: Schedule, rows: Rows, division: Ints | None = None
) -> tuple[Tasks, KeyParts, Ints]:
    """The tasks by rank and stage, merged where they can be, and their stages, int32 [tasks]. Within a stage those with
    a band that is not full come first, of these the longest: few of them have rows that another has too, so that they
    can open them. The rest keep the order in which they were found. division: int32 [tasks], where the schedule goes by
    them."""
    if division is None or schedule.division is None:
        tasks = strips(tasks, schedule, rows.per_rank)
        stage = stages(tasks, schedule, rows)
    else:
        stage = (schedule.leads - 1 + np.searchsorted(schedule.division, division, "right")).astype(np.int32)
    edges = schedule.edges
    columns, parts, stage = core.merge(
        tasks.columns,
        stage,
        schedule.stages,
        rows.ranks,
        _queries(tasks),
        rows.row - rows.starts[:-1],
        (edges.tile, edges.row, edges.rows, edges.dst, edges.lane, schedule.round),
    )
    return Tasks(*columns), KeyParts(*parts), stage


def stages(tasks: Tasks, schedule: Schedule, rows: Rows) -> Ints:
    """int32 [tasks]: 1 + round of their tile. Tasks that need none run in the first stage, in the last, or where they
    make every rank compute evenly from stage to stage, so that none keeps others waiting for its rounds."""
    first = np.int32(schedule.leads - 1 + schedule.rounds if schedule.local == "last" else 0)
    of_edge = np.append(schedule.leads + schedule.round, first)  # edge -1 picks the last
    stage, edge = of_edge[tasks.edge].astype(np.int32), tasks.edge
    if tasks.queries_move:
        of_edge[-1] = -1
        edge = np.maximum(edge, tasks.query_edge)
        stage = np.maximum(of_edge[tasks.edge], of_edge[tasks.query_edge]).astype(np.int32)
        stage[edge < 0] = first
    if schedule.own is not None:
        stage[edge < 0] = schedule.own[tasks.k[edge < 0]]
    elif schedule.local == "even":
        order: Ints = np.arange(len(tasks))
        visit, apart = np.arange(schedule.stages), 0
        if schedule.beside_exchange:  # few rows for the first and the last stage: others wait for these
            order = _over_members(tasks, rows, schedule.beside_exchange)
            visit, apart = np.append(0, np.roll(visit[1:], 1)), 2
        # the first stage of `visit` up to which a rank has computed less than these stages' share of its work; of the
        # first `apart` each counts by itself
        core.fill(stage, tasks.exec, edge, tasks.work, rows.ranks, _shares(schedule), order, visit, apart)
    return stage


def _over_members(tasks: Tasks, rows: Rows, members: int) -> Ints:
    """int64 [tasks]: an order in which each rank's tasks take turns over the shares that the members of its group have
    of its rows, the densest of a share first: what is exchanged for some of them then burdens all members alike."""
    share = tasks.row.astype(np.int64) * members // np.maximum(rows.per_rank[tasks.exec], 1)
    share += members * tasks.exec
    by_share = np.lexsort((-tasks.work / tasks.rows, share))
    fresh = changes(share[by_share])
    turn = np.empty(len(tasks), np.int64)
    turn[by_share] = np.arange(len(tasks)) - np.maximum.accumulate(np.where(fresh, np.arange(len(tasks)), 0))
    return np.lexsort((share, turn))


def _shares(schedule: Schedule) -> Floats:
    """float64 [stages]: what each should have of a rank's work."""
    share = np.ones(schedule.stages)
    if schedule.tails > 1 and not schedule.beside_exchange:  # others wait for what this rank relays
        share[0] /= 2
    share /= share.sum()
    if schedule.beside_exchange:
        share[[0, -1]] = np.minimum(share[[0, -1]], EXCHANGE_SHARE)
        share[1:-1] *= (1 - share[0] - share[-1]) / share[1:-1].sum()
    return share


# What is computed while an exchange goes on: enough to hide most of it, though every row of it adds to what is not
# hidden (simulated with groups of eight H100).
EXCHANGE_SHARE = 0.1
# A strip has at least this many query rows: shorter ones cost more than they hide (the kernel's efficiency falls).
STRIP_ROWS = 2048
# Nor do those that are computed beside an exchange have fewer than this.
LEAST_ROWS = 512


def strips(tasks: Tasks, schedule: Schedule, held: Ints) -> Tasks:
    """Large tasks that need no tile, cut into strips of query rows, so that each stage can have its share of them.
    held: int64 [ranks], the rows of each."""
    if schedule.local != "even" or schedule.stages == 1 or schedule.own is not None:
        return tasks
    local = np.flatnonzero((tasks.edge < 0) & (tasks.query_edge < 0) & (tasks.rows >= 2 * STRIP_ROWS))
    if not len(local):
        return tasks
    work = tasks.work
    parts, short = np.ones(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    total = np.maximum(exact_sums(tasks.exec, work, len(held))[tasks.exec[local]], 1)
    if schedule.beside_exchange:
        # beside large strips two of what a member needs for the first and the last stage
        keys, of_member = (tasks.k1 - tasks.k0)[local], held[tasks.exec[local]] // schedule.beside_exchange
        need = (EXCHANGE_SHARE / schedule.beside_exchange * total / keys).astype(np.int64)
        need = np.minimum(need, (EXCHANGE_SHARE * of_member).astype(np.int64))
        short[local] = np.where(3 * need < tasks.rows[local], np.maximum(need, LEAST_ROWS), 0)
    left = tasks.rows[local] - 2 * short[local]
    parts[local] = np.clip(2 * schedule.stages * work[local] // total, 1, np.maximum(left // STRIP_ROWS, 1))
    cut = (parts > 1).any() or short.any()
    return Tasks(*core.cut(tasks.columns, parts, short)) if cut else tasks


@dataclass(frozen=True)
class KeyParts:
    """What the tasks' keys are made of, integers [parts], by rising task: `task` has `keys` rows from `row` on, in the
    tile that arrived by `edge`, or at home, where that is -1."""

    task: Ints
    edge: Ints
    row: Ints
    keys: Ints


def _queries(tasks: Tasks) -> Ints:
    """int32 [tasks]: a number for the first query row of each task, of those of one rank equal only where tile and head
    group are, and the row."""
    if not tasks.queries_move and not tasks.group.any():
        return tasks.row
    tile = (tasks.query_edge + 1) * np.int64(int(tasks.group.max()) + 1) + tasks.group
    return ranked(tile * (int(tasks.row.max()) + 1) + tasks.row)[1].astype(np.int32)
