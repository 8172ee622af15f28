"""Random small problems of each kind of solver, with validity checks and enumeration; independent of the solvers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any, Protocol

import numpy as np

from apportion.ir.arrays import offsets
from apportion.planner.solvers import contracts
from apportion.planner.solvers.status import Status, Termination

Draw = np.random.Generator
_FEASIBLE = Termination(Status.FEASIBLE, 0.0, 0.0)


class Problems(Protocol):
    """Problem generator of a kind; `planner/solvers/contracts.py` defines problems and results."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        """Draws a problem whose answers can be enumerated; large: one that takes a solver well under a second."""

    def permute(self, problem: Any, draw: Draw) -> Any:
        """The same problem in another order."""

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        """Describes what is wrong with an answer."""

    def value(self, problem: Any, result: Any) -> float:
        """The value of an answer; lower is better."""

    def answers(self, problem: Any) -> Iterator[Any]:
        """All candidate results, including invalid ones; none if `optimum` is overridden."""
        return iter(())

    def optimum(self, problem: Any) -> float | None:
        """The lowest value of all answers, or None if there are none."""
        feasible = (answer for answer in self.answers(problem) if not any(self.faults(problem, answer)))
        return min((self.value(problem, answer) for answer in feasible), default=None)

    def infeasible_problem(self) -> Any | None:
        """A problem without an answer, or None if all problems of the kind have one."""
        return None


class Partitions(Problems):
    """Items of random weights and sizes."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        items, bins = (300, 16) if large else (int(draw.integers(1, 7)), int(draw.integers(1, 4)))
        weights, sizes = draw.integers(1, 1000, items), draw.integers(1, 50, items)
        speeds = draw.choice([0.5, 1.0, 1.0, 2.0], bins) if draw.random() < 0.7 else None
        capacity = np.ones(bins) if speeds is None or draw.random() < 0.5 else speeds
        caps = np.maximum(sizes.max(), sizes.sum() / capacity.sum() * capacity * 1.2 + 1).astype(np.int64)
        choices = [tuple(np.flatnonzero(draw.random(bins) < 0.7).tolist()) or None for _ in range(items)]
        allowed = choices if draw.random() < 0.3 else None
        families, zones = draw.integers(0, 1 + items // 4, items), np.arange(bins) // 4
        return contracts.PartitionProblem(weights, sizes, caps, speeds, allowed, families, zones)

    def infeasible_problem(self) -> Any:
        return contracts.PartitionProblem(np.array([1, 1]), np.array([3, 9]), np.array([8, 8]))

    def permute(self, problem: Any, draw: Draw) -> Any:
        order = draw.permutation(len(problem.weights))
        allowed = None if problem.allowed is None else [problem.allowed[item] for item in order]
        columns = {name: getattr(problem, name)[order] for name in ("weights", "sizes", "families")}
        return replace(problem, allowed=allowed, **columns)

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        yield from _outside("bins", result.bin, len(problem.sizes), problem.bins)
        loads = np.bincount(np.maximum(result.bin, 0), problem.sizes, problem.bins)
        if (loads > problem.caps).any():
            yield f"bins hold {loads}, but the cap is {problem.caps}"
        allowed = problem.allowed or [None] * len(result.bin)
        if any(bins and number not in bins for number, bins in zip(result.bin, allowed, strict=True)):
            yield f"bins {result.bin} are not all allowed"

    def value(self, problem: Any, result: Any) -> float:
        return float((np.bincount(result.bin, problem.weights, problem.bins) / problem.rates).max())

    def answers(self, problem: Any) -> Iterator[Any]:
        for bins in product(range(problem.bins), repeat=len(problem.weights)):
            yield contracts.Partition(np.array(bins), _FEASIBLE)


class Colourings(Problems):
    """Random multigraphs with a known optimum: the largest degree (König, 1916)."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        edges, ranks = (400, 16) if large else (int(draw.integers(0, 20)), int(draw.integers(1, 6)))
        src, dst = draw.integers(0, ranks, (2, edges))
        return contracts.ColouringProblem(src, dst, ranks)

    def permute(self, problem: Any, draw: Draw) -> Any:
        order, names = draw.permutation(len(problem.src)), draw.permutation(problem.ranks)
        return replace(problem, src=names[problem.src[order]], dst=names[problem.dst[order]])

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        for name, ends in (("sender", problem.src), ("receiver", problem.dst)):
            if len(set(zip(ends.tolist(), result.colour.tolist(), strict=True))) < len(ends):
                yield f"a {name} has several edges of one colour"

    def value(self, problem: Any, result: Any) -> float:
        return float(len(np.unique(result.colour)))

    def optimum(self, problem: Any) -> float:
        return float(max(np.bincount(ends, minlength=1).max() for ends in (problem.src, problem.dst)))


class Transports(Problems):
    """Random surpluses under two-level costs, for the sum and for the worst rank."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        rows = draw.integers(-1000, 1001, 24) if large else draw.integers(-2, 3, 4)
        rows[0 if large else int(draw.integers(4))] -= rows.sum()
        objective: Any = str(draw.choice(["sum", "minmax", "senders"]))
        cost = contracts.TwoLevelCost(8 if large else 2, 1.0, float(draw.integers(1, 10)))
        return contracts.TransportProblem(rows, cost, objective)

    def permute(self, problem: Any, draw: Draw) -> Any:
        nodes = np.arange(len(problem.surplus)).reshape(-1, problem.cost.ranks_per_node)
        order = draw.permuted(nodes[draw.permutation(len(nodes))], axis=1).ravel()
        return replace(problem, surplus=problem.surplus[order])

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        ends = ((result.src, 1), (result.dst, -1))
        totals = sum(sign * np.bincount(end, result.rows, len(problem.surplus)) for end, sign in ends)
        if not np.array_equal(totals, problem.surplus) or (result.rows <= 0).any():
            yield f"rows {totals} are moved, but the surplus is {problem.surplus}"
        if any((sign * problem.surplus[end] <= 0).any() for end, sign in ends):
            yield "a rank without surplus sends, or one without deficit receives"

    def value(self, problem: Any, result: Any) -> float:
        prices = problem.prices(result.src, result.dst) * result.rows
        if problem.objective == "sum":
            return float(prices.sum())
        sides = (result.src, result.dst) if problem.objective == "minmax" else (result.src,)
        return max(float(np.bincount(side, prices).max(initial=0.0)) for side in sides)

    def answers(self, problem: Any) -> Iterator[Any]:
        ranks, rows = np.arange(len(problem.surplus)), problem.surplus
        senders, receivers = (np.repeat(ranks, np.maximum(sign * rows, 0)) for sign in (1, -1))
        for order in set(permutations(receivers.tolist())):
            pairs = np.stack([senders, np.array(order, np.int64)])
            (src, dst), count = np.unique(pairs, axis=1, return_counts=True)
            yield contracts.Transport(src, dst, count, _FEASIBLE)


class Groupings(Problems):
    """Log-normal sequences with a time per degree: quadratic work shared by the group, and a cost of sharing."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        items, ranks = (14, 8) if large else (int(draw.integers(1, 6)), 4)
        degrees, room = 2 ** np.arange(4 if large else 3), 2.0 if large else 2.5
        sizes = np.rint(100 * np.exp(1.2 * draw.standard_normal(items))).astype(np.int64) + 1
        shared = 1 - 1 / degrees
        times = sizes[:, None] ** 2 / 100 / degrees + sizes[:, None] / degrees * shared * 0.3 + 2 * shared
        cap = int(max(room * sizes.sum() / ranks, -(-sizes.max() // degrees[-1])))
        return contracts.GroupingProblem(times, sizes, degrees, ranks, cap)

    def infeasible_problem(self) -> Any:
        return contracts.GroupingProblem(np.ones((2, 1)), np.array([5, 6]), np.array([1]), 2, 5)

    def permute(self, problem: Any, draw: Draw) -> Any:
        order = draw.permutation(len(problem.sizes))
        return replace(problem, times=problem.times[order], sizes=problem.sizes[order])

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        if result.degree.sum() > problem.ranks or not np.isin(result.degree, problem.degrees).all():
            yield f"groups of {result.degree} ranks; there are {problem.ranks}, in groups of {problem.degrees}"
        yield from _outside("groups", result.group, len(problem.sizes), len(result.degree))
        loads = np.bincount(np.maximum(result.group, 0), problem.sizes, len(result.degree))
        if (loads > problem.cap * result.degree).any():
            yield f"groups of {result.degree} ranks hold {loads}, but the cap is {problem.cap} per rank"
        if not np.allclose(self._times(problem, result), result.time):
            yield f"times {result.time} should be {self._times(problem, result)}"

    def _times(self, problem: Any, result: Any) -> Any:
        column = np.searchsorted(problem.degrees, result.degree)[result.group]
        return np.bincount(result.group, problem.times[np.arange(len(column)), column], len(result.degree))

    def value(self, problem: Any, result: Any) -> float:
        return float(self._times(problem, result).max())

    def answers(self, problem: Any) -> Iterator[Any]:
        for group in product(range(len(problem.sizes)), repeat=len(problem.sizes)):
            groups = max(group) + 1
            if list(dict.fromkeys(group)) == [*range(groups)]:  # numbered by first occurrence
                for degree in product(problem.degrees.tolist(), repeat=groups):
                    bare = contracts.Grouping(np.array(degree), np.array(group), np.zeros(groups), _FEASIBLE)
                    yield replace(bare, time=self._times(problem, bare))


class Hypergraphs(Problems):
    """Blocks of a few sequences, each connected to the cells that read it, at random prices."""

    def random_problem(self, draw: Draw, large: bool = False) -> Any:
        if large:
            return self.of(draw, [12, 5, 3, 1, 1, 1, 1], 2, 2, 0.1)
        return self.of(draw, [2, 1] if draw.random() < 0.5 else [1, 1, 1], 2, 1, 0.5)

    def of(self, draw: Draw, lengths: Sequence[int], nodes: int, per_node: int, slack: float) -> Any:
        """Builds a problem of sequences with these numbers of blocks."""
        blocks, ends = sum(lengths), np.cumsum(lengths)
        spans = [(int(end) - length, int(end)) for length, end in zip(lengths, ends, strict=True)]
        pairs = [(q, k) for low, end in spans for q in range(low, end) for k in range(low, q + 1)]
        edges = [[b % blocks] for b in range(2 * blocks)]
        for cell, (q, k) in enumerate(pairs, blocks):
            edges[q].append(cell)
            edges[blocks + k].append(cell)
        flops = np.concatenate([np.zeros(blocks, np.int64), draw.integers(1, 100, len(pairs))])
        tokens = np.concatenate([draw.integers(90, 110, blocks), np.zeros(len(pairs), np.int64)])
        price = np.concatenate([draw.integers(500, 900, blocks), draw.integers(100, 400, blocks)])
        pins, slacks = (offsets([len(edge) for edge in edges]), np.concatenate(edges)), (slack, slack)
        return contracts.HypergraphProblem(flops, tokens, *pins, price, nodes, per_node, slacks, slacks)

    def infeasible_problem(self) -> Any:
        empty, weights = np.zeros(0, np.int64), (np.array([9, 1, 0]), np.array([0, 0, 4]))
        return contracts.HypergraphProblem(*weights, np.zeros(1, int), empty, empty, 1, 2, (0, 0), (0, 0))

    def permute(self, problem: Any, draw: Draw) -> Any:
        order, edges = draw.permutation(len(problem.flops)), draw.permutation(len(problem.price))
        pins = np.split(np.argsort(order)[problem.pins], problem.ptr[1:-1])
        edge_pins = [pins[edge] for edge in edges]
        columns = {"flops": problem.flops[order], "tokens": problem.tokens[order]}
        columns |= {"pins": np.concatenate(edge_pins), "price": problem.price[edges]}
        return replace(problem, ptr=offsets([len(part) for part in edge_pins]), **columns)

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        yield from _outside("ranks", result.rank, len(problem.flops), problem.ranks)
        for name in ("flops", "tokens"):
            weights, (of_node, of_rank) = getattr(problem, name), getattr(problem, f"{name}_slack")
            for size, limit in ((1, (1 + of_node) * (1 + of_rank)), (problem.ranks_per_node, 1 + of_node)):
                loads = np.bincount(np.maximum(result.rank, 0) // size, weights, problem.ranks // size)
                mean = weights.sum() * size / problem.ranks
                if loads.max() > max(limit * mean + 1e-6, np.ceil(mean)):
                    yield f"ranks {result.rank} exceed a tolerance of {name}"

    def value(self, problem: Any, result: Any) -> float:
        edge_ranks = np.split(result.rank[problem.pins], problem.ptr[1:-1])
        return float(
            sum(p * (len(set(r.tolist())) - 1) for p, r in zip(problem.price, edge_ranks, strict=True))
        )

    def answers(self, problem: Any) -> Iterator[Any]:
        for ranks in product(range(problem.ranks), repeat=len(problem.flops)):
            yield contracts.VertexRanks(np.array(ranks), 0.0, 0.0, 0.0, _FEASIBLE)


def _outside(name: str, values: Any, items: int, limit: int) -> Iterator[str]:
    if len(values) != items or not np.isin(values, np.arange(limit)).all():
        yield f"{name} {values} must be one per item, in [0, {limit})"


_ALL: tuple[Problems, ...] = (Partitions(), Colourings(), Transports(), Groupings(), Hypergraphs())

#: by kind of solver
PROBLEMS = dict(zip(contracts.KINDS, _ALL, strict=True))
