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

from apportion.ir.arrays import Floats, Ints, changes
from apportion.ir.loops.jit import jit, unlocked
from apportion.ir.loops.sorting import counting_order, radix_order, ranked
from apportion.planner.problem import exact_sums
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, Tasks


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
    columns, parts, row, stage = _merged(
        tasks.columns,
        stage,
        schedule.stages,
        rows.ranks,
        _queries(tasks),
        rows.row - rows.starts[:-1],
        edges.row,
        edges.rows,
        following(edges, schedule.round, rows.ranks),
    )
    return Tasks(*columns), KeyParts(parts[0], parts[1], row, parts[2]), stage


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
    return Tasks(*_strips(tasks.columns, parts, short)) if cut else tasks


@jit
def _strips(task: tuple[Ints, ...], parts: Ints, short: Ints) -> Ints:
    """The columns of tasks that are cut, int32 [11, strips]: each in so many equal `parts`, and behind these two strips
    of `short` rows, where that is not 0; each with the keys that its rows see."""
    count = 0
    for number in range(len(parts)):
        count += parts[number] + 2 * (short[number] > 0)
    of, found = np.empty(count, np.int32), np.empty((len(task), count), np.int32)
    strip = 0
    for number in range(len(parts)):
        for _ in range(parts[number] + 2 * (short[number] > 0)):
            of[strip] = number
            strip += 1
    for name in range(len(task)):
        column = task[name]
        for strip in range(count):
            found[name, strip] = column[of[strip]]
    strip = 0
    while strip < count:
        number = of[strip]
        whole, tail = parts[number], short[number]
        if whole == 1 and tail == 0:
            strip += 1
            continue
        rows, keys = np.int64(task[2][number]), np.int64(task[5][number]) - task[4][number]
        dmin, dmax, body = task[6][number], task[7][number], rows - 2 * tail
        for place in range(whole + 2 * (tail > 0)):
            after = place + 1
            low = body * min(place, whole) // whole + tail * max(place - whole, 0)
            high = body * min(after, whole) // whole + tail * max(after - whole, 0)
            first, last = max(low - dmax, 0), min(high - dmin, keys)
            shift = low - first  # a row and a key of the strip are this much nearer
            found[1, strip] += low
            found[2, strip] = high - low
            found[5, strip] = found[4, strip] + last
            found[4, strip] += first
            found[6, strip] = max(dmin - shift, 1 - (last - first))
            found[7, strip] = min(dmax - shift, high - low - 1)
            strip += 1
    return found


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


def arena_order(edges: Edges) -> Ints | None:
    """The edges in the order in which tiles that arrive together lie in work rows; None: as they are."""
    rising = bool((edges.tile[1:] >= edges.tile[:-1]).all())
    return None if rising else np.argsort(edges.tile, kind="stable")


def following(edges: Edges, round_: Ints, ranks: int) -> Ints:
    """int32 [edges + 1]: the edge whose tile arrives with each edge's and lies behind it, -1 for none, and -1."""
    order = arena_order(edges)
    order = np.arange(len(edges)) if order is None else order
    return _following(order, edges.dst, round_, edges.lane, ranks, int(round_.max(initial=0)) + 1)


@jit
def _following(order: Ints, dst: Ints, round_: Ints, lane: Ints, ranks: int, rounds: int) -> Ints:
    after, before = np.full(len(order) + 1, -1, np.int32), np.full(2 * ranks * rounds, -1, np.int32)
    for edge in order:
        together = 2 * (np.int64(dst[edge]) * rounds + round_[edge]) + (lane[edge] & 1)
        if before[together] >= 0:
            after[before[together]] = edge
        before[together] = edge
    return after


