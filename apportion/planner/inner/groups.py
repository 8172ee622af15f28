"""Groups of ranks that share tokens and split heads (Ulysses, Jacobs et al., 2023), and the head sets of their ranks.

    group    0                       1
    ranks    0     1     2     3     4     5     6     7
    tokens   a quarter of the group's rows each          home rows
    heads    all rows of the group, a quarter of the heads each, during attention

Attention of a group is planned as if it were one rank; its ranks run that program side by side, each for its heads, and
communicate with the ranks of other groups that have the same heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
from msgspec import Meta

from apportion.ir.arrays import Bools, Ints, group_of, offsets
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner.inner.lone import LoneSequences, find_lone
from apportion.planner.options import Count, Share
from apportion.planner.problem import Departure, Pass, Problem
from apportion.planner.tasks.rows import Rows

# Kinds whose queries see fewer keys than this share of a rank's tokens are computed on home ranks with "auto".
NEAR = 0.2


@dataclass(frozen=True)
class Groups:
    """Groups of consecutive ranks. first: int64 [groups + 1], the first rank of each group, and the end; departures:
    from the recipe's request."""

    first: Ints
    departures: tuple[Departure, ...] = ()

    @staticmethod
    def single(ranks: int) -> Groups:
        """Groups of one rank each."""
        return Groups(np.arange(ranks + 1))

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def ranks(self) -> int:
        return int(self.first[-1])

    @cached_property
    def sizes(self) -> Ints:
        return np.diff(self.first)

    @property
    def split(self) -> bool:
        """True if any group has several ranks."""
        return len(self) < self.ranks

    @cached_property
    def of_rank(self) -> Ints:
        """int64 [ranks]: the group of each rank."""
        return group_of(self.sizes)

    @cached_property
    def member(self) -> Ints:
        """int64 [ranks]: the index of each rank within its group."""
        return np.arange(self.ranks) - self.first[self.of_rank]

    def spread(self, group: Ints) -> tuple[Ints, Ints]:
        """For every member of every group in `group`: the group's index in `group`, and the member's rank."""
        sizes = self.sizes[group]
        index = group_of(sizes)
        ends = np.cumsum(sizes)
        return index, self.first[group[index]] + np.arange(len(index)) - (ends - sizes)[index]

    def member_rows(self, rows: Rows, shares: Ints) -> Rows:
        """The home rows of every rank: the rows of each group are cut among its ranks, in order, in proportion to their
        shares, int64 [ranks] > 0. A group with no more rows than the sum of its shares gives no rank more than its own
        share."""
        counts, first_row = rows.per_rank, np.cumsum(rows.per_rank) - rows.per_rank
        owner, edges = self.of_rank, offsets(shares)
        total, offset = edges[self.first[1:]] - edges[self.first[:-1]], edges[:-1] - edges[self.first[owner]]
        cut_rows = counts[owner] * offset // total[owner]
        cut = first_row[owner] + cut_rows  # in rows of all groups, concatenated
        cut = cut[(offset > 0) & (cut_rows < counts[owner])]
        ends = np.cumsum(rows.lengths[rows.order])
        block = rows.order[np.searchsorted(ends, cut, "right")]
        token = rows.starts[block] + cut - first_row[rows.home[block]] - rows.row[block]
        starts = np.union1d(rows.starts, token)
        block = rows.block_of(starts[:-1])
        group, row = rows.home[block], rows.row[block] + starts[:-1] - rows.starts[block]
        # the last rank whose first row, counts * offset // total, is not after `row`
        last_share = edges[self.first[group]] + ((row + 1) * total[group] - 1) // counts[group]
        return Rows(starts, np.searchsorted(edges[:-1], last_share, "right") - 1, self.ranks)


