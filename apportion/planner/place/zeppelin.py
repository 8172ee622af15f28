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

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.loops.jit import jit
from apportion.planner.options import Count
from apportion.planner.place.zigzag import placed
from apportion.planner.problem import MOST_TOKENS, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.refusals import refuse_home_ranks

# a quotient this little above a whole number is that number, rounded
_WHOLE = 1e-9


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
        starts, home = _blocks(problem.batch.starts, shares, problem.cluster.ranks_per_node, self.parts)
        return placed(problem, starts, home, "zeppelin")

    def shares(self, problem: Problem) -> Ints:
        """int64 [3, shares]: sequence, rank and tokens, in the order of sequences and of the ranks in each."""
        lengths, nodes, ranks = problem.batch.lengths, problem.cluster.nodes, problem.cluster.ranks_per_node
        caps, enforce = self._capacities(problem), self.cap == "enforce"
        of_nodes = caps.reshape(nodes, ranks).sum(1)
        order = np.argsort(-lengths, kind="stable")
        inter, intra = self.inter_tokens or int(of_nodes.max()), self.intra_tokens or int(caps.max())
        parts = _to_nodes(lengths, order, np.minimum(of_nodes, MOST_TOKENS), inter, enforce)
        found = _to_ranks(parts, caps.reshape(nodes, ranks), intra, enforce)
        return np.ascontiguousarray(found[:, np.lexsort((found[1], found[0]))])

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


# ---- algorithm 1


@jit
def _to_nodes(lengths: Ints, order: Ints, caps: Ints, threshold: int, enforce: bool) -> Ints:
    """Algorithm 1: int64 [4, parts]: sequence, node, tokens, and 1 where the sequence is of the inter-node zone.

    order: int64 [sequences], longest first; caps: int64 [nodes], tokens of each; threshold: the first one, s1.
    """
    sizes, total, nodes = lengths[order], lengths.sum(), len(caps)
    crossing, room = _crossing(sizes, caps, threshold, enforce)
    parts, load, count = np.zeros((4, room + len(order)), np.int64), np.zeros(nodes, np.int64), 0
    for item in range(crossing):
        share = _split(load, sizes[item], _over(sizes[item] * nodes, total), caps, enforce)
        count = _put(parts, count, order[item], 0, share, load)
    parts[3, :count] = 1
    end = count + len(order) - crossing
    parts[0, count:end], parts[2, count:end] = order[crossing:], sizes[crossing:]
    parts[1, count:end] = _whole(sizes[crossing:], load, caps)
    return parts[:, :end].copy()


@jit
def _crossing(sizes: Ints, caps: Ints, threshold: int, enforce: bool) -> tuple[int, int]:
    """How many sequences are of the inter-node zone once the others fit on nodes, and how many nodes these are on, all
    together. sizes: int64 [sequences], falling. A falling threshold adds to the zone behind those that are there."""
    nodes = len(caps)
    load, crossing, spread, total = np.zeros(nodes, np.int64), 0, 0, sizes.sum()
    while True:
        while crossing < len(sizes) and sizes[crossing] >= threshold:
            share = _split(load, sizes[crossing], _over(sizes[crossing] * nodes, total), caps, enforce)
            load += share
            spread += int(np.count_nonzero(share))
            crossing += 1
        if (_whole(sizes[crossing:], load.copy(), caps) >= 0).all():
            return crossing, spread
        threshold = sizes[crossing]


@jit
def _whole(sizes: Ints, load: Ints, caps: Ints) -> Ints:
    """int64 [items]: the least full bucket with room for one after another, which is added to its load, until one has
    room nowhere: from there on -1."""
    bucket, heap = np.full(len(sizes), -1, np.int64), np.argsort(load / caps, kind="mergesort")
    for item in range(len(sizes)):
        at = _with_room(heap, load, caps, sizes[item])
        if at < 0:
            break
        load[heap[at]] += sizes[item]
        bucket[item] = heap[at]
        _sink(heap, load, caps, at)
    return bucket


