"""Lower bounds: what no plan can beat, each with what it holds for, and void where nothing is proven.

Foreign KV, queries at home. A rank that holds rows of a band needs the keys that these rows see; those that it does not
hold itself are foreign. Let `reach` be the end of its last row (counted from the band's first key), n the keys of the
band that it holds below that, C the most tokens of a rank and w the most pairs that it computes.

    stair   rows see all keys up to their own      foreign = reach - n
    window  … the last W of them                   foreign >= min(reach - n, W - 1): a key below `reach` that no row
                                                   sees has W foreign ones before the rank's next row, which sees W - 1
    block   rows see all keys                      foreign = keys - n

The ranks that reach furthest: rows beyond the reach of the j-th (j = 0, 1, ...) are held by the j before it, so they
are at most j * C tokens of at most j * w pairs. That bounds each reach from below; the sums are over ranks, and over
bands whose keys are apart. Speeds do not matter (w is the largest of all ranks), and home_ranks only forbid placements.
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
from apportion.ir.tensors import FETCHED, PHASES, RETURNED, TRAVELLING

#: a ratio to a bound of fewer tokens than this share of the batch says nothing
LEAST_SHARE = 0.01
#: rounding of sums and roots, relative
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """No plan of the same promises has less than `bound`, this one has `value`; None where there is no such number.

    void: why the ratio of the two says nothing, None where it does.
    """

    name: str
    bound: float | None
    value: float | None
    void: str | None = None

    @property
    def gap(self) -> float | None:
        """value / bound, at least 1; None where void."""
        if self.void is not None or not self.bound or self.value is None:
            return None
        ratio = self.value / self.bound
        return 1.0 if abs(ratio - 1) < _ROUNDING else ratio

    def to_data(self) -> dict[str, Any]:
        """Plain data: bound, value, gap, and `void` where there is no gap."""
        data: dict[str, Any] = {"bound": self.bound, "value": self.value, "gap": self.gap}
        return data if self.gap is not None else data | {"void": self.void or "the bound is 0"}


def makespan(placed: float, loads: Ints | Floats, speeds: Floats) -> Bound:
    """The busiest rank's load over its speed. placed: the placement's bound (of what it cannot split, by
    `solvers.partition.lpt.makespan_bound`); loads: [ranks] pairs; speeds: [ranks]. The mean by speed holds for any
    split, so at least that."""
    mean = float(loads.sum()) / float(speeds.sum())
    return Bound("makespan", max(placed, mean), float((loads / speeds).max()))


def slots(degrees: Iterable[int], used: Iterable[int]) -> Bound:
    """Slots of all exchanges, of the tiles and routes that they have: a rank sends and receives at most one tile in a
    slot, so an exchange has no fewer than its busiest rank sends or receives. degrees: these numbers, of each exchange.
    used: the slots of each."""
    least, total = sum(degrees), sum(used)
    return Bound("slots", float(least), float(total), None if least else "nothing is exchanged")


def kv_bytes(
    batch: Batch,
    model: Model,
    token_cap: int,
    load_caps: Mapping[str, int],
    value: float | None,
    queries_move: bool = False,
) -> Bound:
    """Bytes of KV that must go out, forward and backward, and of its gradient that must come back, for one call of each
    attention kind, in any plan in which queries stay home and no rank is fuller or busier.

    token_cap: most tokens of a rank; load_caps: kind -> most pairs that a rank computes; where groups of ranks share
    tokens (Ulysses), both are of a group. value: the same bytes of this plan. queries_move: whether a task runs away
    from the home of its queries: nothing is proven then.
    """
    if queries_move:
        return Bound("kv_bytes", None, value, "queries move: nothing is proven")
    tokens = sum(foreign_kv_tokens(batch, kind, token_cap, load_caps[kind]) for kind in batch.kinds)
    per_token = sum(model.sent_bytes(tensor) for phase in PHASES for tensor in TRAVELLING["key", phase])
    small = tokens < LEAST_SHARE * batch.tokens
    void = f"the bound is below {LEAST_SHARE:.0%} of the tokens" if small else None
    return Bound("kv_bytes", float(tokens * per_token), value, void)


def remote_pairs_bytes(
    model: Model, remote: Iterable[tuple[str, Ints]], value: float | None, heads_split: bool = False
) -> Bound:
    """Bytes for pairs computed where neither their query nor their key is at home. A rank that fetches q query rows and
    k key rows covers at most q * k of them, so w pairs cost at least 2 sqrt(w * KV * (Q + O)) bytes, O as a result.

    remote: (phase, int64 [ranks] such pairs on each rank) of each attention call. value: the bytes of this plan for the
    rows of these pairs. heads_split: whether tasks have some of the heads: a pair then needs part of its rows.
    """
    least = sum(float(remote_bytes(model, phase, pairs).sum()) for phase, pairs in remote)
    if heads_split:
        return Bound("remote_pairs_bytes", None, value, "tasks split heads: nothing is proven")
    void = None if least else "no task has both its queries and its keys away from home"
    return Bound("remote_pairs_bytes", least, value, void)


def remote_bytes(model: Model, phase: str, pairs: Ints) -> Floats:
    """float64, shaped like `pairs`: bytes that a rank moves at least for so many pairs with query and key remote."""
    keys = sum(model.sent_bytes(tensor) for tensor in TRAVELLING["key", phase])
    queries = sum(model.sent_bytes(tensor) for tensor in FETCHED["query", phase])
    for tensor in RETURNED["query", phase]:  # a result where the rank computes all of a row
        queries += min(model.sent_bytes(tensor), model.q_heads * model.sent_result_bytes(tensor))
    least: Floats = 2.0 * np.sqrt(pairs.astype(np.float64) * keys * queries)
    return least


# ---------------------------------------------------------------------------------------------- foreign KV


def foreign_kv_tokens(batch: Batch, kind: str, token_cap: int, load_cap: int) -> int:
    """KV tokens that must leave home where queries stay home: no plan in which a rank holds at most `token_cap`
    tokens and computes at most `load_cap` pairs of this kind moves fewer. 0 where nothing is proven."""
    return foreign_tokens(batch.bands(kind), token_cap, load_cap)


def foreign_tokens(bands: Ints, token_cap: int, load_cap: int) -> int:
    """As `foreign_kv_tokens`, of bands int64 [n, 6] sorted by q0."""
    return core.foreign_tokens(np.ascontiguousarray(bands), token_cap, load_cap, MAX_RANKS)
