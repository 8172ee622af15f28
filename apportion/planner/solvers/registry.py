"""Registry of solvers, without importing engines.

Third parties add theirs through the entry point group `apportion.solvers`: "kind.solver" = an Entry. Built-in names
cannot be taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from apportion.ir import fields
from apportion.ir.errors import ConfigError, MissingDependencyError, UnknownNameError
from apportion.planner import plugins
from apportion.planner.solvers.contracts import KINDS, Solver
from apportion.planner.solvers.status import Budget

GROUP = "apportion.solvers"


@dataclass(frozen=True)
class Entry:
    """One solver. loader: "module:function"; needs: (package, extra of apportion) or None; budget: its default; limits:
    the fields of a Budget that it respects; heuristic: True if it proves optimality only by chance. Raises
    ConfigError."""

    name: str
    kind: str
    loader: str
    source: str
    summary: str
    needs: tuple[str, str] | None = None
    budget: Budget = Budget()
    heuristic: bool = False
    limits: tuple[str, ...] = ("steps", "gap")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"solver {self.name}.kind", self.kind, f"must be {', '.join(KINDS)}", "use one of these"
            )
        if self.loader.count(":") != 1:
            raise ConfigError(
                f"solver {self.name}.loader", self.loader, "must be module:function", "write both"
            )

    @property
    def installed(self) -> bool:
        """True if its requirements are installed; imports nothing."""
        return self.needs is None or find_spec(self.needs[0]) is not None

    def load(self) -> Solver[Any, Any]:
        """Loads the solver. Raises MissingDependencyError."""
        if self.needs and not self.installed:
            raise MissingDependencyError(*self.needs, f"solver {self.name}")
        return _load_function(self.loader)


@cache
def _load_function(loader: str) -> Solver[Any, Any]:
    module, function = loader.split(":")
    solver: Solver[Any, Any] = getattr(import_module(module), function)
    return solver


_HERE = "apportion.planner.solvers"
_BUILT_IN = (
    Entry(
        "lpt",
        "partition",
        f"{_HERE}.partition.lpt:solve",
        "Graham 1969; FCP, section 4.1",
        "longest processing time first under a size cap, bins of unequal speed",
        heuristic=True,
        limits=(),
    ),
    Entry(
        "lpt_near",
        "partition",
        f"{_HERE}.partition.lpt:solve_near",
        "Graham 1969; the choice among about equally light bins is ours",
        "LPT; among about equally light bins, one near items of the same family",
        heuristic=True,
        limits=(),
    ),
    Entry(
        "swap",
        "partition",
        f"{_HERE}.partition.swap:solve",
        "LPT; local search after Finn and Horowitz 1979",
        "LPT, then items of the heaviest bin are exchanged for none, one or two of a lighter one",
        heuristic=True,
        limits=(),
    ),
    Entry(
        "ilp",
        "partition",
        f"{_HERE}.partition.ilp:solve",
        "the assignment program of makespan scheduling; Huangfu and Hall 2018 (HiGHS)",
        "exact for small problems, up to a node limit for others: HiGHS, started from swap",
        ("pulp", "solvers"),
    ),
    Entry(
        "matching",
        "colouring",
        f"{_HERE}.colouring.matching:solve",
        "König 1916; FCP, section 4.2",
        "splits a bipartite multigraph into exactly as many matchings as its largest degree",
        limits=(),
    ),
    Entry(
        "flow",
        "colouring",
        f"{_HERE}.colouring.flow:solve",
        "repeated min-cost flows, as FCP, section 4.2, repeats maximum matchings",
        "the fewest matchings, each with as many edges as possible, so that the last ones are the emptiest",
        ("scipy", "solvers"),
        limits=("steps",),
    ),
    Entry(
        "flow",
        "transport",
        f"{_HERE}.transport:solve",
        "Zeppelin, section 3 (remapping)",
        "moves surplus rows to ranks that lack rows: the closed form for two-level costs",
        limits=(),
    ),
    Entry(
        "ilp",
        "grouping",
        f"{_HERE}.grouping.ilp:solve",
        "FlexSP, section 4",
        "group sizes and the group of each sequence: greedy mix, local search, PuLP model on HiGHS, with its own bound",
        ("pulp", "solvers"),
        Budget(gap=0.01),
    ),
    Entry(
        "greedy",
        "hypergraph",
        f"{_HERE}.hypergraph.solver:solve",
        "DCP, section 4.2; moves after Fiduccia and Mattheyses 1982",
        "two constraints, nodes then ranks: greedy with affinity, repair of both balances, improving moves",
        heuristic=True,
        limits=(),
    ),
    Entry(
        "mtkahypar",
        "hypergraph",
        f"{_HERE}.hypergraph.mtkahypar:solve",
        "DCP, section 4.2; Gottesbüren et al. 2022 (Mt-KaHyPar)",
        "tokens placed by our greedy and fixed, compute partitioned by Mt-KaHyPar in a child process, our repair",
        ("mtkahypar", "solvers"),
        heuristic=True,
        limits=(),
    ),
)

#: the built-in solvers, by kind and name
SOLVERS: Mapping[tuple[str, str], Entry] = MappingProxyType({(row.kind, row.name): row for row in _BUILT_IN})


def list_solvers() -> tuple[Entry, ...]:
    """All solvers, built-in ones first. Raises ConfigError for a plug-in that cannot be loaded."""
    plugin_entries = [_load(name) for name in plugins.discover(GROUP)]
    return (*SOLVERS.values(), *plugin_entries)


def find_solver(kind: str, name: str) -> Entry:
    """Finds a solver by kind and name. Raises UnknownNameError."""
    name = fields.name(f"solver of kind {kind}", name)
    if (kind, name) in SOLVERS:
        return SOLVERS[kind, name]
    if kind not in KINDS:
        raise UnknownNameError("solver kind", kind, "unknown kind", fields.suggestion(kind, KINDS))
    if f"{kind}.{name}" in plugins.discover(GROUP):
        return _load(f"{kind}.{name}")
    names = [entry.name for entry in list_solvers() if entry.kind == kind]
    raise UnknownNameError(
        f"solver of kind {kind}", name, "no solver of that name", fields.suggestion(name, names)
    )


def _load(name: str) -> Entry:
    point = plugins.discover(GROUP)[name]
    entry: Entry = plugins.load(point, Entry)
    if name != f"{entry.kind}.{entry.name}" or (entry.kind, entry.name) in SOLVERS:
        rule = f"{plugins.distribution(point)} adds {entry.kind} solver {entry.name} under this name"
        raise ConfigError(
            f"entry point {GROUP}:{name}",
            entry.name,
            rule,
            "write kind.name, with a name that no built-in has",
        )
    return entry