@jit
def _with_room(heap: Ints, load: Ints, caps: Ints, size: int) -> int:
    """Where the least full bucket with so much room stands in the heap, -1 where none has."""
    if load[heap[0]] + size <= caps[heap[0]]:
        return 0
    best = -1
    for at in range(1, len(heap)):
        fits = load[heap[at]] + size <= caps[heap[at]]
        if fits and (best < 0 or _before(load, caps, heap[at], heap[best])):
            best = at
    return best


@jit
def _sink(heap: Ints, load: Ints, caps: Ints, at: int) -> None:
    """Restore a heap by (load over cap, bucket) whose entry `at` has grown."""
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and _before(load, caps, heap[child + 1], heap[child]):
            child += 1
        if not _before(load, caps, heap[child], heap[at]):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@jit
def _before(load: Ints, caps: Ints, one: int, other: int) -> bool:
    left, right = load[one] * caps[other], load[other] * caps[one]
    return bool(left < right or (left == right and one < other))


@jit
def _put(columns: Ints, count: int, sequence: int, first: int, share: Ints, load: Ints) -> int:
    """Add a sequence's share of each bucket, `first` and on, to the columns from `count` on (sequence, bucket, tokens)
    and to the load. Returns the next free column."""
    for bucket in np.flatnonzero(share):
        columns[0, count], columns[1, count], columns[2, count] = sequence, first + bucket, share[bucket]
        count += 1
    load += share
    return count


