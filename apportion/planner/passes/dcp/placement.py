"""DCP: blocks and their computation placed by partitioning a hypergraph (sections 4.1 to 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.fields import MAX_COUNT, integer, number
from apportion.ir.isa import PHASES
from apportion.planner.passes.cells import Cells, cut_cells
from apportion.planner.passes.dcp.cells import Heads, divide
from apportion.planner.passes.dcp.homes import SPREADS, Blocks, homes
from apportion.planner.passes.shard import row_weights
from apportion.planner.problem import Execution, Placement, PlacePass, Problem, Shards
from apportion.planner.solvers.contracts import HypergraphProblem, Sides
from apportion.planner.solvers.registry import find_solver
from apportion.planner.solvers.status import Budget, Status, Termination

Ints = NDArray[np.integer[Any]]

# what cutting cells that are too heavy to be balanced stops at
MOST_CELLS = 2**19
# Nor more often: a cell then has a thousandth of its pairs, and what is not even yet will not be.
MOST_CUTS = 5


@dataclass(frozen=True)
class Dcp(PlacePass):
    """Homes for blocks of tokens and, for every head group, kind and phase, a rank for every cell.

    head_groups: shares of the heads that are placed apart ("kv": one a KV head, as the paper has it). solver: of kind
    hypergraph. epsilon_compute, epsilon_tokens: what nodes, and ranks within a node, may have above the mean, so that a
    rank has at most (1 + first) (1 + second) times the mean: by default 5 and 2 % more (the paper's evaluation: compute
    0.4 and 0.1). Both hold: blocks are cut as finely as that takes. divisions: T of Listing 3. tries: of homes; those
    that keep no rank's links busy for long are taken. deadline_s: of each call of the solver; a result that it cut says
    so and is not reproducible. An explicit token_cap is obeyed.
    Raises ConfigError, CapacityError, MissingDependencyError.
    """

    head_groups: int | Literal["kv"] = 1
    solver: str = "greedy"
    epsilon_compute: tuple[float, float] = (0.02, 0.029)
    epsilon_tokens: tuple[float, float] = (0.01, 0.009)
    divisions: int = 4
    tries: int = 3
    deadline_s: float | None = 10.0
    own_cap: ClassVar[bool] = True

    @property
    def deterministic(self) -> bool:
        """Whether no wall clock can cut what the solver finds."""
        return self.solver == "greedy" or self.deadline_s is None

    def __post_init__(self) -> None:
        where = "recipe.place.dcp"
        if self.head_groups != "kv":
            object.__setattr__(
                self, "head_groups", integer(f"{where}.head_groups", self.head_groups, 1, MAX_COUNT)
            )
        object.__setattr__(self, "divisions", integer(f"{where}.divisions", self.divisions, 1, MAX_COUNT))
        object.__setattr__(self, "tries", integer(f"{where}.tries", self.tries, 1, len(SPREADS)))
        for name in ("epsilon_compute", "epsilon_tokens"):
            object.__setattr__(self, name, _pair(f"{where}.{name}", getattr(self, name)))
        find_solver("hypergraph", self.solver)
        if self.deadline_s is not None:
            object.__setattr__(self, "deadline_s", number(f"{where}.deadline_s", self.deadline_s))

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        groups = problem.model.kv_heads if self.head_groups == "kv" else self.head_groups
        heads = Heads.of(problem.model, groups, "recipe.place.dcp.head_groups")
        blocks = homes(problem, shards, self.epsilon_compute, self.epsilon_tokens, self.tries)
        blocks, cells, sides = self._balanced(problem, blocks, heads)
        weight = row_weights(problem, blocks.starts)
        return Placement(
            blocks.starts,
            blocks.home,
            weight,
            float(weight.sum() / problem.speeds.sum()),
            termination=_together([side.termination for side in sides.values()]),
            execution={key: self._execution(problem, blocks, cells, heads, key, sides[key]) for key in sides},
            head_groups=groups,
        )

    def _balanced(
        self, problem: Problem, blocks: Blocks, heads: Heads
    ) -> tuple[Blocks, Mapping[str, Cells], Mapping[tuple[str, str], Sides]]:
        """Who computes each cell, of blocks cut finely enough for both balances."""
        for cut in count():
            cells = {kind: cut_cells(bands, blocks.starts) for kind, bands in problem.bands.items()}
            sides = self._solved(problem, blocks, cells, heads)
            if len(sides) == len(PHASES) * len(cells):
                return blocks, cells, sides
            finer = blocks.finer(list(cells.values()))
            small = len(finer.home) == len(blocks.home) or cut == MOST_CUTS
            if small or heads.groups * max(map(len, cells.values())) > MOST_CELLS:
                break
            blocks = finer
        raise self._uneven(problem, list(cells.values()))

    def _uneven(self, problem: Problem, cells: list[Cells]) -> CapacityError:
        heaviest, count = max((int(each.work.max(initial=0)), len(each)) for each in cells)
        mean = max(problem.batch.area(kind) for kind in problem.bands) / problem.ranks
        return CapacityError(
            f"place pass dcp found no ranks for {count} cells of at most {heaviest} pairs that keep nodes, and ranks "
            f"in a node, within {self.epsilon_compute} of the mean ({mean:.1f} pairs a rank): raise epsilon_compute"
        )

    def _solved(
        self, problem: Problem, blocks: Blocks, cells: Mapping[str, Cells], heads: Heads
    ) -> dict[tuple[str, str], Sides]:
        """The answers up to the first that does not keep both balances."""
        solver = find_solver("hypergraph", self.solver).load()
        sides: dict[tuple[str, str], Sides] = {}
        for kind in cells:
            for phase in PHASES:
                case = self._case(problem, blocks, cells[kind], heads, phase)
                found: Sides = solver(case, Budget(self.deadline_s))
                if not found.termination.solved:
                    return sides
                sides[kind, phase] = found
        return sides

    def _case(
        self, problem: Problem, blocks: Blocks, cells: Cells, heads: Heads, phase: str
    ) -> HypergraphProblem:
        case = blocks.case(problem, cells, heads, phase, self.epsilon_compute, self.epsilon_tokens)
        free = np.full(len(case.flops) - len(blocks.home), -1, np.int64)
        return replace(case, fixed=np.concatenate([blocks.home, free]))

    def _execution(
        self,
        problem: Problem,
        blocks: Blocks,
        cells: Mapping[str, Cells],
        heads: Heads,
        key: tuple[str, str],
        sides: Sides,
    ) -> Execution:
        kind, phase = key
        rank = sides.rank[len(blocks.home) :].reshape(heads.groups, -1).astype(np.int32)
        row_bytes = heads.bytes_of(problem.model, phase)
        division = divide(cells[kind], rank, blocks.home, blocks.lengths, heads, row_bytes, self.divisions)
        return Execution(rank, division)


def _pair(field: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(
            field, value, "must be two numbers, of nodes and of ranks in a node", "write [0.02, 0.03]"
        )
    return number(f"{field}[0]", value[0]), number(f"{field}[1]", value[1])


def _together(ends: list[Termination]) -> Termination:
    """One end for all kinds and phases: bytes are added up, and the first limit is named."""
    limit = next((end.limit for end in ends if end.limit is not None), None)
    status = Status.OPTIMAL if all(end.status is Status.OPTIMAL for end in ends) else Status.FEASIBLE
    return Termination(status, sum(end.bound for end in ends), sum(end.value or 0.0 for end in ends), limit)