@dataclass(frozen=True)
class HeadSets:
    """Heads computed by each rank. sets: as in the plan's header; query, key: int64 [ranks], number of the rank's set
    of query and of KV heads (0: all); query_heads, key_heads: int64 [ranks], sizes of these sets; shared: bool
    [groups], True if several ranks of a group compute the same KV head. stages: for heads in stages; query_heads and
    key_heads are then totals over stages, and `stages` has the set numbers."""

    sets: tuple[tuple[int, ...], ...]
    query: Ints
    key: Ints
    query_heads: Ints
    key_heads: Ints
    shared: Bools
    stages: HeadStages | None = None

    @property
    def key_columns(self) -> Ints:
        """int64 [ranks]: head columns of KV arenas. With shared KV heads, gradients arrive from other ranks, possibly
        of other groups, with as many heads as those ranks have."""
        return np.full_like(self.key_heads, self.key_heads.max()) if self.shared.any() else self.key_heads

    @property
    def turns(self) -> int:
        """Number of stages in which attention of a group is computed, each with some of the heads."""
        return 1 if self.stages is None else len(self.stages)

    @property
    def tile_turns(self) -> int:
        """Number of times that KV tiles of a group arrive."""
        return self.stages.windows if self.stages is not None and self.stages.hold else self.turns

    @cached_property
    def tile_heads(self) -> Ints:
        """int64 [ranks]: KV heads of a tile, over all stages."""
        if self.stages is None or self.stages.hold:
            return self.key_heads
        counts = self.stages.key_heads[self.stages.window].sum(0)
        return np.tile(counts, len(self.key_heads) // len(counts))

    @staticmethod
    def of(model: Model, groups: Groups) -> HeadSets:
        """Contiguous shares of the query heads, with the KV heads that they use. Raises ConfigError."""
        numbers: dict[tuple[int, ...], int] = {}
        columns = np.zeros((4, groups.ranks), np.int64)
        columns[2], columns[3] = model.q_heads, model.kv_heads
        shared = np.zeros(len(groups), bool)
        for size in sorted(set(groups.sizes.tolist()) - {1}):
            members = [_heads_of_rank(model, size, index) for index in range(size)]
            ids = [[numbers.setdefault(heads, len(numbers) + 1) for heads in pair] for pair in members]
            table = np.array([[*pair, len(q), len(kv)] for pair, (q, kv) in zip(ids, members, strict=True)])
            ranks = np.flatnonzero(groups.sizes[groups.of_rank] == size)
            columns[:, ranks] = table[groups.member[ranks]].T
            shared[groups.sizes == size] = sum(len(kv) for _, kv in members) > model.kv_heads
        query, key, query_heads, key_heads = columns
        return HeadSets(tuple(numbers), query, key, query_heads, key_heads, shared)


@dataclass(frozen=True)
class HeadStages:
    """Heads of the ranks of every group by stage (UPipe). All groups have the same size.

    sets: as in the plan's header; query: int64 [stages, size], number of each rank's set of query heads; window: int64
    [stages], non-decreasing, the window of each stage, in which ranks keep their KV heads; key: int64 [windows, size],
    number of each rank's set of KV heads. query_heads: per rank and stage; key_heads: int64 [windows, size]; shared:
    True if any KV head is on several ranks of a group, or in several windows. project: True if the program computes Q,
    K and V itself; ahead: number of later stages whose rows arrive during a stage; hold: True if tiles of other groups
    also stay during a window.
    """

    sets: tuple[tuple[int, ...], ...]
    query: Ints
    window: Ints
    key: Ints
    query_heads: int
    key_heads: Ints
    shared: bool
    project: bool
    ahead: int
    hold: bool

    @staticmethod
    def of(
        shares: Sequence[Sequence[tuple[int, ...]]],
        window: Ints,
        keys: Sequence[Sequence[tuple[int, ...]]],
        project: bool,
        ahead: int,
        hold: bool,
    ) -> HeadStages:
        """Builds the stages. shares: query heads of the ranks of a group in each stage; keys: their KV heads in each
        window."""
        numbers: dict[tuple[int, ...], int] = {}
        query, key = (
            np.array([[numbers.setdefault(heads, len(numbers) + 1) for heads in row] for row in rows])
            for rows in (shares, keys)
        )
        key_heads = np.array([[len(heads) for heads in row] for row in keys])
        all_keys = [head for row in keys for heads in row for head in heads]
        shared = len(set(all_keys)) < len(all_keys)
        return HeadStages(
            tuple(numbers), query, window, key, len(shares[0][0]), key_heads, shared, project, ahead, hold
        )

    def __len__(self) -> int:
        return len(self.query)

    @property
    def windows(self) -> int:
        return len(self.key)

    @property
    def widest(self) -> int:
        """Largest number of KV heads that a rank holds at once."""
        return int(self.key_heads.max())

    def totals(self, groups: Groups) -> HeadSets:
        """The head sets of the plan, with each rank's query heads over all stages and KV heads over all windows."""
        ones, zeros = np.ones(groups.ranks, np.int64), np.zeros(groups.ranks, np.int64)
        keys = self.key_heads.sum(0)[groups.member]
        queries = ones * self.query_heads * len(self)
        return HeadSets(self.sets, zeros, zeros, queries, keys, np.full(len(groups), self.shared), self)


def _heads_of_rank(model: Model, size: int, member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads of one of `size` ranks, and the KV heads that they use."""
    if model.q_heads % size:
        rule = f"must divide the {model.q_heads} query heads, which the ranks of a group split evenly"
        raise ConfigError("recipe.inner.ulysses.degree", size, rule, f"use {gcd(size, model.q_heads)}")
    count, queries_per_key = model.q_heads // size, model.q_heads // model.kv_heads
    heads = tuple(range(member * count, (member + 1) * count))
    return heads, tuple(sorted({head // queries_per_key for head in heads}))


class InnerPass(Pass, Protocol):
    """Forms groups of ranks that share tokens and split the heads. overlap: True if rows are exchanged while others are
    computed."""

    def split_kinds(self, problem: Problem) -> frozenset[str]:
        """The attention kinds whose heads are split; others are computed on their rows' home ranks."""
        return frozenset(problem.batch.kinds)

    @property
    def overlap(self) -> bool:
        return False

    def find_lone(self, problem: Problem, groups: Groups) -> LoneSequences | None:
        """The sequences that stay whole on one rank, or None."""
        return None

    @abstractmethod
    def groups(self, problem: Problem) -> Groups: ...

    @abstractmethod
    def head_sets(self, model: Model, groups: Groups) -> HeadSets: ...


@dataclass(frozen=True)
class Ulysses(InnerPass):
    """Groups of `degree` consecutive ranks. degree: a number, "auto" (the largest that divides the ranks and the query
    heads), "node" (the largest that divides the ranks of a node and the query heads) or "half_node" (the same for half
    a node, so that a node with an even number of ranks has several groups). overlap: True to exchange rows while others
    are computed; tasks that need no tile are then spread over the stages. lone: sequences up to this share of a rank's
    time stay whole on one rank, with all heads; "auto": as many as keep the ranks of a group even. kinds: attention
    kinds whose heads are split; others are computed with all heads on their rows' home ranks, which suits windows with
    few remote keys; "auto": kinds that see many keys."""

    name: ClassVar[str] = "ulysses"

    degree: Count | Literal["auto", "node", "half_node"] = "auto"
    overlap: bool = False
    lone: Share | Literal["auto"] | None = None
    kinds: Literal["all", "auto"] | Annotated[tuple[str, ...], Meta(min_length=1)] = "all"

    def split_kinds(self, problem: Problem) -> frozenset[str]:
        """The kinds whose heads are split, without those that choose keys at run time. Raises ConfigError for such a
        kind in `kinds`, and for kinds missing from the batch."""
        names = tuple(kind for kind in problem.batch.kinds if kind not in problem.chosen_keys)
        if self.kinds == "all" or not names:
            return frozenset(names)
        if self.kinds == "auto":
            reach = problem.reach
            farthest = max(names, key=lambda kind: reach[kind])
            return frozenset(kind for kind in names if kind == farthest or reach[kind] >= NEAR)
        for kind in self.kinds:
            if kind not in names:
                raise ConfigError(self._field("kinds"), kind, f"must be one of {', '.join(names)}", "use one")
        return frozenset(self.kinds)

    def _field(self, name: str) -> str:
        """The full name of a parameter in errors."""
        return f"recipe.inner.{self.name}.{name}"

    def head_sets(self, model: Model, groups: Groups) -> HeadSets:
        """The heads of each rank. Raises ConfigError."""
        return HeadSets.of(model, groups)

    def find_lone(self, problem: Problem, groups: Groups) -> LoneSequences | None:
        """The lone sequences, if any; None for a batch with `home_ranks`, which groups refuse."""
        if self.lone is None or not groups.split or problem.batch.home_ranks:
            return None
        return find_lone(problem, groups.first, self.lone)

    def groups(self, problem: Problem) -> Groups:
        """The groups of the cluster's ranks. Raises ConfigError if the degree does not divide them."""
        ranks, heads = problem.ranks, problem.model.q_heads
        limit = self._max_group_size(problem)
        degree = limit if isinstance(self.degree, int) else gcd(limit, heads)
        for label, total in (("ranks", ranks), ("query heads", heads)):
            if total % degree:
                rule = f"must divide the {total} {label}"
                raise ConfigError(
                    self._field("degree"), degree, rule, f"use {gcd(gcd(degree, ranks), heads)}"
                )
        reason = f"no larger number divides {limit} ranks and {heads} query heads"
        departure = Departure(self._field("degree"), min(limit, heads), degree, reason)
        return Groups(np.arange(0, ranks + 1, degree), (departure,) if degree < departure.asked else ())

    def _max_group_size(self, problem: Problem) -> int:
        """Largest number of ranks of a group, regardless of the number of heads."""
        if isinstance(self.degree, int):
            return self.degree
        if self.degree == "auto":
            return problem.ranks
        per_node = problem.cluster.ranks_per_node
        if self.degree == "node":
            return per_node
        return per_node // 2 if per_node % 2 == 0 else 1


def virtual_problem(problem: Problem, groups: Groups, lone: LoneSequences | None = None) -> Problem:
    """The problem whose ranks are the groups, all of equal size: links and tokens are sums over members; speed is that
    of the slowest member, because heads are split evenly. Excludes lone sequences and the time and tokens that they
    use. Raises ConfigError, CapacityError."""
    if not groups.split:
        return problem
    if problem.batch.home_ranks:
        raise ConfigError(
            "batch.home_ranks", len(problem.batch.home_ranks), "cannot be kept where groups share tokens",
            "drop `inner` or the home_ranks",
        )  # fmt: skip
    size = int(groups.sizes[0])
    cap, cluster = problem.policy.token_cap, _virtual_cluster(problem.cluster, size)
    rates, batch, rows = problem.token_rates.reshape(-1, size).sum(1), problem.batch, np.zeros(1, np.int64)
    if lone is not None:
        batch, rows = lone.shared, lone.rows.per_rank.reshape(-1, size).sum(1)
        rates = problem.token_shares.reshape(-1, size).sum(1) - rows
        cluster = replace(cluster, speeds=tuple(lone.left.tolist()))
    policy, caps = problem.policy, None
    if cap is not None:
        policy = replace(policy, token_cap=cap * size - int(rows.max()))
        caps = None if lone is None else tuple((cap * size - rows).tolist())
    return replace(
        problem, batch=batch, cluster=cluster, policy=policy, rates=tuple(rates.tolist()), caps=caps
    )


def _virtual_cluster(cluster: Cluster, size: int) -> Cluster:
    per_node = cluster.ranks_per_node // size if cluster.ranks_per_node % size == 0 else 1
    speeds = None if cluster.speeds is None else np.reshape(cluster.speeds, (-1, size)).min(axis=1)
    return replace(
        cluster,
        nodes=cluster.ranks // size // per_node,
        ranks_per_node=per_node,
        intra_gbs=cluster.intra_gbs * size,
        memory_gib=cluster.memory_gib * size,
        speeds=None if speeds is None else tuple(speeds.tolist()),
    )


def check_groups(groups: Groups, tiles: int) -> None:
    """Raises CapacityError for tiles between placement-defined groups with several ranks: their sizes, and so their
    ranks' heads, may differ."""
    if tiles and groups.split:
        raise CapacityError(
            f"{tiles} tiles would have to move between groups of {sorted(set(groups.sizes.tolist()))} ranks, whose "
            f"ranks hold different heads: keep every sequence inside one group"
        )
