"""Zeppelin's two levels of partitioning (EuroSys '26, section 3.1): sequences to nodes, then to the ranks of a node.

    length     short              medium                     long
    zone       local              intra-node                 inter-node
    ranks      one                some of a node             all of some nodes
    split      -                  by squared length          evenly

A zone ends where its sequences no longer fit: then the threshold falls to the longest of them, which joins the zone
above, and the level starts over. What has several ranks is cut zig-zag in the order of its ranks (section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion._core import zeppelin as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.planner.options import Count
from apportion.planner.place.zigzag import placed
from apportion.planner.problem import MOST_TOKENS, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.refusals import refuse_home_ranks


@dataclass(frozen=True)
class Zeppelin(PlacePass):
    """Algorithms 1 and 2 of the paper. The price of a sequence is its squared length, whatever its mask; the cuts of
    the shards are ignored. Relative speeds count by the capacities that follow them: a sequence's fragments are in
    proportion to the capacities of their ranks, and the least loaded rank is the one that is least full.

    cap: "paper", as printed: of the ranks' tokens only those of whole sequences are held against the capacity, so that
    fragments may overload a rank (sequences of 5 and 2 times the capacity on 8 ranks put 1.71 times of it on one).
    "enforce": where a fragment would not fit, the sequence goes to more ranks, the emptiest first, and where that does
    not help it levels their tokens; else as printed.
    Both read the paper so: the budget of a node is the mean of all tokens; "empty buckets", which may not exist, are
    the least loaded; numbers of fragments are rounded up; zones are < and >= the threshold, or raising it never ends.

    capacity: tokens of a rank (the paper's L), default each rank's token cap. inter_tokens, intra_tokens: lengths from
    which sequences are inter-node and intra-node at first, default the largest capacity of a node and of a rank.
    parts: in how many blocks a rank's share of an inter-node sequence is cut, one for each rank that relays it (see the
    schedule `queues`). Raises ConfigError, CapacityError.
    """

    cap: Literal["enforce", "paper"] = "enforce"
    capacity: Count | None = None
    inter_tokens: Count | None = None
    intra_tokens: Count | None = None
    parts: Count = 1
    own_cap: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "zeppelin")
        shares = self.shares(problem)
        starts, home = core.blocks(problem.batch.starts, shares, problem.cluster.ranks_per_node, self.parts)
        return placed(problem, starts, home, "zeppelin")

    def shares(self, problem: Problem) -> Ints:
        """int64 [3, shares]: sequence, rank and tokens, in the order of sequences and of the ranks in each."""
        caps = self._capacities(problem)
        by_node = caps.reshape(problem.cluster.nodes, problem.cluster.ranks_per_node)
        of_nodes = by_node.sum(1)
        inter, intra = self.inter_tokens or int(of_nodes.max()), self.intra_tokens or int(caps.max())
        most = np.minimum(of_nodes, MOST_TOKENS)
        return core.shares(problem.batch.lengths, most, by_node, inter, intra, self.cap == "enforce")

    def _capacities(self, problem: Problem) -> Ints:
        """int64 [ranks]: the most tokens of each. Raises CapacityError."""
        tokens, ranks, cap = problem.batch.tokens, problem.ranks, self.capacity
        if cap is None:
            return problem.token_caps
        if cap * ranks < tokens:
            raise CapacityError(
                f"the batch has {tokens} tokens but {ranks} ranks of capacity {cap} hold {cap * ranks}: raise "
                f"recipe.place.zeppelin.capacity to at least {-(-tokens // ranks)} or leave it out"
            )
        return np.full(ranks, min(cap, MOST_TOKENS), np.int64)
