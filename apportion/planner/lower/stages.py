"""Stages of tasks, program order, and merging of tasks within a stage.

A stage is a step of the compute schedule: some before the first round, one after each round, some after the last. Tasks
with tiles run in the stage of their round; tasks without tiles fill the stages.

Tiles that arrive together at a rank are adjacent there, in the order of their numbers, so that a task may span several
of them, like blocks at home: fewer and larger kernel calls even though placement cut the keys.

    keys     tile 3   tile 4   tile 5        home blocks may end within a rank's rows
    queries  x x x x  x x x x  x . . .   \
             x x x x  x x x x  x x . .    } three tasks under one diagonal: one task
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import stages as core
from apportion.ir.arrays import Floats, Ints, changes
from apportion.ir.orders import unique_inverse
from apportion.planner.problem import exact_sums
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Tasks


def program_order(
    tasks: Tasks, schedule: Schedule, rows: Rows, division: Ints | None = None
) -> tuple[Tasks, KeyParts, Ints]:
    """The tasks sorted by rank and stage, merged if possible, and their stages, int32 [tasks]. Within a stage tasks
    with a partial band come first, longest first: few of them share rows, so they can initialize
    accumulators. The rest keep their original order. division: int32 [tasks], for schedules by division."""
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
    """int32 [tasks]: the stage of their tile's round. Tasks without tiles run in the first stage, in the last round's,
    in those given by `own`, or so that every rank's work is even over stages and no rank delays others' rounds."""
    first = np.int32(schedule.leads - 1 + schedule.rounds if schedule.local == "last" else 0)
    edge_stage = np.append(schedule.leads + schedule.round, first)  # edge -1 picks the last entry
    stage, edge = edge_stage[tasks.edge].astype(np.int32), tasks.edge
    if tasks.queries_move:
        edge_stage[-1] = -1
        edge = np.maximum(edge, tasks.query_edge)
        stage = np.maximum(edge_stage[tasks.edge], edge_stage[tasks.query_edge]).astype(np.int32)
        stage[edge < 0] = first
    if schedule.own is not None:
        stage[edge < 0] = schedule.own[tasks.k[edge < 0]]
    elif schedule.local == "even":
        order: Ints = np.arange(len(tasks))
        visit, border = np.arange(schedule.stages), 0
        if schedule.beside_exchange:  # little work in the first and the last stage, for which others wait
            order = _alternate_members(tasks, rows, schedule.beside_exchange)
            visit, border = np.append(0, np.roll(visit[1:], 1)), 2
        # stages are filled in the order of `visit`: a rank moves on to the next once its work in those so far reaches
        # their target; the first `border` stages each have a target of their own
        core.fill(stage, tasks.exec, edge, tasks.work, rows.ranks, (_shares(schedule), visit, border), order)
    return stage


def _alternate_members(tasks: Tasks, rows: Rows, members: int) -> Ints:
    """int64 [tasks]: an order in which each rank's tasks alternate over its group members' shares of the rows, the
    densest tasks of a share first, so that exchanged rows burden all members equally."""
    share = tasks.row.astype(np.int64) * members // np.maximum(rows.per_rank[tasks.exec], 1)
    share += members * tasks.exec
    by_share = np.lexsort((-tasks.work / tasks.rows, share))
    begin = changes(share[by_share])
    index = np.empty(len(tasks), np.int64)
    index[by_share] = np.arange(len(tasks)) - np.maximum.accumulate(np.where(begin, np.arange(len(tasks)), 0))
    return np.lexsort((share, index))


def _shares(schedule: Schedule) -> Floats:
    """float64 [stages]: target fraction of a rank's work in each stage."""
    share = np.ones(schedule.stages)
    if schedule.tails > 1 and not schedule.beside_exchange:  # other ranks wait for rows relayed by this one
        share[0] /= 2
    share /= share.sum()
    if schedule.beside_exchange:
        share[[0, -1]] = np.minimum(share[[0, -1]], EXCHANGE_SHARE)
        share[1:-1] *= (1 - share[0] - share[-1]) / share[1:-1].sum()
    return share


# Fraction of work computed during an exchange: enough to hide most of the exchange, although every row of that work
# adds to the exposed part (simulated with groups of eight H100).
EXCHANGE_SHARE = 0.1
# Minimum query rows of a strip: shorter ones lose more time than they hide.
STRIP_ROWS = 2048
# Minimum for strips computed during an exchange.
MIN_ROWS = 512


def strips(tasks: Tasks, schedule: Schedule, rows: Ints) -> Tasks:
    """Cuts large tasks without tiles into strips of query rows, to distribute them over the stages. rows: int64
    [ranks], the rows of each."""
    if schedule.local != "even" or schedule.stages == 1 or schedule.own is not None:
        return tasks
    local = np.flatnonzero((tasks.edge < 0) & (tasks.query_edge < 0) & (tasks.rows >= 2 * STRIP_ROWS))
    if not len(local):
        return tasks
    work = tasks.work
    parts, border = np.ones(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    total = np.maximum(exact_sums(tasks.exec, work, len(rows))[tasks.exec[local]], 1)
    if schedule.beside_exchange:
        # in addition to large strips, two small ones sized for a member's first and last stage
        keys, member_rows = (tasks.k1 - tasks.k0)[local], rows[tasks.exec[local]] // schedule.beside_exchange
        minimum = (EXCHANGE_SHARE / schedule.beside_exchange * total / keys).astype(np.int64)
        minimum = np.minimum(minimum, (EXCHANGE_SHARE * member_rows).astype(np.int64))
        border[local] = np.where(3 * minimum < tasks.rows[local], np.maximum(minimum, MIN_ROWS), 0)
    middle = tasks.rows[local] - 2 * border[local]
    parts[local] = np.clip(2 * schedule.stages * work[local] // total, 1, np.maximum(middle // STRIP_ROWS, 1))
    cut = (parts > 1).any() or border.any()
    return Tasks(*core.cut(tasks.columns, parts, border)) if cut else tasks


@dataclass(frozen=True)
class KeyParts:
    """Key ranges of tasks, integers [parts], sorted by task: `task` has `keys` rows that begin at `row`, in the tile of
    `edge`, or at home for edge -1."""

    task: Ints
    edge: Ints
    row: Ints
    keys: Ints


def _queries(tasks: Tasks) -> Ints:
    """int32 [tasks]: a key for the first query row of each task, equal on one rank only for the same tile, head group
    and row."""
    if not tasks.queries_move and not tasks.group.any():
        return tasks.row
    tile = (tasks.query_edge + 1) * np.int64(int(tasks.group.max()) + 1) + tasks.group
    return unique_inverse(tile * (int(tasks.row.max()) + 1) + tasks.row)[1].astype(np.int32)
