"""Recurrent layers under a placement: runs, folding of states of cut documents, and halo rows before runs.

    rank 0  |aaaa|bb|aaa|       runs: consecutive tokens of one branch of a document
    rank 1  |aa|cccc|           past of a run: the run with the token before its first
    folds                       document a's runs in order: each rank that has one folds some heads of all of them

A document in one run needs no communication and no fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints, changes, group_of, index_in_group, offsets
from apportion.ir.isa import RECURRENCE_TABLES
from apportion.ir.orders import stable_order
from apportion.ir.plan.moves import move_table
from apportion.ir.plan.tables import Layout, Recurrence, Table
from apportion.ir.request.batch import Batch
from apportion.ir.request.recurrent import Recurrent, widest_halo

NONE = -1


def recurrence(layout: Layout, batch: Batch, kinds: Mapping[str, Recurrent]) -> Recurrence:
    """The tables of recurrent `kinds` (in sorted order) for a layout of a batch. Raises ConfigError if the batch's
    masks define no token order."""
    runs = Runs.of(layout, batch)
    folds, states = _folds(runs, np.array([kind.heads for kind in kinds.values()]))
    return Recurrence(
        {"runs": _runs(runs), "folds": folds, "states": states, "halo": _halo(runs, widest_halo(kinds))}
    )


@dataclass(frozen=True)
class Runs:
    """The runs of all ranks, by rank and row: int64 [runs] each, except ptr, [ranks + 1].

    token: the run's first. past: the previous run, numbered over all ranks, or -1. document: a number, the same for
    connected runs.
    """

    ptr: Ints
    rank: Ints
    row: Ints
    rows: Ints
    token: Ints
    sequence: Ints
    position: Ints
    past: Ints
    document: Ints

    @staticmethod
    def of(layout: Layout, batch: Batch) -> Runs:
        """Finds the runs of a layout. Raises ConfigError if the batch's masks define no token order."""
        branches, spans = batch.branches(), layout.spans
        order = np.lexsort((spans["row"], spans.rank_of_row()))
        first_row, token, length = (spans.wide(name)[order] for name in ("row", "token", "length"))
        first_branch = branches.of(token)
        count = branches.of(token + length - 1) - first_branch + 1
        span, branch = group_of(count), np.repeat(first_branch, count) + index_in_group(count)
        branch_end = np.append(branches.starts[1:], batch.tokens)
        start = np.maximum(token[span], branches.starts[branch])
        end = np.minimum((token + length)[span], branch_end[branch])
        rank, row = spans.rank_of_row()[span], first_row[span] + start - token[span]
        is_start = start == branches.starts[branch]
        run_starts = np.flatnonzero(changes(rank) | is_start | (start != np.append(-1, end[:-1])))
        rows = np.add.reduceat(end - start, run_starts)
        rank, row, first, is_start = (column[run_starts] for column in (rank, row, start, is_start))
        branch = branch[run_starts]

        by_token, parent = stable_order(first), branches.parent[branch]
        index = np.empty_like(by_token)
        index[by_token] = np.arange(len(first))
        previous = np.where(is_start, np.searchsorted(first[by_token], branch_end[parent]), index) - 1
        return Runs(
            np.searchsorted(rank, np.arange(spans.ranks + 1)),
            rank,
            row,
            rows,
            first,
            np.searchsorted(batch.starts, first, "right") - 1,
            branches.position[branch] + first - branches.starts[branch],
            np.where(is_start & (parent < 0), NONE, by_token[previous]),
            branches.roots()[branch],
        )

    @cached_property
    def leads(self) -> Bools:
        """bool [runs]: True for runs that are the past of another run."""
        result = np.zeros(len(self.past), np.bool_)
        result[self.past[self.past >= 0]] = True
        return result

    @cached_property
    def number(self) -> Ints:
        """int64 [runs]: the number of each run on its rank."""
        return np.arange(len(self.rank)) - self.ptr[self.rank]

    @cached_property
    def cut(self) -> Ints:
        """int64 [m]: the runs of documents with several runs, sorted by document and position."""
        index = np.flatnonzero((self.past >= 0) | self.leads)
        return index[np.lexsort((self.token[index], self.position[index], self.document[index]))]


def _runs(runs: Runs) -> Table:
    first = runs.past < 0
    peer = np.where(first, 0, runs.rank[runs.past])
    past = np.where(first, NONE, runs.number[runs.past])
    columns = (runs.row, runs.rows, runs.sequence, runs.position, peer, past, runs.leads)
    return Table(runs.ptr, RECURRENCE_TABLES["runs"], np.stack(columns).astype(np.int64))


def _folds(runs: Runs, heads: Ints) -> tuple[Table, Table]:
    """The `folds` and `states` tables: a document's ranks fold even shares of its heads. heads: int64 [kinds]."""
    ranks, cut = len(runs.ptr) - 1, runs.cut
    document = np.cumsum(changes(runs.document[cut])) - 1
    sizes = np.bincount(document)
    first = np.cumsum(sizes) - sizes
    local = np.zeros(len(runs.rank), np.int64)
    local[cut] = index_in_group(sizes)

    holder = np.unique(document * ranks + runs.rank[cut])
    holders = np.bincount(holder // ranks)
    member, count_of_share = index_in_group(holders), np.repeat(holders, holders)
    low, high = (heads[:, None] * n // count_of_share for n in (member, member + 1))
    kind, share = np.nonzero(low < high)
    folder = holder[share] % ranks
    order = np.lexsort((kind, folder))  # holders are sorted by document
    kind, share, folder = kind[order], share[order], folder[order]

    count = sizes[holder[share] // ranks]
    entry, offset = group_of(count), index_in_group(count)
    run = cut[first[holder[share] // ranks][entry] + offset]
    shares = np.stack([kind, low[kind, share], (high - low)[kind, share], folder]).take(entry, 1)
    past = np.where(runs.past < 0, NONE, local[runs.past])
    rank, number, past = np.stack([runs.rank, runs.number, past]).take(run, 1)
    ptr, state_ptr = (offsets(np.bincount(side, minlength=ranks)) for side in (shares[3], rank))
    first_slot = np.arange(len(run)) - ptr[shares[3]] - offset
    folds = np.stack([*shares[:3], rank, number, np.where(past < 0, NONE, first_slot + past)])
    states = np.stack([*shares, number]).take(stable_order(rank * len(heads) + shares[0]), 1)
    return (
        Table(ptr, RECURRENCE_TABLES["folds"], folds),
        Table(state_ptr, RECURRENCE_TABLES["states"], states),
    )


def _halo(runs: Runs, width: int) -> Table:
    """Up to `width` rows before each run, from as many earlier runs as needed."""
    pieces = []
    run = np.flatnonzero(np.minimum(runs.position, width) > 0)
    end, rest, past = (runs.number[run] + 1) * width, np.minimum(runs.position[run], width), runs.past[run]
    while len(run):
        rows = np.minimum(runs.rows[past], rest)
        row = runs.row[past] + runs.rows[past] - rows
        end, rest = end - rows, rest - rows
        pieces.append(np.stack([runs.rank[past], row, runs.rank[run], end, rows]))
        more = rest > 0
        run, end, rest, past = run[more], end[more], rest[more], runs.past[past[more]]
    columns = np.concatenate([np.zeros((5, 0), np.int64), *pieces], axis=1)
    return move_table(columns[:, np.lexsort((columns[3], columns[2]))], len(runs.ptr) - 1)
