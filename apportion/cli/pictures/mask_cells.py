"""Finds the rank that computes most of each cell of the mask, from the tasks of a plan's programs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.cli.pictures.svg import NOBODY
from apportion.ir.arrays import Bools, Ints, group_of, index_in_group
from apportion.ir.bytes.codec import Plan
from apportion.ir.masks import bands as algebra
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import HeadSets
from apportion.report.mask import pieces

_MAX_SEQUENCES = 12  # drawn on an axis: shorter ones would be invisible


@dataclass(frozen=True, eq=False)
class Axis:
    """The drawn sequences, one after another. starts, lengths: int64 [sequences], in tokens of the batch; edges: int64
    [cells + 1], the bounds of cells on the axis."""

    starts: Ints
    lengths: Ints
    edges: Ints

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Ints:
        """int64 [sequences]: the start of each sequence on the axis."""
        return np.asarray(np.cumsum(self.lengths) - self.lengths, np.int64)


def axis_of(plan: Plan, cells: int) -> Axis:
    """The axis of a batch's longest sequences, in the batch's order."""
    batch = plan.request.batch
    longest = np.sort(np.argsort(-batch.lengths, kind="stable")[:_MAX_SEQUENCES])
    lengths = np.asarray(batch.lengths[longest], np.int64)
    return Axis(np.asarray(batch.starts[longest], np.int64), lengths, _edges(lengths, cells))


def _edges(lengths: Ints, cells: int) -> Ints:
    """The bounds of about `cells` cells, divided among the sequences: a whole number for each, at least one."""
    tokens = int(lengths.sum())
    counts = np.clip(lengths * cells // tokens, 1, lengths)
    offsets = np.cumsum(lengths) - lengths
    edges = [
        offset + np.arange(count) * length // count
        for offset, length, count in zip(offsets, lengths, counts, strict=True)
    ]
    return np.append(np.concatenate(edges), tokens).astype(np.int64)


def owners(plan: Plan, kind: str, phase: str, axis: Axis) -> Ints:
    """int64 [cells, cells], queries by keys: the rank that computes most of each cell, NOBODY where the mask is empty.

    If ranks split the heads, rows of cells show the ranks in turn. Raises VerifyError, CapacityError.
    """
    all_pieces = dict(pieces(plan))[kind, phase]
    bands, piece = _map_to_axis(np.ascontiguousarray(all_pieces.bands.T), axis)
    sets = all_pieces.heads[piece]
    rows, part = _rows(bands, axis.edges)
    program = next(p for p in Subject(plan).programs if (p.kind, p.phase) == (kind, phase))
    head_sets = _distinct_heads(program.q_sets, sets)[:, sets[part]]
    source = head_sets[rows % len(head_sets), np.arange(len(rows))]
    return _busiest(bands[part[source]], rows[source], all_pieces.rank[piece][part[source]], axis.edges)


def _map_to_axis(bands: Ints, axis: Axis) -> tuple[Ints, Ints]:
    """The parts of bands inside the drawn sequences, in axis coordinates, and the band index of each part."""
    parts, origins = [], []
    for start, length, offset in zip(axis.starts, axis.lengths, axis.offsets, strict=True):
        indexes = np.flatnonzero((bands[:, 0] < start + length) & (bands[:, 1] > start))
        clipped = algebra.intersect(
            bands[indexes], np.array([start, start + length, start, start + length]), tight=True
        )
        is_nonempty = clipped[:, 0] < clipped[:, 1]
        parts.append(algebra.shift(clipped[is_nonempty], offset - start, offset - start))
        origins.append(indexes[is_nonempty])
    return np.concatenate(parts), np.concatenate(origins)


def _distinct_heads(sets: HeadSets, set_numbers: Ints) -> Bools:
    """bool [heads, sets]: the head sets that contain a head, for one head per distinct combination of sets."""
    member = np.zeros((sets.heads, len(sets.members)), bool)
    for number in np.unique(set_numbers).tolist():
        member[sets.members[number], number] = True
    _, first = np.unique(member, axis=0, return_index=True)
    return member[np.sort(first)]


def _rows(bands: Ints, edges: Ints) -> tuple[Ints, Ints]:
    """(row of cells, band) for every row of cells in which a band has queries."""
    first, last = (np.searchsorted(edges, ends, side="right") - 1 for ends in (bands[:, 0], bands[:, 1] - 1))
    return _ranges(first, last)


def _ranges(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """All numbers from first[i] to last[i], inclusive, for each i in turn; and the i of each number."""
    count = last - first + 1
    group = group_of(count)
    return first[group] + index_in_group(count), group


def _busiest(bands: Ints, row: Ints, rank: Ints, edges: Ints) -> Ints:
    """int64 [cells, cells]: the rank with the most pairs in each cell. row: the row of cells to cut each band to."""
    cells = len(edges) - 1
    key_end = np.full_like(row, edges[-1])
    strips = algebra.intersect(
        bands, np.stack([edges[row], edges[row + 1], 0 * row, key_end], axis=1), tight=True
    )
    first, last = (
        np.searchsorted(edges, ends, side="right") - 1 for ends in (strips[:, 2], strips[:, 3] - 1)
    )
    column, strip = _ranges(first, np.maximum(last, first - 1))
    boxes = np.stack([0 * column, 0 * column + edges[-1], edges[column], edges[column + 1]], axis=1)
    pairs = algebra.area(algebra.intersect(strips[strip], boxes))
    return _largest((row[strip] * cells + column), rank[strip], pairs, cells)


def _largest(cell: Ints, rank: Ints, pairs: Ints, cells: int) -> Ints:
    """int64 [cells, cells]: the rank with the most pairs in each cell; ties go to the lowest rank."""
    span = int(rank.max(initial=0)) + 1
    keys, inverse = np.unique(cell * span + rank, return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, inverse.ravel(), pairs)
    # the last entry of each cell is the one to keep
    order = np.lexsort((-(keys % span), total, keys // span))
    busiest = np.full(cells * cells, NOBODY, np.int64)
    nonempty = order[total[order] > 0]
    busiest[keys[nonempty] // span] = keys[nonempty] % span
    return busiest.reshape(cells, cells)
