"""Lower bounds on plans, each with its conditions; void if nothing is proven.

Foreign KV, if queries stay home: a rank that holds rows of a band needs the keys that these rows see; those it does not
hold itself are foreign. Let `reach` be the end of its last row (counted from the band's first key), n the number of the
band's keys below `reach` that it holds, and C and w the largest numbers of tokens and of computed pairs of any rank.

    stair   rows see all keys up to their own      foreign = reach - n
    window  … the last W of them                   foreign >= min(reach - n, W - 1): if its rows miss a key below
                                                   `reach`, W foreign keys precede the rank's next row, which sees W - 1
    block   rows see all keys                      foreign = keys - n

Sort ranks by decreasing reach: rows beyond the reach of the j-th (j = 0, 1, ...) are held by the j ranks before it, so
they are at most j * C tokens with at most j * w pairs. That bounds each reach from below; the bound sums over ranks,
and over bands with disjoint keys. Speeds do not matter (w is the largest of all ranks), and home_ranks only rules out
some placements, so the bound still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion._core import bounds as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import MAX_RANKS
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.tensors import PHASES, TRAVELLING

#: below this share of the batch's tokens, a bound gives no meaningful ratio
MIN_SHARE = 0.01
#: relative rounding error of sums and roots
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """A lower bound for all plans under the same constraints, and this plan's value; each is None if unknown.

    void: why the ratio has no meaning, or None.
    """

    name: str
    bound: float | None
    value: float | None
    void: str | None = None

    @property
    def gap(self) -> float | None:
        """value / bound, at least 1; None if void."""
        if self.void is not None or not self.bound or self.value is None:
            return None
        ratio = self.value / self.bound
        return 1.0 if abs(ratio - 1) < _ROUNDING else ratio

    def to_data(self) -> dict[str, Any]:
        """Plain data: bound, value, gap, and `void` if there is no gap."""
        data: dict[str, Any] = {"bound": self.bound, "value": self.value, "gap": self.gap}
        return data if self.gap is not None else data | {"void": self.void or "the bound is 0"}


def makespan(placed: float, loads: Ints | Floats, speeds: Floats) -> Bound:
    """Bounds the busiest rank's load over its speed. placed: the placement's bound (for unsplittable pieces, by
    `solvers.partition.lpt.makespan_bound`); loads: [ranks] pairs; speeds: [ranks]. Total load over total speed bounds
    any split, so the result is at least this mean."""
    mean = float(loads.sum()) / float(speeds.sum())
    return Bound("makespan", max(placed, mean), float((loads / speeds).max()))


def slots(degrees: Iterable[int], counts: Iterable[int]) -> Bound:
    """Bounds the slots of all exchanges, given their tiles and routes: a rank sends and receives at most one tile per
    slot, so an exchange needs at least the degree of its busiest rank. degrees: the busiest rank's, per exchange.
    counts: slots per exchange."""
    minimum, total = sum(degrees), sum(counts)
    return Bound("slots", float(minimum), float(total), None if minimum else "nothing is exchanged")


def kv_bytes(
    batch: Batch,
    model: Model,
    token_cap: int,
    load_caps: Mapping[str, int],
    value: float | None,
    queries_move: bool = False,
) -> Bound:
    """Bounds the bytes of KV sent forward and backward, and of returned KV gradients, for one call of each attention
    kind, in any plan with queries at home and no larger token or load caps.

    token_cap: maximum tokens of a rank; load_caps: kind -> maximum pairs that a rank computes; if groups of ranks share
    tokens (Ulysses), both per group. value: these bytes in this plan. queries_move: True if some task does not run on
    the home rank of its queries, which voids the bound.
    """
    if queries_move:
        return Bound("kv_bytes", None, value, "queries move: nothing is proven")
    tokens = sum(foreign_kv_tokens(batch, kind, token_cap, load_caps[kind]) for kind in batch.kinds)
    per_token = sum(model.sent_bytes(tensor) for phase in PHASES for tensor in TRAVELLING["key", phase])
    small = tokens < MIN_SHARE * batch.tokens
    void = f"the bound is below {MIN_SHARE:.0%} of the tokens" if small else None
    return Bound("kv_bytes", float(tokens * per_token), value, void)


def foreign_kv_tokens(batch: Batch, kind: str, token_cap: int, load_cap: int) -> int:
    """KV tokens that must leave their home if queries stay home, in any plan whose ranks hold at most `token_cap`
    tokens and compute at most `load_cap` pairs of this kind. 0 if nothing is proven."""
    return foreign_tokens(batch.bands(kind), token_cap, load_cap)


def foreign_tokens(bands: Ints, token_cap: int, load_cap: int) -> int:
    """Like `foreign_kv_tokens`, for bands int64 [n, 6] sorted by q0."""
    return core.foreign_tokens(np.ascontiguousarray(bands), token_cap, load_cap, MAX_RANKS)
