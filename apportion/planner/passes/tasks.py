"""What must be computed where: the tasks of one attention kind, and the tiles they need from other ranks.

A task is a band cut by a (query block, key block) rectangle. Queries stay home: a task runs where its query block
lives, and the KV rows that it sees must reach that rank once (an *edge*: key block -> rank).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Tasks:
    """Columns int32 [tasks]; tokens are global.

    entry: index into the row pieces; q, k: query and key block; k0, k1: keys; dmin, dmax: the band counted from
    (q0, k0) and clipped; edge: the edge that brings the keys, -1 where they are at home.
    Row pieces, int32 [entries]: entry_block and the query rows entry_q0, entry_q1 (a band cut by a query block).
    """

    entry_block: Ints
    entry_q0: Ints
    entry_q1: Ints
    entry: Ints
    q: Ints
    k: Ints
    k0: Ints
    k1: Ints
    dmin: Ints
    dmax: Ints
    edge: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def take(self, order: Ints) -> Tasks:
        """The tasks in another order."""
        per_task = ("entry", "q", "k", "k0", "k1", "dmin", "dmax", "edge")
        return replace(self, **{name: np.take(getattr(self, name), order) for name in per_task})


@dataclass(frozen=True)
class Edges:
    """KV tiles to move, int32 [edges]: block `block` keys [k0, k1) from rank `src` to rank `dst`."""

    block: Ints
    src: Ints
    dst: Ints
    k0: Ints
    k1: Ints

    def __len__(self) -> int:
        return len(self.block)

    @property
    def rows(self) -> Ints:
        return self.k1 - self.k0


def find_tasks(bands: Ints, starts: Ints, home: Ints, ranks: int) -> tuple[Tasks, Edges]:
    """Tasks and edges of one kind.

    bands: int64 [bands, 6], global tokens; starts: int64 [blocks + 1]; home: int64 [blocks].
    """
    first = np.maximum(np.searchsorted(starts, bands[:, 0], "right") - 1, 0)
    first_key = np.maximum(np.searchsorted(starts, bands[:, 2], "right") - 1, 0)
    bands = np.ascontiguousarray(bands)
    entries, tasks = _count(bands, starts, first, first_key)
    entry, task = _fill(bands, starts, first, first_key, entries, tasks)
    edge, edges = _edges(task[1], task[2], task[3], task[4], home, ranks)
    block, dst, k0, k1 = edges
    entry_block, entry_q0, entry_q1 = entry
    of_entry, q, q_k, key0, key1, dmin, dmax = task
    found = Tasks(entry_block, entry_q0, entry_q1, of_entry, q, q_k, key0, key1, dmin, dmax, edge)
    return found, Edges(block, home[block].astype(np.int32), dst, k0, k1)


@jit
def _reach(band: Ints, low: int, high: int) -> tuple[int, int, int, int]:
    """Rows of the band in [low, high) and the keys that they see: q0, q1, k0, k1 (empty where q0 >= q1 or k0 >= k1)."""
    q0, q1 = max(band[0], low), min(band[1], high)
    return q0, q1, max(band[2], q0 - band[5]), min(band[3], q1 - band[4])


@jit
def _count(bands: Ints, starts: Ints, first: Ints, first_key: Ints) -> tuple[int, int]:
    entries, tasks, blocks = 0, 0, len(starts) - 1
    for i in range(len(bands)):
        block, key = first[i], first_key[i]
        while block < blocks and starts[block] < bands[i, 1]:
            q0, q1, k0, k1 = _reach(bands[i], starts[block], starts[block + 1])
            if q0 < q1 and k0 < k1:
                entries += 1
                while starts[key + 1] <= k0:
                    key += 1
                last = key
                while last < blocks and starts[last] < k1:
                    tasks, last = tasks + 1, last + 1
            block += 1
    return entries, tasks


@jit
def _fill(
    bands: Ints, starts: Ints, first: Ints, first_key: Ints, entries: int, tasks: int
) -> tuple[Ints, Ints]:
    entry, task = np.empty((3, entries), np.int32), np.empty((7, tasks), np.int32)
    e, t, blocks = 0, 0, len(starts) - 1
    for i in range(len(bands)):
        block, key = first[i], first_key[i]
        while block < blocks and starts[block] < bands[i, 1]:
            q0, q1, k0, k1 = _reach(bands[i], starts[block], starts[block + 1])
            if q0 < q1 and k0 < k1:
                entry[0, e], entry[1, e], entry[2, e] = block, q0, q1
                while starts[key + 1] <= k0:
                    key += 1
                last = key
                while last < blocks and starts[last] < k1:
                    a, b = max(k0, starts[last]), min(k1, starts[last + 1])
                    task[0, t], task[1, t], task[2, t], task[3, t], task[4, t] = e, block, last, a, b
                    task[5, t] = max(bands[i, 4] - (q0 - a), a - b + 1)
                    task[6, t] = min(bands[i, 5] - (q0 - a), q1 - q0 - 1)
                    t, last = t + 1, last + 1
                e += 1
            block += 1
    return entry, task


@jit
def _edges(q: Ints, k: Ints, k0: Ints, k1: Ints, home: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Edge of each task (-1: local) and the edges, by (key block, first use): block, dst, and the hull of the keys."""
    edge = np.full(len(q), -1, np.int32)
    order = _by_key(k, len(home))
    seen, at = np.full(ranks, -1, np.int64), np.full(ranks, -1, np.int64)
    edges, count = np.empty((4, len(q)), np.int32), 0
    for index in order:
        block, dst = k[index], home[q[index]]
        if home[block] == dst:
            continue
        if seen[dst] != block:
            seen[dst], at[dst] = block, count
            edges[0, count], edges[1, count] = block, dst
            edges[2, count], edges[3, count] = k0[index], k1[index]
            count += 1
        e = at[dst]
        edge[index] = e
        edges[2, e], edges[3, e] = min(edges[2, e], k0[index]), max(edges[3, e], k1[index])
    return edge, edges[:, :count].copy()


@jit
def _by_key(key: Ints, size: int) -> Ints:
    """Stable counting sort: the order that sorts int64 keys in [0, size)."""
    place = np.zeros(size + 1, np.int64)
    for value in key:
        place[value + 1] += 1
    for index in range(size):
        place[index + 1] += place[index]
    order = np.empty(len(key), np.int32)
    for index in range(len(key)):
        order[place[key[index]]] = index
        place[key[index]] += 1
    return order


def sort_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key` (values in [0, size))."""
    return _by_key(key, size)
