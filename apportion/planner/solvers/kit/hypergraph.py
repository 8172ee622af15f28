"""Hypergraph problems, their rules and, for small ones, the optimum by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from apportion.ir.arrays import offsets
from apportion.planner.solvers.contracts import HypergraphProblem, Sides
from apportion.planner.solvers.kit.contract import Draw


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
