"""Tasks of one stage that have the same queries, and keys that lie side by side, become one.

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
from apportion.planner.passes.layouts import Rows
from apportion.planner.passes.schedule import Schedule
from apportion.planner.passes.sorting import sort_order
from apportion.planner.passes.tasks import Edges, Tasks

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class KeyParts:
    """What the tasks' keys are made of, int32 [parts]: `task` has `keys` rows of key block `block`, which arrived by
    `edge`, -1 where they are at home; group: the task's head group."""

    task: Ints
    block: Ints
    edge: Ints
    keys: Ints
    group: Ints


def merge_tasks(
    tasks: Tasks, stage: Ints, schedule: Schedule, rows: Rows
) -> tuple[Tasks, Ints, KeyParts, Ints]:
    """Larger tasks, by rank and stage, the stage of each, their parts, and int32 [tasks] the one that each is now part
    of."""
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
    parts = KeyParts(into, ordered.k, ordered.edge, keys, ordered.group)
    number = np.empty(len(order), np.int32)
    number[order] = into
    return merged, stage[order][first], parts, number


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