@jit
def _over(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


@jit
def _split(load: Ints, tokens: int, count: int, caps: Ints, enforce: bool) -> Ints:
    """int64 [buckets]: `tokens` spread, as caps are, over the `count` least full buckets. enforce: over as many more as
    it takes for none to pass its cap; where all are too few, so that the fullest is least full."""
    buckets, order = len(load), np.argsort(load / caps, kind="mergesort")
    for wide in range(min(count, buckets), buckets + 1):
        share = _shared(tokens, order[:wide], caps)
        if not enforce or _fits(load, share, caps):
            return share
    return _level(load, tokens, caps)


@jit
def _shared(tokens: int, some: Ints, caps: Ints) -> Ints:
    """int64 [buckets]: `tokens` over some buckets as their caps are; the first of them get what is left over."""
    share, room = np.zeros(len(caps), np.int64), caps[some].sum()
    for bucket in some:
        share[bucket] = tokens * caps[bucket] // room
    share[some[: tokens - share.sum()]] += 1
    return share


@jit
def _fits(load: Ints, share: Ints, caps: Ints) -> bool:
    """Whether no bucket that gets a share passes its cap."""
    return bool(((load + share <= caps) | (share == 0)).all())


@jit
def _level(load: Ints, tokens: int, caps: Ints) -> Ints:
    """int64 [buckets]: `tokens` to the least full buckets, up to one level of the fullest cap, and others as theirs."""
    largest = caps.max()
    low, high = np.int64(0), load.max() + tokens
    while low < high:
        level = (low + high) // 2
        if np.maximum(level * caps // largest - load, 0).sum() < tokens:
            low = level + 1
        else:
            high = level
    share: Ints = np.maximum(high * caps // largest - load, 0)
    over = share.sum() - tokens
    for bucket in range(len(load)):
        if over > 0 and share[bucket] > 0:
            share[bucket] -= 1
            over -= 1
    return share


# ---- algorithm 2


@jit
def _to_ranks(parts: Ints, caps: Ints, threshold: int, enforce: bool) -> Ints:
    """Algorithm 2 on every node: int64 [3, shares]: sequence, rank, tokens. parts: of `_to_nodes`, longest first; caps:
    int64 [nodes, ranks of a node], tokens of each."""
    nodes, ranks = caps.shape
    shares, count = np.empty((3, parts.shape[1] * ranks), np.int64), 0
    by_node = np.argsort(parts[1], kind="mergesort")
    ends = np.cumsum(np.bincount(parts[1], minlength=nodes))
    for node in range(nodes):
        inside = parts[:, by_node[ends[node - 1] if node else 0 : ends[node]]]
        count = _to_ranks_of_node(inside, node * ranks, caps[node], threshold, enforce, shares, count)
    return shares[:, :count].copy()


@jit
def _to_ranks_of_node(
    parts: Ints, first: int, caps: Ints, threshold: int, enforce: bool, shares: Ints, opening: int
) -> int:
    """Algorithm 2 on the node whose ranks are `first` and on; its shares go to column `opening` and on, and the next
    free column is returned. threshold: the first one, s0."""
    crossing, inside = parts[:, parts[3] == 1], parts[:, parts[3] == 0]
    begin, sizes, ranks = 0, inside[2], len(caps)
    while True:
        while begin < len(sizes) and sizes[begin] >= threshold:
            begin += 1
        load, count = np.zeros(ranks, np.int64), opening
        for part in range(crossing.shape[1]):
            share = _split(load, crossing[2, part], ranks, caps, enforce)
            count = _put(shares, count, crossing[0, part], first, share, load)
        budget, turn = _squares(sizes[:begin]) / ranks, 0
        for part in range(begin):
            fragments = min(int(np.ceil(float(sizes[part]) ** 2 / budget - _WHOLE)), ranks)
            share = _by_turns(load, sizes[part], fragments, turn, caps, enforce)
            count = _put(shares, count, inside[0, part], first, share, load)
            turn = (turn + fragments) % ranks
        rank = _whole(sizes[begin:], load, caps)
        if (rank >= 0).all():
            end = count + len(rank)
            shares[0, count:end], shares[1, count:end], shares[2, count:end] = (
                inside[0, begin:],
                first + rank,
                sizes[begin:],
            )
            return end
        threshold = sizes[begin]


@jit
def _squares(sizes: Ints) -> float:
    total = 0.0
    for size in sizes:
        total += float(size) ** 2
    return total


@jit
def _by_turns(load: Ints, tokens: int, fragments: int, turn: int, caps: Ints, enforce: bool) -> Ints:
    """int64 [ranks]: `tokens` in fragments as caps are, round-robin from rank `turn` on. enforce: where they fit there,
    else as `_split` does."""
    share = _shared(tokens, (turn + np.arange(fragments)) % len(load), caps)
    if enforce and not _fits(load, share, caps):
        return _split(load, tokens, fragments, caps, True)
    return share


# ---- zig-zag


def _blocks(sequences: Ints, shares: Ints, ranks_per_node: int, parts: int) -> tuple[Ints, Ints]:
    """Starts int64 [blocks + 1] and ranks int64 [blocks] of sequences that are cut zig-zag over the ranks of their
    shares; see `Zeppelin.parts`."""
    room = shares.shape[1] * 2 * (parts // 2 + parts % 2)
    starts, home = np.empty(room + 1, np.int64), np.empty(room, np.int64)
    blocks = _zigzag(sequences, shares, ranks_per_node, parts, starts, home)
    starts[blocks] = sequences[-1]
    return starts[: blocks + 1], home[:blocks]


@jit
def _zigzag(sequences: Ints, shares: Ints, ranks_per_node: int, parts: int, starts: Ints, home: Ints) -> int:
    """Chunks of `_blocks`, into `starts` and `home`; returns how many. A rank's first chunk has half of its share,
    rounded up, its second the rest; neighbours on one rank are one block where they are not to be cut."""
    block, low, count = 0, 0, shares.shape[1]
    while low < count:
        high = low
        while high < count and shares[0, high] == shares[0, low]:
            high += 1
        at, opening, size = sequences[shares[0, low]], block, high - low
        crosses = shares[1, low] // ranks_per_node != shares[1, high - 1] // ranks_per_node
        cuts = (parts + 1) // 2 if crosses else 1
        for step in range(2 * size):
            index = low + min(step, 2 * size - 1 - step)
            tokens = (shares[2, index] + (1 if step < size else 0)) // 2
            for cut in range(cuts):
                some = tokens * (cut + 1) // cuts - tokens * cut // cuts
                if some and (cuts > 1 or block == opening or home[block - 1] != shares[1, index]):
                    starts[block], home[block] = at, shares[1, index]
                    block += 1
                at += some
        low = high
    return block
