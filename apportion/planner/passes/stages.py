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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit
from apportion.ir.sorting import sort_order
from apportion.planner.passes.rows import Rows
from apportion.planner.passes.schedule import Schedule
from apportion.planner.passes.tasks import Edges, Tasks

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


def program_order(
    tasks: Tasks, schedule: Schedule, rows: Rows, division: Ints | None = None
) -> tuple[Tasks, KeyParts, Ints]:
    """The tasks by rank and stage, merged where they can be, and their stages, int32 [tasks]. Within a stage those with
    a band that is not full come first, of these the longest: few of them have rows that another has too, so that they
    can open them. The rest keep the order in which they were found. division: int32 [tasks], where the schedule goes by
    them."""
    count = schedule.stages
    if division is None or schedule.division is None:
        tasks = strips(tasks, schedule, rows.per_rank)
        stage = stages(tasks, schedule, rows)
    else:
        stage = (schedule.leads - 1 + np.searchsorted(schedule.division, division, "right")).astype(np.int32)
    tasks, stage, parts = merge_tasks(tasks, stage, schedule, rows)
    full = tasks.full
    key = 2 * (tasks.exec.astype(np.int64) * count + stage) + full
    longest = np.argsort(np.where(full, 0, -tasks.rows), kind="stable")
    order = longest[sort_order(key[longest], 2 * rows.ranks * count)]
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return tasks.take(order), parts.renumbered(place), stage[order]


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
        _fill(stage, tasks.exec, edge, tasks.work, rows.ranks, _shares(schedule), order, visit, apart)
    return stage


def _over_members(tasks: Tasks, rows: Rows, members: int) -> Ints:
    """int64 [tasks]: an order in which each rank's tasks take turns over the shares that the members of its group have
    of its rows, the densest of a share first: what is exchanged for some of them then burdens all members alike."""
    share = tasks.row.astype(np.int64) * members // np.maximum(rows.per_rank[tasks.exec], 1)
    share += members * tasks.exec
    by_share = np.lexsort((-tasks.work / tasks.rows, share))
    fresh = np.append(True, np.diff(share[by_share]) != 0)
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