@unlocked
def _merged(
    task: tuple[Ints, ...],
    stage: Ints,
    stages: int,
    ranks: int,
    query: Ints,
    shift: Ints,
    edge_row: Ints,
    edge_rows: Ints,
    after: Ints,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Larger tasks in program order: their columns, int32 [11, merged]; their parts, int32 [3, parts] (task, edge and
    keys) and int64 [parts], the first key row of each; and their stages, int32 [merged].

    query: see `_queries`; shift: int64 [blocks], what makes rows of tokens; edge_row, edge_rows, after: of the edges.
    """
    rank, rows, k, k0, k1 = task[0], task[2], task[3], task[4], task[5]
    dmin, dmax, edge = task[6], task[7], task[8]
    tasks = len(stage)
    step, row, most = np.empty(tasks, np.int32), np.empty(tasks, np.int64), 0
    for at in range(tasks):
        step[at] = rank[at] * stages + stage[at]
        row[at] = shift[k[at]] + k0[at]
        if edge[at] >= 0:
            row[at] -= edge_row[edge[at]]
        most = max(most, query[at])
    by_step = counting_order(step, ranks * stages)
    into, first = np.empty(tasks, np.int32), np.empty(tasks, np.int32)
    count, low = np.empty(tasks, np.int32), np.empty(tasks, np.int32)
    last = np.full(most + 1, -1, np.int32)  # the last task of each query row, in any step
    merged = 0
    for at in by_step:
        before, keys = last[query[at]], np.int64(k1[at]) - k0[at]
        last[query[at]] = at
        if before >= 0 and step[before] == step[at] and rows[before] == rows[at]:
            part, end = into[before], row[before] + k1[before] - k0[before]
            if edge[before] == edge[at]:
                beside = end == row[at]
            else:
                beside = edge[before] >= 0 and edge[at] >= 0 and after[edge[before]] == edge[at]
                beside = beside and row[at] == 0 and end == edge_rows[edge[before]]
            # one band over both: the same diagonals, or edges of the band that lie outside either part
            least, begin = low[part], dmin[at] - count[part]
            same = begin == least or (least == 1 - count[part] and begin <= least)
            if beside and same and dmax[at] == min(dmax[first[part]] + count[part], rows[at] - 1):
                low[part] = begin
                count[part] += keys
                into[at] = part
                continue
        into[at], first[merged], count[merged], low[merged] = merged, at, keys, dmin[at]
        merged += 1
    order = _program_order(step, rows, dmax, first, count, low, merged, ranks * stages)
    columns, made = np.empty((len(task), merged), np.int32), np.empty(merged, np.int32)
    for name in range(len(task)):
        column = task[name]
        for at in range(merged):
            columns[name, at] = column[first[order[at]]]
    number = np.empty(merged, np.int32)
    for at in range(merged):
        one = order[at]
        columns[5, at] = columns[4, at] + count[one]
        columns[6, at], made[at], number[one] = low[one], stage[first[one]], at
    parts, part_row = _parts(by_step, number, into, edge, k0, k1, row)
    return columns, parts, part_row, made


@unlocked
def _program_order(
    step: Ints, rows: Ints, dmax: Ints, first: Ints, count: Ints, low: Ints, merged: int, steps: int
) -> Ints:
    """int32 [merged]: the order of a program, of tasks in the order of their steps."""
    longest, most = np.empty(merged, np.int64), 0
    for one in range(merged):
        most = max(most, rows[first[one]])
    key = np.empty(merged, np.int32)
    for one in range(merged):
        task = first[one]
        full = low[one] <= 1 - count[one] and dmax[task] >= rows[task] - 1
        key[one], longest[one] = 2 * step[task] + full, 0 if full else most - rows[task]
    falling = radix_order(longest, most)
    order = counting_order(key[falling], 2 * steps)
    for at in range(merged):
        order[at] = falling[order[at]]
    return order


@jit
def _parts(
    by_step: Ints, number: Ints, into: Ints, edge: Ints, k0: Ints, k1: Ints, row: Ints
) -> tuple[Ints, Ints]:
    """What each task, by its `number` int32 [merged] in the program, is made of: see `_merged`."""
    place = np.zeros(len(number) + 1, np.int64)
    for task in by_step:
        place[number[into[task]] + 1] += 1
    for one in range(len(number)):
        place[one + 1] += place[one]
    parts, part_row = np.empty((3, len(by_step)), np.int32), np.empty(len(by_step), np.int64)
    for task in by_step:
        one = number[into[task]]
        at = place[one]
        parts[0, at], parts[1, at], parts[2, at] = one, edge[task], k1[task] - k0[task]
        part_row[at] = row[task]
        place[one] += 1
    return parts, part_row
