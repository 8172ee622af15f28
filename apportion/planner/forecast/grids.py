"""Assigns sequences to the groups of a static grid: data-parallel groups of context-parallel ranks, each with its own
plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from apportion.ir.errors import CapacityError
from apportion.ir.masks.windows import Causal, SlidingWindow
from apportion.ir.request.batch import Batch
from apportion.ir.request.sequences import Kind


def groups_of(batch: Batch, groups: int, packing: str) -> list[Batch]:
    """The batch of each group, with at most an even share of the tokens.

    packing: "order": in the order of the data, cut where a group is full; "balanced": longest first, to the group with
    the least work that has room; sequences that fit no group are cut to fill the remaining room. Only causal sequences
    and windows can be cut, and the parts do not see each other. Raises CapacityError.
    """
    if groups == 1:
        return [batch]
    capacity = -(-batch.tokens // groups)
    parts = (
        _pack_in_order(batch, groups, capacity) if packing == "order" else _balance(batch, groups, capacity)
    )
    if any(not part for part in parts):
        raise CapacityError(
            f"{len(batch.lengths)} sequences leave some of {groups} groups empty: use fewer groups"
        )
    return [_batch(batch, part) for part in parts]


Part = tuple[int, int, int]  # sequence, its first token, and one past its last


def _pack_in_order(batch: Batch, groups: int, capacity: int) -> list[list[Part]]:
    ends = batch.starts[1:]
    cuts = np.union1d(np.minimum(np.arange(1, groups) * capacity, batch.tokens), np.append(0, ends))
    parts: list[list[Part]] = [[] for _ in range(groups)]
    for low, high in pairwise(cuts.tolist()):
        sequence = int(np.searchsorted(ends, low, "right"))
        start = int(batch.starts[sequence])
        parts[low // capacity].append((sequence, low - start, high - start))
    return parts


def _balance(batch: Batch, groups: int, capacity: int) -> list[list[Part]]:
    lengths, work = batch.lengths, batch.lengths.astype(np.float64) ** 2
    free, load = np.full(groups, capacity, np.int64), np.zeros(groups)
    parts: list[list[Part]] = [[] for _ in range(groups)]
    order = np.argsort(-lengths, kind="stable").tolist()
    for sequence in order:
        start, length = 0, int(lengths[sequence])
        while start < length:
            candidates = np.flatnonzero(free >= length - start)
            group = int(candidates[np.argmin(load[candidates])]) if len(candidates) else int(np.argmax(free))
            end = min(length, start + int(free[group]))
            parts[group].append((sequence, start, end))
            free[group] -= end - start
            load[group] += work[sequence] * ((end - start) / length) ** 2
            start = end
    return parts


def _batch(batch: Batch, parts: list[Part]) -> Batch:
    """Builds a batch with parts of sequences as separate sequences. Raises CapacityError if a mask cannot be cut."""
    index = np.array([sequence for sequence, _, _ in parts], np.int64)
    lengths = np.array([end - begin for _, begin, end in parts], np.int64)
    cut = np.flatnonzero(lengths < batch.lengths[index])
    for kind, entry in batch.masks.items():
        for spec in {entry.specs[number] for number in entry.index[index[cut]].tolist()}:
            if not isinstance(spec, Causal | SlidingWindow):
                raise CapacityError(
                    f"sequence {index[cut[0]]} has {batch.lengths[index[cut[0]]]} tokens, more than a group has room "
                    f"for, and its mask of kind {kind} cannot be cut: use larger groups, or plan over all ranks"
                )
    kinds = {kind: Kind(entry.specs, entry.index[index]) for kind, entry in batch.masks.items()}
    return Batch(lengths, kinds)