@jit
def _fill(
    stage: Ints,
    rank: Ints,
    edge: Ints,
    work: Ints,
    ranks: int,
    share: Floats,
    order: Ints,
    visit: Ints,
    apart: int,
) -> None:
    """Give tasks without an edge, in this order, the first stage of `visit`, not before that of the one before, up to
    which their rank has computed less than these stages' share of its work; of the first `apart` stages each counts by
    itself. Into `stage`, in place."""
    load, total = np.zeros((ranks, len(share)), np.int64), np.zeros(ranks, np.int64)
    for task in range(len(rank)):
        total[rank[task]] += work[task]
        if edge[task] >= 0:
            load[rank[task], stage[task]] += work[task]
    due = np.cumsum(share[visit])
    now, done = np.zeros(ranks, np.int64), load[:, visit[0]].copy()
    for task in order:
        if edge[task] < 0:
            r = rank[task]
            while now[r] < len(visit) - 1 and (
                load[r, visit[now[r]]] >= total[r] * share[visit[now[r]]]
                if now[r] < apart
                else done[r] >= total[r] * due[now[r]]
            ):
                now[r] += 1
                done[r] += load[r, visit[now[r]]]
            stage[task] = visit[now[r]]
            done[r] += work[task]
            load[r, visit[now[r]]] += work[task]


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
    work, total = tasks.work, np.zeros(len(held), np.int64)
    np.add.at(total, tasks.exec, work)
    parts, short = np.ones(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    total = np.maximum(total[tasks.exec[local]], 1)
    if schedule.beside_exchange:
        # beside large strips two of what a member needs for the first and the last stage
        keys, of_member = (tasks.k1 - tasks.k0)[local], held[tasks.exec[local]] // schedule.beside_exchange
        need = (EXCHANGE_SHARE / schedule.beside_exchange * total / keys).astype(np.int64)
        need = np.minimum(need, (EXCHANGE_SHARE * of_member).astype(np.int64))
        short[local] = np.where(3 * need < tasks.rows[local], np.maximum(need, LEAST_ROWS), 0)
    left = tasks.rows[local] - 2 * short[local]
    parts[local] = np.clip(2 * schedule.stages * work[local] // total, 1, np.maximum(left // STRIP_ROWS, 1))
    return _cut_rows(tasks, parts, short, parts + 2 * (short > 0))


def _cut_rows(tasks: Tasks, parts: Ints, short: Ints, strips: Ints) -> Tasks:
    """Each task cut into so many strips: equal `parts`, and where `short` rows are given two such strips; each with the
    keys that its rows see."""
    of, cut = _strips(
        tasks.row,
        tasks.rows,
        tasks.k0,
        tasks.k1,
        tasks.dmin,
        tasks.dmax,
        parts,
        short,
        strips,
        int(strips.sum()),
    )
    columns = dict(zip(("row", "rows", "k0", "k1", "dmin", "dmax"), cut, strict=True))
    return replace(tasks.take(of), **columns)


@jit
def _strips(
    row: Ints,
    rows: Ints,
    k0: Ints,
    k1: Ints,
    dmin: Ints,
    dmax: Ints,
    parts: Ints,
    short: Ints,
    strips: Ints,
    size: int,
) -> tuple[Ints, Ints]:
    """int32 [strips]: the task of each; and int32 [6, strips]: its row, rows, k0, k1, dmin and dmax."""
    of, cut, count = np.empty(size, np.int32), np.empty((6, size), np.int32), 0
    for task in range(len(row)):
        tail, keys = short[task], np.int64(k1[task]) - k0[task]
        body = np.int64(rows[task]) - 2 * tail
        for place in range(strips[task]):
            after = place + 1
            low = body * min(place, parts[task]) // parts[task] + tail * max(place - parts[task], 0)
            high = body * min(after, parts[task]) // parts[task] + tail * max(after - parts[task], 0)
            first, last = max(low - dmax[task], 0), min(high - dmin[task], keys)
            shift = low - first  # a row and a key of the strip are this much nearer
            of[count] = task
            cut[0, count], cut[1, count] = row[task] + low, high - low
            cut[2, count], cut[3, count] = k0[task] + first, k0[task] + last
            cut[4, count] = max(dmin[task] - shift, 1 - (last - first))
            cut[5, count] = min(dmax[task] - shift, high - low - 1)
            count += 1
    return of, cut


@dataclass(frozen=True)
class KeyParts:
    """What the tasks' keys are made of, integers [parts], by rising task: `task` has `keys` rows from `row` on, in the
    tile that arrived by `edge`, or at home, where that is -1."""

    task: Ints
    edge: Ints
    row: Ints
    keys: Ints

    def renumbered(self, number: Ints) -> KeyParts:
        """By the tasks' new numbers, int32 [tasks]."""
        task = number[self.task]
        order = sort_order(task, len(number))
        return KeyParts(task[order], self.edge[order], self.row[order], self.keys[order])


def merge_tasks(tasks: Tasks, stage: Ints, schedule: Schedule, rows: Rows) -> tuple[Tasks, Ints, KeyParts]:
    """Larger tasks, by rank and stage, the stage of each, and their parts."""
    step = tasks.exec.astype(np.int64) * schedule.stages + stage
    order = sort_order(step, rows.ranks * schedule.stages)
    ordered, step = tasks.take(order), step[order]
    edges = schedule.edges
    row = (rows.row[ordered.k] + ordered.k0 - rows.starts[ordered.k]).astype(np.int64)
    away = np.flatnonzero(ordered.edge >= 0)
    row[away] -= edges.row[ordered.edge[away]]
    keys = (ordered.k1 - ordered.k0).astype(np.int32)
    into, count, dmin, first = _merge(
        step,
        *_queries(ordered),
        row,
        keys,
        ordered.dmin,
        ordered.dmax,
        ordered.edge,
        following(edges, schedule.round, rows.ranks),
        np.append(edges.rows, 0),
    )
    merged = replace(ordered.take(first), dmin=dmin)
    merged = replace(merged, k1=merged.k0 + count)
    return merged, stage[order][first], KeyParts(into, ordered.edge, row, keys)


def _queries(tasks: Tasks) -> tuple[Ints, Ints]:
    """A number for the first query row of each task, equal only where rank, tile and head group are, and the rows."""
    if not tasks.queries_move and not tasks.group.any():
        return tasks.row, tasks.rows
    tile = (tasks.query_edge + 1) * np.int64(int(tasks.group.max()) + 1) + tasks.group
    key = tile * (int(tasks.row.max()) + 1) + tasks.row
    return np.unique(key, return_inverse=True)[1], tasks.rows


def arena_order(edges: Edges) -> Ints | None:
    """The edges in the order in which tiles that arrive together lie in work rows; None: as they are."""
    rising = bool((edges.tile[1:] >= edges.tile[:-1]).all())
    return None if rising else np.argsort(edges.tile, kind="stable")


def following(edges: Edges, round_: Ints, ranks: int) -> Ints:
    """int32 [edges + 1]: the edge whose tile arrives with each edge's and lies behind it, -1 for none, and -1."""
    key = edges.dst.astype(np.int64) * (int(round_.max(initial=0)) + 1) + round_
    key = 2 * key + (edges.lane & 1)
    order = arena_order(edges)
    sizes = 2 * ranks * (int(round_.max(initial=0)) + 1)
    order = sort_order(key, sizes) if order is None else order[sort_order(key[order], sizes)]
    together = key[order[1:]] == key[order[:-1]]
    after = np.full(len(edges) + 1, -1, np.int32)
    after[order[:-1][together]] = order[1:][together]
    return after


@jit
def _merge(
    step: Ints,
    query: Ints,
    rows: Ints,
    row: Ints,
    keys: Ints,
    dmin: Ints,
    dmax: Ints,
    edge: Ints,
    after: Ints,
    tile: Ints,
) -> tuple[Ints, Ints, Ints, Ints]:
    """int32: for each task the number of the merged one that it is part of; and for each of these its keys, its dmin,
    and its first part. row: first key row, at home or in its tile; tile: rows of each edge's."""
    tasks = len(step)
    into, count = np.empty(tasks, np.int32), np.empty(tasks, np.int32)
    low, first = np.empty(tasks, np.int32), np.empty(tasks, np.int32)
    last = np.full(
        query.max() + 1 if tasks else 1, -1, np.int64
    )  # the last task of each query row, in any step
    merged = 0
    for task in range(tasks):
        before = last[query[task]]
        last[query[task]] = task
        if before >= 0 and step[before] == step[task] and rows[before] == rows[task]:
            part, end = into[before], row[before] + keys[before]
            if edge[before] == edge[task]:
                beside = end == row[task]
            else:
                beside = edge[before] >= 0 and edge[task] >= 0 and after[edge[before]] == edge[task]
                beside = beside and row[task] == 0 and end == tile[edge[before]]
            # one band over both: the same diagonals, or edges of the band that lie outside either part
            least = low[part]
            same = dmin[task] - count[part] == least
            same = same or (least == 1 - count[part] and dmin[task] - count[part] <= least)
            same = same and dmax[task] == min(dmax[first[part]] + count[part], rows[task] - 1)
            if beside and same:
                low[part] = dmin[task] - count[part]
                count[part] += keys[task]
                into[task] = part
                continue
        into[task], first[merged], count[merged], low[merged] = merged, task, keys[task], dmin[task]
        merged += 1
    return into, count[:merged].copy(), low[:merged].copy(), first[:merged].copy()
