"""What two simple layouts would cost on a batch: contiguous filling and the zig-zag ring. For comparison only.

Both are computed from the batch alone, without programs: loads exactly, by the band algebra; bytes and slots
of one attention call of each kind, forward and backward, as in a plan's report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.masks import bands as algebra
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor


@dataclass(frozen=True)
class Costs:
    """One layout on one batch: imbalance is max / mean - 1 over ranks, slots as in a plan's report."""

    compute_imbalance: float
    token_imbalance: float
    bytes_moved: int
    slots: int


def contiguous(batch: Batch, ranks: int, model: Model) -> Costs:
    """Rank r holds the r-th equal part of the token axis, computes its queries, and fetches the keys they see."""
    edges = np.arange(ranks + 1) * batch.tokens // ranks
    load, moved, slots = np.zeros(ranks), 0, 0
    for kind in batch.kinds:
        rows = [_rows_of(batch.bands(kind), lo, hi) for lo, hi in _pairs(edges)]
        load += [model.layers_of(kind) * int(algebra.area(part).sum()) for part in rows]
        foreign = np.array([[_keys_in(part, lo, hi) for lo, hi in _pairs(edges)] for part in rows])
        np.fill_diagonal(foreign, 0)
        moved += int(foreign.sum()) * _fetch_and_return(model)
        degree = max(int((foreign > 0).sum(0).max()), int((foreign > 0).sum(1).max()))
        slots += 3 * degree  # KV forward, KV backward, dKV home
    return Costs(_imbalance(load), _imbalance(np.diff(edges)), moved, slots)


def zigzag_ring(batch: Batch, ranks: int, model: Model) -> Costs:
    """Each sequence in 2N chunks, i and 2N - 1 - i on rank i; KV visits every rank, dKV goes around and home."""
    load, tokens, moved, slots = np.zeros(ranks), np.zeros(ranks), 0, 0
    chunks = [
        _chunks(int(start), int(length), ranks)
        for start, length in zip(batch.starts, batch.lengths, strict=False)
    ]
    for edges in chunks:
        tokens += _folded(np.diff(edges), ranks)
    for kind in batch.kinds:
        bands = batch.bands(kind)
        for edges in chunks:
            areas = np.array([algebra.area(_rows_of(bands, lo, hi)).sum() for lo, hi in _pairs(edges)])
            load += model.layers_of(kind) * _folded(areas, ranks)
        kv, dkv = model.sent_bytes(Tensor.KV), model.sent_bytes(Tensor.DKV)
        around = ranks if ranks > 1 else 0
        moved += batch.tokens * (2 * (ranks - 1) * kv + around * dkv)
        slots += 2 * (ranks - 1) + around
    return Costs(_imbalance(load), _imbalance(tokens), moved, slots)


def _pairs(edges: Ints) -> list[tuple[int, int]]:
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _rows_of(bands: Ints, low: int, high: int) -> Ints:
    """The part of the bands whose queries are in [low, high), without what is empty."""
    near = bands[(bands[:, 0] < high) & (bands[:, 1] > low)]
    rects = np.stack([np.full(len(near), low), np.full(len(near), high), near[:, 2], near[:, 3]], axis=1)
    return algebra.intersect(near, rects, tight=True)


def _keys_in(bands: Ints, low: int, high: int) -> int:
    """Keys in [low, high) that the (tight) bands see, each once."""
    ranges = np.stack([np.maximum(bands[:, 2], low), np.minimum(bands[:, 3], high)], axis=1)
    seen, last = 0, low
    for begin, end in sorted(ranges[ranges[:, 0] < ranges[:, 1]].tolist()):
        seen += max(0, end - max(begin, last))
        last = max(last, end)
    return seen


def _fetch_and_return(model: Model) -> int:
    """Bytes of one key row: out forward, out again backward, its gradient home."""
    return 2 * model.sent_bytes(Tensor.KV) + model.sent_bytes(Tensor.DKV)


def _chunks(start: int, length: int, ranks: int) -> Ints:
    return start + np.arange(2 * ranks + 1) * length // (2 * ranks)


def _folded(chunks: Ints, ranks: int) -> Ints:
    """Per rank the sum over its two chunks."""
    folded: Ints = chunks[:ranks] + chunks[ranks:][::-1]
    return folded


def _imbalance(load: Any) -> float:
    return float(np.max(load) / np.mean(load) - 1)
