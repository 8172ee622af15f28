"""The solvers there are. Listing them imports no engine.

Third parties add an Entry under the entry point group `apportion.solvers`; built-in names cannot be taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from apportion.ir import fields
from apportion.ir.errors import ConfigError, MissingDependencyError, UnknownNameError
from apportion.planner import plugins
from apportion.planner.solvers.contracts import KINDS, Solver

GROUP = "apportion.solvers"


@dataclass(frozen=True)
class Entry:
    """One solver. loader: "module:function"; needs: (package, extra of apportion) or None. Raises ConfigError."""

    name: str
    kind: str
    loader: str
    source: str
    summary: str
    needs: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"solver {self.name}.kind", self.kind, f"must be {', '.join(KINDS)}", "name one of these"
            )
        if self.loader.count(":") != 1:
            raise ConfigError(
                f"solver {self.name}.loader", self.loader, "must be module:function", "write both"
            )

    @property
    def installed(self) -> bool:
        """Whether what it needs is there; imports nothing."""
        return self.needs is None or find_spec(self.needs[0]) is not None

    def load(self) -> Solver[Any, Any]:
        """The solver itself. Raises MissingDependencyError."""
        if self.needs and not self.installed:
            raise MissingDependencyError(*self.needs, f"solver {self.name}")
        module, function = self.loader.split(":")
        solver: Solver[Any, Any] = getattr(import_module(module), function)
        return solver


_HERE = "apportion.planner.solvers"
_BUILT_IN = (
    Entry(
        "lpt",
        "partition",
        f"{_HERE}.lpt:solve",
        "Graham 1969; FCP, section 4.1",
        "longest processing time first under a size cap, bins of unequal speed",
    ),
    Entry(
        "matching",
        "colouring",
        f"{_HERE}.matching:solve",
        "König 1916; FCP, section 4.2",
        "a bipartite multigraph into exactly as many matchings as its largest degree",
    ),
    Entry(
        "flow",
        "transport",
        f"{_HERE}.flow:solve",
        "Zeppelin, section 3 (remapping); Huangfu and Hall 2018 (HiGHS)",
        "surplus rows to deficit rows: closed form for two-level costs, HiGHS LP for any other",
    ),
    Entry(
        "ilp",
        "grouping",
        f"{_HERE}.ilp:solve",
        "FlexSP, section 4",
        "group sizes and sequences to groups: greedy mix, local search, PuLP model on HiGHS, with its own bound",
        ("pulp", "solvers"),
    ),
    Entry(
        "mtkahypar",
        "hypergraph",
        f"{_HERE}.mtkahypar:solve",
        "DCP, section 4.2; Gottesbüren et al. 2022 (Mt-KaHyPar)",
        "tokens placed by our greedy and fixed, compute partitioned by Mt-KaHyPar in a child process, our repair",
        ("mtkahypar", "solvers"),
    ),
    Entry(
        "greedy",
        "hypergraph",
        f"{_HERE}.hypergraph:solve",
        "DCP, section 4.2; moves after Fiduccia and Mattheyses 1982",
        "two constraints, nodes then ranks: greedy with affinity, repair of both balances, moves that gain",
    ),
)

#: the built-in solvers; of a kind, the first is the default
SOLVERS: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _BUILT_IN})


def list_solvers() -> tuple[Entry, ...]:
    """All solvers, the built-in ones first. Raises ConfigError for a plug-in that cannot be loaded."""
    added = [_load(name) for name in plugins.found(GROUP)]
    return (*SOLVERS.values(), *added)


def find_solver(kind: str, name: str | None = None) -> Entry:
    """The solver of that kind and name, by default the first built-in one. Raises UnknownNameError."""
    if kind not in KINDS:
        raise UnknownNameError("solver kind", kind, f"there is {', '.join(KINDS)}", "name one of these")
    if name is None:
        return next(entry for entry in SOLVERS.values() if entry.kind == kind)
    name = fields.name(f"solver of kind {kind}", name)
    entry = SOLVERS.get(name) or (_load(name) if name in plugins.found(GROUP) else None)
    if entry is None or entry.kind != kind:
        known = [entry.name for entry in list_solvers() if entry.kind == kind]
        raise UnknownNameError(
            f"solver of kind {kind}", name, f"there is {', '.join(known)}", "name one of these"
        )
    return entry


def _load(name: str) -> Entry:
    point = plugins.found(GROUP)[name]
    entry: Entry = plugins.load(point, Entry)
    if name in SOLVERS or entry.name != name:
        rule = f"{plugins.distribution(point)} adds solver {entry.name} under this name"
        raise ConfigError(
            f"entry point {GROUP}:{name}", entry.name, rule, "use equal names that no built-in has"
        )
    return entry
