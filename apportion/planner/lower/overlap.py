"""Overlap of the Ulysses exchange with computation, by rows.

    in     KV rows and the queries of the first stage | launch | wait, first stage | wait for the others | ..
    out    .. | launch results that are complete | stages of own keys | launch the others | wait for all

A rank needs all KV rows early, because tiles of them leave for other groups, but local queries only when their first
task runs; results may leave once their last task has run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.tensors import Side
from apportion.planner.lower.exchange import Pieces, PieceTiming, one_round
from apportion.planner.lower.inputs import Lowering


def overlapped(low: Lowering) -> Lowering:
    """The lowering with its exchange in two parts each way; pieces are cut at the boundaries of the parts."""
    if low.exchange is None or not low.groups.split or low.sets.stages is not None:
        return low
    pieces = low.exchange.pieces
    first = _base(low)[pieces.group] + pieces.row
    head, tail = low.stage == 0, low.stage == low.schedule.stages - 1
    queries, keys = (_query_ranges(low, head), _query_ranges(low, tail)), _key_ranges(low, tail)
    sent, sent_keys = _sent_ranges(low, "query"), _sent_ranges(low, "key")
    ends = (end for pair in (*queries, sent, keys, sent_keys) for end in pair)
    cuts = np.unique(np.concatenate([first, *ends]))
    late, early = (~(covered(cuts, query_range) | covered(cuts, sent)) for query_range in queries)
    early_keys = ~(covered(cuts, keys) | covered(cuts, sent_keys))
    is_new = np.append(True, np.diff(4 * late + 2 * early + early_keys) != 0) | np.isin(cuts, first)
    is_new &= cuts < first[-1] + pieces.rows[-1]
    end = int(first[-1] + pieces.rows[-1])
    turns = PieceTiming(*(marks[is_new] for marks in (late, early, early_keys)))
    exchange = replace(low.exchange, pieces=_split_pieces(pieces, first, cuts[is_new], end), turns=turns)
    return replace(low, exchange=replace(exchange, slots=one_round(exchange)))


#: first and end, int64 [n] each, in rows of all groups, concatenated
Range = tuple[Ints, Ints]


def _base(low: Lowering) -> Ints:
    """int64 [groups]: offset of each group's rows."""
    return np.cumsum(low.rows.per_rank) - low.rows.per_rank


def _query_ranges(low: Lowering, mask: Bools) -> Range:
    tasks, index = low.tasks, np.flatnonzero(mask & (low.tasks.query_edge < 0))
    first = _base(low)[tasks.exec[index]] + tasks.row[index]
    return first, first + tasks.rows[index]


def _key_ranges(low: Lowering, mask: Bools) -> Range:
    tasks, rows, index = low.tasks, low.rows, np.flatnonzero(mask & (low.tasks.edge < 0))
    block, k0 = tasks.k[index], tasks.k0[index]
    first = _base(low)[tasks.exec[index]] + rows.row[block] + k0 - rows.starts[block]
    return first, first + tasks.k1[index] - k0


def _sent_ranges(low: Lowering, side: Side) -> Range:
    edges = low.edges_of[side]
    roots = np.flatnonzero(edges.parent < 0)
    first = _base(low)[edges.home[roots]] + edges.row[roots]
    return first, first + edges.rows[roots]


def covered(cuts: Ints, ranges: Range) -> Bools:
    """bool [cuts]: True if some range covers the rows from a cut to the next; ranges begin and end at cuts."""
    change = np.zeros(len(cuts), np.int64)
    np.add.at(change, np.searchsorted(cuts, ranges[0]), 1)
    np.add.at(change, np.searchsorted(cuts, ranges[1]), -1)
    return np.cumsum(change) > 0


def _split_pieces(pieces: Pieces, first: Ints, start: Ints, end: int) -> Pieces:
    """Splits pieces, whose first rows are `first`, at each row in `start`."""
    piece = np.searchsorted(first, start, "right") - 1
    offset, rows = start - first[piece], np.diff(np.append(start, end))
    src_row, row = pieces.src_row[piece] + offset, pieces.row[piece] + offset
    return Pieces(pieces.src[piece], src_row, pieces.group[piece], row, rows)
