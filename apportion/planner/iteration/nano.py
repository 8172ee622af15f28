"""A microbatch in two nano-batches, whose programs take turns (DistCA, section 4.1).

The paper wants halves of equally many tokens, so that the linear layers of one hide the communication of the other
(`by="tokens"`). Attention of one must hide the other's too, so by default halves have equal work as well: the squares
of the two differences are made small together, greedily by falling size (as LPT, Graham 1969) and then by single moves
and swaps until none helps. (The larger difference alone is a poor guide: where the two have opposite signs, moves of
short sequences, which change tokens much and work little, would never help.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import MAX_COUNT, choice, instance, integer, mapping
from apportion.ir.request.batch import Batch
from apportion.planner.shard.blocks import row_areas

#: so many sequences of each half, the largest, are tried in swaps
SWAPPED = 128
#: moves and swaps at most
STEPS = 64
#: differences, as parts of the whole, that are small enough
EVEN = 1e-3
#: of so many sequences every partition is looked at
FEW = 12


class NanoBatches(NamedTuple):
    """Two halves, sequences whole and in their order; ping has the first sequence.

    indexes: int64 [n] each, the places of their sequences in the microbatch. token_share, work_share: ping's part of
    all tokens and of all pairs; 0.5 is even.
    """

    ping: Batch
    pong: Batch
    indexes: tuple[Ints, Ints]
    token_share: float
    work_share: float


def nano_batches(batch: Batch, layers: Mapping[str, int] | None = None, by: str = "both") -> NanoBatches:
    """The two halves of a microbatch, even in tokens and in attention work; equal batches give equal halves.

    layers: attention kind -> how many layers have it, default one each. by: "both" or, as in the paper, "tokens". Each
    half is planned for all ranks, so sequences stay whole. Raises ConfigError for a batch of a single sequence,
    UnknownNameError for another `by`.
    """
    instance("batch", batch, Batch)
    choice("by", by, ("both", "tokens"))
    held = {} if layers is None else mapping("layers", layers)
    layers = {kind: integer(f"layers.{kind}", held[kind], 0, MAX_COUNT) for kind in held}
    if len(batch.lengths) < 2:
        raise ConfigError(
            "batch.lengths",
            batch.lengths.tolist(),
            "a sequence stays whole, so that one sequence has no halves",
            "pack more sequences into the microbatch, or run it without taking turns",
        )
    shares = _shares(batch, layers)
    sizes = shares if by == "both" else shares * (1.0, 0.0)
    few = len(sizes) <= FEW
    side = _best(sizes) if few else _improved(sizes, _greedy(sizes, np.argsort(-sizes.max(1), kind="stable")))
    side = side * side[0]
    ping, pong = (np.flatnonzero(side == sign) for sign in (1, -1))
    tokens, work = shares[ping].sum(0).tolist()
    return NanoBatches(batch.take(ping), batch.take(pong), (ping, pong), tokens, work)


def _shares(batch: Batch, layers: Mapping[str, int]) -> Floats:
    """float64 [n, 2]: each sequence's part of all tokens, and of all pairs."""
    areas = [layers.get(kind, 1) * row_areas(batch.bands(kind), batch.starts) for kind in batch.kinds]
    sizes = np.stack([batch.lengths, np.sum(areas, axis=0)], axis=1).astype(np.float64)
    shares: Floats = sizes / np.maximum(sizes.sum(0), 1)
    return shares


def _best(shares: Floats) -> Ints:
    """int64 [n], 1 or -1: the most even of all partitions."""
    others = np.arange(1 << len(shares) - 1)[:, None] >> np.arange(len(shares) - 1) & 1
    sides = 1 - 2 * np.insert(others, 0, 0, axis=1)
    best: Ints = sides[np.abs(sides @ shares).max(1).argmin()]
    return best


def _greedy(shares: Floats, order: Ints) -> Ints:
    """int64 [n], 1 or -1: each sequence goes where the differences stay smaller, the largest first."""
    side = np.ones(len(shares), np.int64)
    tokens = work = 0.0
    for i, (own_tokens, own_work) in zip(order.tolist(), shares[order].tolist(), strict=True):
        # d · s <= 0: |d + s| <= |d - s|
        sign = 1 if tokens * own_tokens + work * own_work <= 0 else -1
        side[i] = sign
        tokens += sign * own_tokens
        work += sign * own_work
    return side


def _improved(shares: Floats, side: Ints) -> Ints:
    """After the best move of one sequence, or swap of two, as long as there is one."""
    size = shares.max(1)
    for _ in range(STEPS):
        difference = side @ shares
        if np.abs(difference).max() <= EVEN:
            break
        large = np.argsort(-size, kind="stable")
        ones, others = (large[side[large] == sign][:SWAPPED] for sign in (1, -1))
        change = [
            -2 * side[:, None] * shares,
            2 * (shares[others][None] - shares[ones][:, None]).reshape(-1, 2),
        ]
        after = np.square(difference + np.concatenate(change)).sum(1)
        best = int(after.argmin())
        if after[best] >= np.square(difference).sum() * (1 - 1e-12):
            break
        pair = divmod(best - len(side), len(others))
        side[[best] if best < len(side) else [ones[pair[0]], others[pair[1]]]] *= -1
    return side
