"""Solvers as parameters of passes: name and budget.

    solver: PartitionSolver = PartitionSolver("lpt")              in a pass, which calls self.solver(problem)
    solver: ilp                                                   in a recipe
    solver: {ilp: {steps: 1000, gap: 0.01}}

The solver provides default limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

from apportion.ir.errors import ConfigError
from apportion.planner import options
from apportion.planner.solvers import contracts
from apportion.planner.solvers.registry import Entry, find_solver, list_solvers
from apportion.planner.solvers.status import Budget

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class SolverOption(options.Option, Generic[P, R]):
    """A solver of one kind. budget: None for the solver's default. Raises UnknownNameError."""

    kind: ClassVar[str]
    name: str
    budget: Budget | None = None

    def __post_init__(self) -> None:
        find_solver(self.kind, self.name)

    def __call__(self, problem: P) -> R:
        """Solves the problem. Raises MissingDependencyError, and the solver's errors."""
        result: R = self._solver(problem, self.effective_budget)
        return result

    @cached_property
    def _solver(self) -> contracts.Solver[P, R]:
        return self.entry.load()

    @cached_property
    def entry(self) -> Entry:
        return find_solver(self.kind, self.name)

    @cached_property
    def effective_budget(self) -> Budget:
        return self.entry.budget if self.budget is None else self.budget

    def parse(self, path: str, value: Any) -> Self:
        if isinstance(value, str):
            return type(self)(value)
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ConfigError(
                path, value, f"must be {self.describe()}", f"write {self.name}, or {{{self.name}: {{}}}}"
            )
        ((name, limits_data),) = value.items()
        entry = find_solver(self.kind, name)
        if limits_data is not None and not isinstance(limits_data, Mapping):
            raise ConfigError(
                f"{path}.{name}", limits_data, "must be a mapping of its limits", "write {gap: 0.01}"
            )
        for limit in limits_data or {}:
            if limit not in entry.limits:
                rule = (
                    f"has the limits {', '.join(entry.limits)}"
                    if entry.limits
                    else "ends by itself, without limits"
                )
                raise ConfigError(f"{path}.{name}", limit, rule, "leave it out or correct it")
        return type(self)(name, options.read(Budget, f"{path}.{name}", limits_data or {}, entry.budget))

    def describe(self) -> str:
        names = ", ".join(self.solver_names())
        return f"a {self.kind} solver ({names}), alone or as {{name: {{limit: value}}}}"

    def data(self) -> Any:
        if self.budget is None:
            return self.name
        return {self.name: {name: getattr(self.budget, name) for name in _LIMITS}}

    def schema(self) -> dict[str, Any]:
        limits = options.schema(Budget)["properties"]
        limits_data = {
            name: {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {limit: limits[limit] for limit in find_solver(self.kind, name).limits},
            }
            for name in self.solver_names()
        }
        entry = {"type": "object", "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": self.solver_names()}, {**entry, "properties": limits_data}]}

    @classmethod
    def solver_names(cls) -> list[str]:
        """Names of the solvers of this kind."""
        return [entry.name for entry in list_solvers() if entry.kind == cls.kind]


_LIMITS = [field.name for field in fields(Budget)]


class PartitionSolver(SolverOption[contracts.PartitionProblem, contracts.Partition]):
    """Solver that packs items into bins."""

    kind = "partition"


class ColouringSolver(SolverOption[contracts.ColouringProblem, contracts.Colouring]):
    """Solver that splits edges into matchings."""

    kind = "colouring"


class TransportSolver(SolverOption[contracts.TransportProblem, contracts.Transport]):
    """Solver that moves rows from ranks with a surplus to ranks with a deficit."""

    kind = "transport"


class GroupingSolver(SolverOption[contracts.GroupingProblem, contracts.Grouping]):
    """Solver that forms groups of ranks and assigns sequences to them."""

    kind = "grouping"


class HypergraphSolver(SolverOption[contracts.HypergraphProblem, contracts.VertexRanks]):
    """Solver that assigns vertices with two weights to ranks."""

    kind = "hypergraph"
