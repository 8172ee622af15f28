"""Groups of ranks that share tokens and split heads (Ulysses, Jacobs et al., 2023), and the head sets of their ranks.

    group    0                       1
    ranks    0     1     2     3     4     5     6     7
    tokens   a quarter of the group's rows each          home rows
    heads    all rows of the group, a quarter of the heads each, while attention is computed

Attention of a group is planned as if it were one rank; its ranks run that program side by side, each for its heads,
and talk to those of other groups that have the same heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from apportion.ir.cluster import Cluster
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.model import Model
from apportion.planner.passes.layouts import Rows
from apportion.planner.problem import Problem

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Groups:
    """first: int64 [groups + 1], the first rank of each group, and the end."""

    first: Ints

    @staticmethod
    def single(ranks: int) -> Groups:
        """Every rank by itself."""
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
        """Whether any group has several ranks."""
        return len(self) < self.ranks

    @cached_property
    def of_rank(self) -> Ints:
        """int64 [ranks]: the group of each rank."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def member(self) -> Ints:
        """int64 [ranks]: the place of each rank in its group."""
        return np.arange(self.ranks) - self.first[self.of_rank]

    def spread(self, group: Ints) -> tuple[Ints, Ints]:
        """For values of groups: the index of the value that each member takes, and the member's rank."""
        sizes = self.sizes[group]
        index = np.repeat(np.arange(len(group)), sizes)
        ends = np.cumsum(sizes)
        return index, self.first[group[index]] + np.arange(len(index)) - (ends - sizes)[index]

    def member_rows(self, rows: Rows) -> Rows:
        """The home rows of every rank where the rows of each group are cut evenly among its ranks, in order."""
        held, first_row = rows.per_rank, np.cumsum(rows.per_rank) - rows.per_rank
        of, place, size = self.of_rank, self.member, self.sizes[self.of_rank]
        cut = first_row[of] + held[of] * place // size  # in rows of all groups, one after another
        cut = cut[(place > 0) & (held[of] * place // size < held[of])]
        ends = np.cumsum(rows.lengths[rows.order])
        block = rows.order[np.searchsorted(ends, cut, "right")]
        token = rows.starts[block] + cut - first_row[rows.home[block]] - rows.row[block]
        starts = np.union1d(rows.starts, token)
        block = rows.block_of(starts[:-1])
        group, row = rows.home[block], rows.row[block] + starts[:-1] - rows.starts[block]
        # the last place whose first row, held * place // size, is not after `row`
        member = ((row + 1) * self.sizes[group] - 1) // held[group]
        return Rows(starts, self.first[group] + member, self.ranks)


@dataclass(frozen=True)
class HeadSets:
    """Which heads each rank computes. sets: as in the plan's header; query, key: int64 [ranks], number of the rank's
    set of query and of KV heads (0: all); query_heads, key_heads: int64 [ranks], how many these are; shared: bool
    [groups], whether KV heads of a group are computed by several of its ranks."""

    sets: tuple[tuple[int, ...], ...]
    query: Ints
    key: Ints
    query_heads: Ints
    key_heads: Ints
    shared: NDArray[np.bool_]

    @property
    def key_columns(self) -> Ints:
        """int64 [ranks]: head columns of KV arenas. Where KV heads are shared, gradients arrive from other ranks, maybe
        of other groups, with as many heads as those have."""
        return np.full_like(self.key_heads, self.key_heads.max()) if self.shared.any() else self.key_heads

    @staticmethod
    def of(model: Model, groups: Groups) -> HeadSets:
        """Contiguous shares of the query heads; the KV heads that they use follow. Raises ConfigError."""
        numbers: dict[tuple[int, ...], int] = {}
        columns = np.zeros((4, groups.ranks), np.int64)
        columns[2], columns[3] = model.q_heads, model.kv_heads
        shared = np.zeros(len(groups), bool)
        for size in sorted(set(groups.sizes.tolist()) - {1}):
            members = [_share(model, size, place) for place in range(size)]
            ids = [[numbers.setdefault(heads, len(numbers) + 1) for heads in pair] for pair in members]
            table = np.array([[*pair, len(q), len(kv)] for pair, (q, kv) in zip(ids, members, strict=True)])
            inside = np.flatnonzero(groups.sizes[groups.of_rank] == size)
            columns[:, inside] = table[groups.member[inside]].T
            shared[groups.sizes == size] = sum(len(kv) for _, kv in members) > model.kv_heads
        query, key, query_heads, key_heads = columns
        return HeadSets(tuple(numbers), query, key, query_heads, key_heads, shared)


def _share(model: Model, size: int, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads of one of `size` ranks, and their KV heads."""
    if model.q_heads % size:
        rule = f"must divide the {model.q_heads} query heads among the ranks of a group"
        raise ConfigError("recipe.inner.ulysses.degree", size, rule, f"use {gcd(size, model.q_heads)}")
    count, queries_per_key = model.q_heads // size, model.q_heads // model.kv_heads
    heads = tuple(range(place * count, (place + 1) * count))
    return heads, tuple(sorted({head // queries_per_key for head in heads}))


@dataclass(frozen=True)
class Ulysses:
    """Groups of `degree` consecutive ranks. degree: a number, "auto" (the largest that divides the ranks and the query
    heads) or "node" (the largest that divides the ranks of a node and the query heads)."""

    degree: int | Literal["auto", "node"] = "auto"

    def __post_init__(self) -> None:
        if self.degree not in ("auto", "node") and (type(self.degree) is not int or self.degree < 1):
            rule = "must be a positive integer, node or auto"
            raise ConfigError("recipe.inner.ulysses.degree", self.degree, rule, "use 8")

    def groups(self, problem: Problem) -> Groups:
        """The groups of the cluster's ranks. Raises ConfigError where the degree does not divide."""
        degree, ranks, heads = self._degree(problem), problem.ranks, problem.model.q_heads
        for what, whole in (("ranks", ranks), ("query heads", heads)):
            if whole % degree:
                rule = f"must divide the {whole} {what}"
                raise ConfigError(
                    "recipe.inner.ulysses.degree", degree, rule, f"use {gcd(gcd(degree, ranks), heads)}"
                )
        return Groups(np.arange(0, ranks + 1, degree))

    def _degree(self, problem: Problem) -> int:
        if self.degree == "auto":
            return gcd(problem.ranks, problem.model.q_heads)
        if self.degree == "node":
            return gcd(problem.cluster.ranks_per_node, problem.model.q_heads)
        return self.degree


def virtual_problem(problem: Problem, groups: Groups) -> Problem:
    """The problem whose ranks are the groups, all of one size: their links are those of all members together, their
    speed that of the slowest, because heads are split evenly."""
    if not groups.split:
        return problem
    if problem.batch.home_ranks:
        raise ConfigError(
            "batch.home_ranks", len(problem.batch.home_ranks), "cannot be kept where groups share tokens",
            "drop `inner` or the home_ranks",
        )  # fmt: skip
    size = int(groups.sizes[0])
    given = problem.policy.token_cap
    policy = problem.policy if given is None else replace(problem.policy, token_cap=given * size)
    return replace(problem, cluster=_virtual_cluster(problem.cluster, size), policy=policy)


def _virtual_cluster(cluster: Cluster, size: int) -> Cluster:
    inside = cluster.ranks_per_node // size if cluster.ranks_per_node % size == 0 else 1
    speeds = None if cluster.speeds is None else np.reshape(cluster.speeds, (-1, size)).min(axis=1)
    return replace(
        cluster,
        nodes=cluster.ranks // size // inside,
        ranks_per_node=inside,
        intra_gbs=cluster.intra_gbs * size,
        memory_gib=cluster.memory_gib * size,
        speeds=None if speeds is None else tuple(speeds.tolist()),
    )


def check_groups(groups: Groups, tiles: int) -> None:
    """Groups of several sizes cannot exchange tiles: their ranks hold different heads. Raises CapacityError."""
    if tiles and len(set(groups.sizes.tolist())) > 1:
        raise CapacityError(
            f"{tiles} tiles would have to move between groups of {sorted(set(groups.sizes.tolist()))} ranks, whose "
            f"ranks hold different heads: keep every sequence inside one group"
        )
