"""DCP placement: blocks and their computation by hypergraph partitioning (sections 4.1 to 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from apportion.ir.errors import CapacityError
from apportion.ir.tensors import PHASES
from apportion.planner.options import Amount, Count
from apportion.planner.place.dcp.cells import Heads, Pairs, divide
from apportion.planner.place.dcp.homes import FEW_PAIRS, PAIRS, SPREADS, Blocks, homes, movable
from apportion.planner.place.dcp.links import link_gbs, swap_homes
from apportion.planner.problem import Departure, Execution, Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.contracts import HypergraphProblem, VertexRanks
from apportion.planner.solvers.hypergraph.solver import polish
from apportion.planner.solvers.status import Limit, Status, Termination
from apportion.planner.solvers.use import HypergraphSolver
from apportion.planner.tasks.cells import cut_cells

#: the solver's answers by (kind, phase)
Answers = Mapping[tuple[str, str], VertexRanks]

# cells too heavy to balance are cut until there are more cells than this
MOST_CELLS = 2**19
# Maximum number of such cuts: cells then have a thousandth of their original pairs, and further cuts do not help.
MAX_CUTS = 5


@dataclass(frozen=True)
class Dcp(PlacePass):
    """Homes for blocks of tokens and, for every head group, kind and phase, a rank for every cell.

    head_groups: separately placed shares of the heads ("kv": one per KV head, as in the paper). solver: of kind
    hypergraph. epsilon_compute, epsilon_tokens: tolerances of nodes, and of ranks within a node, over their share by
    speed: a rank gets at most (1 + first) (1 + second) times its share, by default 1.05 for compute, 1.02 for tokens
    (paper: epsilon_compute 0.4, 0.1). Both are met by cutting blocks finely enough. divisions: T of Listing 3. tries:
    number of candidate sets of homes; the set with the shortest link time wins. Obeys an explicit token_cap. Raises
    ConfigError, CapacityError, MissingDependencyError.
    """

    head_groups: Count | Literal["kv"] = 1
    solver: HypergraphSolver = HypergraphSolver("greedy")
    epsilon_compute: tuple[Amount, Amount] = (0.02, 0.029)
    epsilon_tokens: tuple[Amount, Amount] = (0.01, 0.009)
    divisions: Count = 4
    tries: Annotated[int, Meta(ge=1, le=len(SPREADS))] = 3
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        groups = problem.model.kv_heads if self.head_groups == "kv" else self.head_groups
        heads = Heads.of(problem.model, groups, "recipe.place.dcp.head_groups")
        slack = (self.epsilon_compute, self.epsilon_tokens)
        blocks = homes(problem, shards, *slack, self.tries, groups, self.solver)
        blocks, pairs, sides = self._balance(problem, blocks, heads)
        blocks, sides = self._exchange_homes(problem, blocks, pairs, heads, sides)
        weight = row_weights(problem, blocks.starts)
        termination = _merge_terminations([side.termination for side in sides.values()])
        return Placement(
            blocks.starts,
            blocks.home,
            weight,
            float(weight.sum() / problem.speeds.sum()),
            termination=termination,
            departures=tuple(self._departures(shards, blocks, termination)),
            execution={key: self._execution(problem, blocks, pairs, heads, key, sides[key]) for key in sides},
            head_groups=groups,
        )

    def _departures(self, shards: Shards, blocks: Blocks, termination: Termination) -> Iterator[Departure]:
        largest = int(blocks.lengths.max())
        if shards.block_tokens and largest > shards.block_tokens:
            reason = f"solving takes too long beyond {PAIRS} pairs of blocks per rank, {FEW_PAIRS} in total"
            yield Departure("recipe.shard.blocks.block", shards.block_tokens, largest, reason)
        if termination.limit is Limit.ENGINE:
            yield Departure(
                "recipe.place.dcp.solver",
                self.solver.name,
                "greedy",
                "the engine crashed or gave a wrong answer",
            )

    def _balance(
        self, problem: Problem, blocks: Blocks, heads: Heads
    ) -> tuple[Blocks, Mapping[str, Pairs], Answers]:
        """The rank of each block pair, with blocks cut finely enough for both balances."""
        for cut in count():
            pairs = {kind: blocks.pairs(bands) for kind, bands in problem.bands.items()}
            sides = self._solve(problem, blocks, pairs, heads)
            if len(sides) == len(PHASES) * len(pairs):
                return blocks, pairs, sides
            cut_blocks = blocks.halve_heaviest(list(pairs.values()))
            small = len(cut_blocks.home) == len(blocks.home) or cut == MAX_CUTS
            if small or heads.groups * max(map(len, pairs.values())) > MOST_CELLS:
                break
            blocks = cut_blocks
        raise self._uneven_error(problem, list(pairs.values()))

    def _exchange_homes(
        self, problem: Problem, blocks: Blocks, pairs: Mapping[str, Pairs], heads: Heads, sides: Answers
    ) -> tuple[Blocks, Answers]:
        """Exchanges homes to shorten the busiest ranks' link time; returns blocks, and answers improved for them."""
        cases = {key: self._case(problem, blocks, pairs[key[0]], heads, key[1]) for key in sides}
        inputs = [(cases[key], sides[key].rank, heads.groups * len(blocks.home)) for key in sides]
        home, _ = swap_homes(inputs, movable(problem, blocks.starts), link_gbs(problem))
        result = {}
        for key, (case, rank, _) in zip(sides, inputs, strict=True):
            fixed, current = case.required.copy(), rank.copy()
            fixed[: len(home)] = current[: len(home)] = home
            result[key] = polish(replace(case, fixed=fixed), current, sides[key].termination.limit)
        return Blocks(blocks.starts, home), result

    def _uneven_error(self, problem: Problem, cells: list[Pairs]) -> CapacityError:
        heaviest, count = max((int(pairs.work.max(initial=0)), len(pairs)) for pairs in cells)
        mean = max(problem.batch.area(kind) for kind in problem.bands) / problem.ranks
        return CapacityError(
            f"place pass dcp cannot place {count} cells of at most {heaviest} pairs and keep nodes, and ranks "
            f"in a node, within {self.epsilon_compute} of the mean ({mean:.1f} pairs per rank): raise epsilon_compute"
        )

    def _solve(
        self, problem: Problem, blocks: Blocks, pairs: Mapping[str, Pairs], heads: Heads
    ) -> dict[tuple[str, str], VertexRanks]:
        """Answers for kinds and phases, up to the first that violates a balance."""
        sides: dict[tuple[str, str], VertexRanks] = {}
        for kind in pairs:
            for phase in PHASES:
                case = self._case(problem, blocks, pairs[kind], heads, phase)
                solution = self.solver(case)
                if not solution.termination.solved:
                    return sides
                sides[kind, phase] = solution
        return sides

    def _case(
        self, problem: Problem, blocks: Blocks, pairs: Pairs, heads: Heads, phase: str
    ) -> HypergraphProblem:
        case = blocks.case(problem, pairs, heads, phase, self.epsilon_compute, self.epsilon_tokens)
        free = np.full(len(case.flops) - len(blocks.home), -1, np.int64)
        return replace(case, fixed=np.concatenate([blocks.home, free]))

    def _execution(
        self,
        problem: Problem,
        blocks: Blocks,
        pairs: Mapping[str, Pairs],
        heads: Heads,
        key: tuple[str, str],
        sides: VertexRanks,
    ) -> Execution:
        kind, phase = key
        pair_rank = sides.rank[len(blocks.home) :].reshape(heads.groups, -1)
        rank = pair_rank[:, pairs[kind].of_cell].astype(np.int32)
        cells = cut_cells(problem.bands[kind], blocks.starts)
        row_bytes = heads.bytes_of(problem.model, phase)
        division = divide(cells, rank, blocks.home, blocks.lengths, heads, row_bytes, self.divisions)
        return Execution(rank, division)


def _merge_terminations(ends: list[Termination]) -> Termination:
    """Merges the terminations of all kinds and phases: sums bytes, and names the first limit."""
    limit = next((end.limit for end in ends if end.limit is not None), None)
    status = Status.OPTIMAL if all(end.status is Status.OPTIMAL for end in ends) else Status.FEASIBLE
    return Termination(status, sum(end.bound for end in ends), sum(end.value or 0.0 for end in ends), limit)
