"""Problems of each kind for the conformance kit: drawn from a generator, with their rules and, for small ones, the
optimum by enumeration. Nothing here is shared with a solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from apportion.ir.arrays import offsets
from apportion.planner.solvers.contracts import (
    Colouring,
    ColouringProblem,
    Grouping,
    GroupingProblem,
    HypergraphProblem,
    Partition,
    PartitionProblem,
    Sides,
    Transport,
    TransportProblem,
    TwoLevelCost,
)

Draw = np.random.Generator


class Cases(Protocol):
    """Problems of one kind."""

    def small(self, draw: Draw) -> Any:
        """One whose optimum can be enumerated."""

    def medium(self, draw: Draw) -> Any:
        """One that takes a solver well below a second."""

    def large(self, draw: Draw) -> Any:
        """One that a deadline may cut."""

    def hopeless(self) -> Any | None:
        """One without an answer, or None where the kind has none."""

    def permuted(self, problem: Any, draw: Draw) -> Any:
        """The same problem in another order."""

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        """What is wrong with an answer."""

    def value(self, problem: Any, result: Any) -> float:
        """What the answer is worth."""

    def optimum(self, problem: Any) -> float | None:
        """The least value of all answers, None where there is none."""


@dataclass(frozen=True)
class PartitionCases:
    """Items of random weights and sizes."""

    def small(self, draw: Draw) -> PartitionProblem:
        return self._drawn(draw, int(draw.integers(1, 7)), int(draw.integers(1, 4)))

    def medium(self, draw: Draw) -> PartitionProblem:
        return self._drawn(draw, 300, 16)

    def large(self, draw: Draw) -> PartitionProblem:
        return self._drawn(draw, 20_000, 512)

    def hopeless(self) -> PartitionProblem:
        return PartitionProblem(np.array([1, 1]), np.array([3, 9]), np.array([8, 8]))

    def _drawn(self, draw: Draw, items: int, bins: int) -> PartitionProblem:
        weights, sizes = draw.integers(1, 1000, items), draw.integers(1, 50, items)
        speeds = draw.choice([0.5, 1.0, 1.0, 2.0], bins) if draw.random() < 0.7 else None
        room = np.ones(bins) if speeds is None or draw.random() < 0.5 else speeds
        caps = np.maximum(sizes.max(), sizes.sum() / room.sum() * room * 1.2 + 1).astype(np.int64)
        held = [tuple(np.flatnonzero(draw.random(bins) < 0.7).tolist()) or None for _ in range(items)]
        allowed = held if draw.random() < 0.3 else None
        families, zones = draw.integers(0, 1 + items // 4, items), np.arange(bins) // 4
        return PartitionProblem(weights, sizes, caps, speeds, allowed, families, zones)

    def permuted(self, problem: PartitionProblem, draw: Draw) -> PartitionProblem:
        order = draw.permutation(len(problem.weights))
        allowed = None if problem.allowed is None else [problem.allowed[item] for item in order]
        families = None if problem.families is None else problem.families[order]
        weights, sizes = problem.weights[order], problem.sizes[order]
        return replace(problem, weights=weights, sizes=sizes, allowed=allowed, families=families)

    def faults(self, problem: PartitionProblem, result: Partition) -> Iterator[str]:
        if len(result.bin) != len(problem.sizes) or result.bin.min() < 0 or result.bin.max() >= problem.bins:
            yield f"bins {result.bin} are not one of {problem.bins} for each item"
            return
        used = np.bincount(result.bin, problem.sizes, problem.bins)
        for full in np.flatnonzero(used > problem.caps)[:1].tolist():
            yield f"bin {full} holds {used[full]:.0f}, the cap is {problem.caps[full]}"
        if not self._allowed(problem, result.bin.tolist()):
            yield f"bins {result.bin} are not all allowed"

    def value(self, problem: PartitionProblem, result: Partition) -> float:
        return self._heaviest(problem, result.bin)

    def _heaviest(self, problem: PartitionProblem, bins: Any) -> float:
        return float((np.bincount(bins, problem.weights, problem.bins) / problem.rates).max())

    def _allowed(self, problem: PartitionProblem, bins: Sequence[int]) -> bool:
        allowed = problem.allowed or [None] * len(bins)
        return all(only is None or chosen in only for chosen, only in zip(bins, allowed, strict=True))

    def optimum(self, problem: PartitionProblem) -> float | None:
        values = [
            self._heaviest(problem, chosen)
            for chosen in product(range(problem.bins), repeat=len(problem.weights))
            if self._allowed(problem, chosen)
            and (np.bincount(chosen, problem.sizes, problem.bins) <= problem.caps).all()
        ]
        return min(values, default=None)


@dataclass(frozen=True)
class ColouringCases:
    """Random multigraphs. Their optimum is known: the largest degree (König, 1916)."""

    def small(self, draw: Draw) -> ColouringProblem:
        return self._drawn(draw, int(draw.integers(0, 20)), int(draw.integers(1, 6)))

    def medium(self, draw: Draw) -> ColouringProblem:
        return self._drawn(draw, 400, 16)

    def large(self, draw: Draw) -> ColouringProblem:
        return self._drawn(draw, 20_000, 256)

    def hopeless(self) -> None:
        return None

    def _drawn(self, draw: Draw, edges: int, ranks: int) -> ColouringProblem:
        return ColouringProblem(draw.integers(0, ranks, edges), draw.integers(0, ranks, edges), ranks)

    def permuted(self, problem: ColouringProblem, draw: Draw) -> ColouringProblem:
        order, names = draw.permutation(len(problem.src)), draw.permutation(problem.ranks)
        return replace(problem, src=names[problem.src[order]], dst=names[problem.dst[order]])

    def faults(self, problem: ColouringProblem, result: Colouring) -> Iterator[str]:
        for name, ends in (("sender", problem.src), ("receiver", problem.dst)):
            pairs, count = np.unique(np.stack([ends, result.colour]), axis=1, return_counts=True)
            if (count > 1).any():
                end, colour = pairs[:, count.argmax()]
                yield f"{name} {end} has {count.max()} edges of colour {colour}"

    def value(self, problem: ColouringProblem, result: Colouring) -> float:
        return float(len(np.unique(result.colour)))

    def optimum(self, problem: ColouringProblem) -> float:
        if not len(problem.src):
            return 0.0
        return float(max(np.bincount(problem.src).max(), np.bincount(problem.dst).max()))


@dataclass(frozen=True)
class TransportCases:
    """Random surpluses under two-level and random costs, for the sum and for the worst rank."""

    def small(self, draw: Draw) -> TransportProblem:
        surplus = draw.integers(-2, 3, 4)
        surplus[int(draw.integers(4))] -= surplus.sum()
        return self._drawn(draw, surplus, 2)

    def medium(self, draw: Draw) -> TransportProblem:
        return self._drawn(draw, self._surplus(draw, 24), 8)

    def large(self, draw: Draw) -> TransportProblem:
        surplus = self._surplus(draw, 160)
        return TransportProblem(surplus, draw.uniform(1, 9, (160, 160)), "minmax")

    def hopeless(self) -> None:
        return None

    def _surplus(self, draw: Draw, ranks: int) -> Any:
        rows = draw.integers(-1000, 1001, ranks)
        rows[0] -= rows.sum()
        return rows

    def _drawn(self, draw: Draw, surplus: Any, per_node: int) -> TransportProblem:
        objective: Any = str(draw.choice(["sum", "minmax", "senders"]))
        levels = TwoLevelCost(per_node, 1.0, float(draw.integers(1, 10)))
        cost = levels if draw.random() < 0.5 else draw.uniform(0, 9, (len(surplus), len(surplus)))
        return TransportProblem(surplus, cost, objective)

    def permuted(self, problem: TransportProblem, draw: Draw) -> TransportProblem:
        if isinstance(problem.cost, TwoLevelCost):
            nodes = np.arange(len(problem.surplus)).reshape(-1, problem.cost.ranks_per_node)
            order = draw.permuted(nodes[draw.permutation(len(nodes))], axis=1).ravel()
            return replace(problem, surplus=problem.surplus[order])
        order = draw.permutation(len(problem.surplus))
        return replace(problem, surplus=problem.surplus[order], cost=problem.cost[np.ix_(order, order)])

    def faults(self, problem: TransportProblem, result: Transport) -> Iterator[str]:
        ranks = len(problem.surplus)
        moved = np.zeros(ranks, np.int64)
        np.add.at(moved, result.src, result.rows)
        np.subtract.at(moved, result.dst, result.rows)
        if not np.array_equal(moved, problem.surplus) or (result.rows <= 0).any():
            yield f"rows {moved} are moved, the surplus is {problem.surplus}"
        if not (problem.surplus[result.src] > 0).all() or not (problem.surplus[result.dst] < 0).all():
            yield "a rank without surplus sends, or one without deficit receives"

    def value(self, problem: TransportProblem, result: Transport) -> float:
        ranks = len(problem.surplus)
        flows = np.zeros((ranks, ranks), np.int64)
        flows[result.src, result.dst] = result.rows
        return self._worth(problem, flows)

    def _worth(self, problem: TransportProblem, flows: Any) -> float:
        prices = flows * problem.matrix
        if problem.objective == "sum":
            return float(prices.sum())
        sides = (0, 1) if problem.objective == "minmax" else (1,)
        return float(max(prices.sum(side).max() for side in sides))

    def optimum(self, problem: TransportProblem) -> float:
        ranks = len(problem.surplus)
        flows = np.zeros((ranks, ranks), np.int64)
        return min(self._worth(problem, each) for each in self._all(problem.surplus.copy(), flows))

    def _all(self, rest: Any, flows: Any) -> Iterator[Any]:
        """Every way to move the rest, row by row from its first sender."""
        senders = np.flatnonzero(rest > 0)
        if not len(senders):
            yield flows
            return
        src = int(senders[0])
        last = np.flatnonzero(flows[src])
        for dst in np.flatnonzero(rest < 0):
            if len(last) and dst < last[-1]:
                continue  # rows are alike: their receivers rise
            step = np.zeros_like(flows)
            step[src, dst] = 1
            yield from self._all(rest - step.sum(1) + step.sum(0), flows + step)


@dataclass(frozen=True)
class GroupingCases:
    """Log-normal sequences with time per degree: quadratic work shared by the group, and a price of sharing."""

    def small(self, draw: Draw) -> GroupingProblem:
        return self._drawn(draw, int(draw.integers(1, 6)), 4, np.array([1, 2, 4]), 2.5)

    def medium(self, draw: Draw) -> GroupingProblem:
        return self._drawn(draw, 14, 8, np.array([1, 2, 4, 8]), 2.0)

    def large(self, draw: Draw) -> GroupingProblem:
        return self._drawn(draw, 64, 64, 2 ** np.arange(6), 2.0)

    def hopeless(self) -> GroupingProblem:
        return GroupingProblem(np.ones((2, 1)), np.array([5, 6]), np.array([1]), 2, 5)

    def _drawn(self, draw: Draw, items: int, ranks: int, degrees: Any, room: float) -> GroupingProblem:
        sizes = np.rint(100 * np.exp(1.2 * draw.standard_normal(items))).astype(np.int64) + 1
        shared = 1 - 1 / degrees
        times = sizes[:, None] ** 2 / 100 / degrees + sizes[:, None] / degrees * shared * 0.3 + 2 * shared
        cap = int(max(room * sizes.sum() / ranks, -(-sizes.max() // degrees[-1])))
        return GroupingProblem(times, sizes, degrees, ranks, cap)

    def permuted(self, problem: GroupingProblem, draw: Draw) -> GroupingProblem:
        order = draw.permutation(len(problem.sizes))
        return replace(problem, times=problem.times[order], sizes=problem.sizes[order])

    def faults(self, problem: GroupingProblem, result: Grouping) -> Iterator[str]:
        groups = len(result.degree)
        if result.degree.sum() > problem.ranks or not np.isin(result.degree, problem.degrees).all():
            yield f"groups of {result.degree} ranks, there are {problem.ranks}, in groups of {problem.degrees}"
        if len(result.group) != len(problem.sizes) or result.group.min() < 0 or result.group.max() >= groups:
            yield f"groups {result.group} are not one of {groups} for each sequence"
            return
        used = np.bincount(result.group, problem.sizes, groups)
        if (used > problem.cap * result.degree).any():
            yield f"groups of {result.degree} ranks hold {used}, the cap is {problem.cap} a rank"
        if not np.allclose(self._times(problem, result), result.time):
            yield f"times {result.time}, they are {self._times(problem, result)}"

    def _times(self, problem: GroupingProblem, result: Grouping) -> Any:
        column = np.searchsorted(problem.degrees, result.degree)[result.group]
        own = problem.times[np.arange(len(column)), column]
        return np.bincount(result.group, own, len(result.degree))

    def value(self, problem: GroupingProblem, result: Grouping) -> float:
        return float(self._times(problem, result).max())

    def optimum(self, problem: GroupingProblem) -> float | None:
        """Over every partition of the sequences and every degree of each part."""
        values = [
            time
            for parts in _partitions(len(problem.sizes))
            for time in self._worths(problem, parts)
            if np.isfinite(time)
        ]
        return min(values, default=None)

    def _worths(self, problem: GroupingProblem, parts: list[list[int]]) -> Iterator[float]:
        if len(parts) > problem.ranks:
            return
        tokens = np.array([problem.sizes[part].sum() for part in parts])
        times = np.stack([problem.times[part].sum(0) for part in parts])
        for chosen in product(range(len(problem.degrees)), repeat=len(parts)):
            degree = problem.degrees[list(chosen)]
            if degree.sum() <= problem.ranks and (tokens <= problem.cap * degree).all():
                yield float(times[np.arange(len(parts)), list(chosen)].max())


@dataclass(frozen=True)
class HypergraphCases:
    """Blocks of a few sequences, each tied to the cells that read it; prices are drawn."""

    def small(self, draw: Draw) -> HypergraphProblem:
        return self._drawn(draw, [2, 1] if draw.random() < 0.5 else [1, 1, 1], 2, 1, 0.5)

    def medium(self, draw: Draw) -> HypergraphProblem:
        return self._drawn(draw, [12, 5, 3, 1, 1, 1, 1], 2, 2, 0.1)

    def large(self, draw: Draw) -> HypergraphProblem:
        return self._drawn(draw, [90, 60, 30, *[3] * 20], 2, 4, 0.1)

    def hopeless(self) -> HypergraphProblem:
        none = np.zeros(0, np.int64)
        return HypergraphProblem(
            np.array([9, 1, 0]), np.array([0, 0, 4]), np.zeros(1, np.int64), none, none, 1, 2, (0, 0), (0, 0)
        )

    def _drawn(
        self, draw: Draw, lengths: list[int], nodes: int, per_node: int, slack: float
    ) -> HypergraphProblem:
        blocks, cells = (
            sum(lengths),
            [(at, at + n) for at, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True)],
        )
        pairs = [(q, k) for low, end in cells for q in range(low, end) for k in range(low, q + 1)]
        edges = [[b] for b in range(2 * blocks)]
        for cell, (q, k) in enumerate(pairs):
            edges[q].append(blocks + cell)
            edges[blocks + k].append(blocks + cell)
        flops = np.concatenate([np.zeros(blocks, np.int64), draw.integers(1, 100, len(pairs))])
        tokens = np.concatenate([draw.integers(90, 110, blocks), np.zeros(len(pairs), np.int64)])
        return HypergraphProblem(
            flops,
            tokens,
            offsets([len(edge) for edge in edges]),
            np.array([v % blocks if at == 0 else v for edge in edges for at, v in enumerate(edge)]),
            np.concatenate([draw.integers(500, 900, blocks), draw.integers(100, 400, blocks)]),
            nodes,
            per_node,
            (slack, slack),
            (slack, slack),
        )

    def permuted(self, problem: HypergraphProblem, draw: Draw) -> HypergraphProblem:
        order, edges = draw.permutation(len(problem.flops)), draw.permutation(len(problem.price))
        place = np.argsort(order)
        held = [place[problem.pins[problem.ptr[e] : problem.ptr[e + 1]]] for e in edges]
        return replace(
            problem,
            flops=problem.flops[order],
            tokens=problem.tokens[order],
            ptr=offsets([len(pins) for pins in held]),
            pins=np.concatenate(held),
            price=problem.price[edges],
        )

    def faults(self, problem: HypergraphProblem, result: Sides) -> Iterator[str]:
        if len(result.rank) != len(problem.flops) or not np.isin(result.rank, np.arange(problem.ranks)).all():
            yield f"ranks {result.rank} are not one of {problem.ranks} for each vertex"
            return
        if not self._kept(problem, result.rank):
            yield f"ranks {result.rank} break a tolerance"

    def _kept(self, problem: HypergraphProblem, rank: Any) -> bool:
        """Both weights on ranks and nodes."""
        for weights, (of_node, of_rank) in (
            (problem.flops, problem.flops_slack),
            (problem.tokens, problem.tokens_slack),
        ):
            levels = ((1, (1 + of_node) * (1 + of_rank)), (problem.ranks_per_node, 1 + of_node))
            for size, most in levels:
                used = np.bincount(rank // size, weights, problem.ranks // size)
                mean = weights.sum() * size / problem.ranks
                if used.max() > max(most * mean + 1e-6, np.ceil(mean)):
                    return False
        return True

    def value(self, problem: HypergraphProblem, result: Sides) -> float:
        return self._worth(problem, result.rank)

    def _worth(self, problem: HypergraphProblem, rank: Any) -> float:
        held = [rank[problem.pins[a:b]] for a, b in zip(problem.ptr[:-1], problem.ptr[1:], strict=True)]
        return float(sum(p * (len(set(r.tolist())) - 1) for p, r in zip(problem.price, held, strict=True)))

    def optimum(self, problem: HypergraphProblem) -> float | None:
        every = (np.array(ranks) for ranks in product(range(problem.ranks), repeat=len(problem.flops)))
        return min((self._worth(problem, rank) for rank in every if self._kept(problem, rank)), default=None)


def _partitions(items: int) -> Iterator[list[list[int]]]:
    """Every way to part the numbers below `items`."""
    if not items:
        yield []
        return
    for parts in _partitions(items - 1):
        yield [*parts, [items - 1]]
        for i, part in enumerate(parts):
            yield [*parts[:i], [*part, items - 1], *parts[i + 1 :]]


CASES: Mapping[str, Cases] = MappingProxyType(
    {
        "partition": PartitionCases(),
        "colouring": ColouringCases(),
        "transport": TransportCases(),
        "grouping": GroupingCases(),
        "hypergraph": HypergraphCases(),
    }
)
