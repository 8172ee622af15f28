"""Lower bounds: what no plan can beat."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.batch import Batch
from apportion.ir.masks import causal

Ints = NDArray[np.integer[Any]]


def foreign_kv_tokens(batch: Batch, kind: str, token_cap: int, load_cap: int) -> int:
    """KV tokens that must leave home where queries stay home: no plan in which a rank holds at most `token_cap`
    tokens and computes at most `load_cap` pairs of this kind moves fewer.

    For a causal document of length L, the j ranks that reach furthest hold at most j * token_cap tokens and
    j * load_cap pairs of it, so the next one reaches at least to max(L - j * token_cap, sqrt(L^2 - 2 j load_cap));
    a rank that reaches to r sees r keys, and L of all these are at home. Other masks: 0, nothing is proven.
    """
    lengths = _causal_lengths(batch, kind)
    lengths = lengths[(lengths > token_cap) | (lengths * (lengths + 1) // 2 > load_cap)]
    return sum(_foreign(int(length), token_cap, load_cap) for length in lengths.tolist())


def _causal_lengths(batch: Batch, kind: str) -> Ints:
    held = batch.masks[kind]
    is_causal = np.array([spec == causal() for spec in held.specs])
    causal_ones: Ints = batch.lengths[is_causal[held.index]]
    return causal_ones


def _foreign(length: int, token_cap: int, load_cap: int) -> int:
    ranks = 1 + max(-(-length // max(token_cap, 1)), -(-length * length // max(2 * load_cap, 1)))
    before = np.arange(ranks, dtype=np.float64)
    by_load = np.sqrt(np.maximum(float(length) ** 2 - 2.0 * before * load_cap, 0.0))
    reach = np.maximum(np.maximum(length - before * token_cap, by_load), 0.0)
    # whole tokens; the slack keeps rounding of the root below the true bound
    return max(0, int(np.ceil(reach - 1e-6).sum()) - length)
