"""Zeppelin's two levels of partitioning (EuroSys '26, section 3.1): sequences to nodes, then to the ranks of a node.

    length     short              medium                     long
    zone       local              intra-node                 inter-node
    ranks      one                some of a node             all of some nodes
    split      -                  by squared length          evenly

If the sequences of a zone do not fit, the threshold drops to the longest of them, which joins the zone above, and the
level starts over. Sequences on several ranks are cut zig-zag in the order of the ranks (section 3.2).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion._core import zeppelin as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.tensors import Tensor
from apportion.planner.options import Count
from apportion.planner.place.zigzag import finalize
from apportion.planner.problem import MOST_TOKENS, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.refusals import refuse_home_ranks

#: longest sequence in the search for the length at which attention hides its transfer
MAX_LENGTH = 2**24


@dataclass(frozen=True)
class Zeppelin(PlacePass):
    """Algorithms 1 and 2 of the paper. The price of a sequence is its squared length for any mask; the cuts of
    the shards are ignored. Relative speeds act through capacities: a sequence's fragments are in proportion to the
    capacities of their ranks, and the least loaded rank is the least full one.

    cap: "auto": "enforce" if the policy has a token cap, else "paper". "paper", as printed: only tokens of whole
    sequences are checked against the capacity, so that fragments may overload a rank (sequences of 5 and 2 times the
    capacity on 8 ranks put 1.71 capacities on one). "enforce": a sequence whose fragment would not fit goes to more
    ranks, emptiest first; if that does not help, their tokens are levelled; otherwise as printed. Interpretation of the
    paper in both: the budget of a node is the mean of all tokens; "empty buckets", which may not exist, are the least
    loaded; numbers of fragments are rounded up; zones are < and >= the threshold, else lowering it would never end.

    capacity: tokens of a rank (the paper's L), default each rank's token cap. inter_tokens, intra_tokens: initial
    lengths from which sequences are inter-node and intra-node; `zones` sets the defaults. "capacity": the largest
    capacity of a node and of a rank, as in the algorithms; "cost": these, or, if shorter, the length at which attention
    to a whole sequence takes as long as sending its keys and values between nodes, and inside one, as in Figure 5.
    parts: number of blocks of a rank's share of an inter-node sequence, one for each rank that relays it (see the
    schedule `queues`); "auto": the ranks of a node. Raises ConfigError, CapacityError.
    """

    cap: Literal["auto", "enforce", "paper"] = "auto"
    capacity: Count | None = None
    inter_tokens: Count | None = None
    intra_tokens: Count | None = None
    zones: Literal["capacity", "cost"] = "capacity"
    parts: Count | Literal["auto"] = "auto"
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "zeppelin")
        shares = self.shares(problem)
        per_node = problem.cluster.ranks_per_node
        parts = per_node if self.parts == "auto" else self.parts
        starts, home = core.blocks(problem.batch.starts, shares, per_node, parts)
        return finalize(problem, starts, home, "zeppelin")

    def shares(self, problem: Problem) -> Ints:
        """int64 [3, shares]: sequence, rank and tokens, by sequence, then by its ranks in order."""
        caps = self._capacities(problem)
        by_node = caps.reshape(problem.cluster.nodes, problem.cluster.ranks_per_node)
        node_caps = by_node.sum(1)
        inter, intra = int(node_caps.max()), int(caps.max())
        if self.zones == "cost":
            cluster = problem.cluster
            inter = min(inter, hiding_tokens(problem, cluster.inter_gbs_per_rank, cluster.inter_latency_us))
            intra = min(intra, hiding_tokens(problem, cluster.intra_gbs, cluster.intra_latency_us))
        enforce = self.cap == "enforce" or (self.cap == "auto" and problem.policy.token_cap is not None)
        limits = np.minimum(node_caps, MOST_TOKENS)
        inter, intra = self.inter_tokens or inter, self.intra_tokens or intra
        return core.shares(problem.batch.lengths, limits, by_node, inter, intra, enforce)

    def _capacities(self, problem: Problem) -> Ints:
        """int64 [ranks]: token capacity of each. Raises CapacityError."""
        tokens, ranks, cap = problem.batch.tokens, problem.ranks, self.capacity
        if cap is None:
            return problem.token_caps
        if cap * ranks < tokens:
            raise CapacityError(
                f"the batch has {tokens} tokens but {ranks} ranks of capacity {cap} hold {cap * ranks}: raise "
                f"recipe.place.zeppelin.capacity to at least {-(-tokens // ranks)} or leave it out"
            )
        return np.full(ranks, min(cap, MOST_TOKENS), np.int64)


def hiding_tokens(problem: Problem, gbs: float, latency_us: float) -> int:
    """The shortest sequence whose forward attention, causal and whole on one rank, takes as long as sending its keys
    and values at `gbs` GB/s: the intersection of two curves of Figure 5."""
    model, cost = problem.model, problem.cost
    token_us = model.sent_bytes(Tensor.KV) / (gbs * 1e3)

    def is_hidden(tokens: int) -> bool:
        length = np.array([tokens])
        pairs = length * (length + 1) // 2
        attention_us = cost.attention_us("forward", length, length, pairs, model.q_heads, model.kv_heads)
        return float(attention_us[0]) >= latency_us + tokens * token_us

    return 1 + bisect_left(range(1, MAX_LENGTH), True, key=is_hidden)
