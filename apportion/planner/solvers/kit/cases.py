"""The problems of the conformance kit by kind. Nothing here or in the files of a kind is shared with a solver."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from apportion.planner.solvers.kit.colouring import ColouringCases
from apportion.planner.solvers.kit.contract import Cases
from apportion.planner.solvers.kit.grouping import GroupingCases
from apportion.planner.solvers.kit.hypergraph import HypergraphCases
from apportion.planner.solvers.kit.partition import PartitionCases
from apportion.planner.solvers.kit.transport import TransportCases

CASES: Mapping[str, Cases] = MappingProxyType(
    {
        "partition": PartitionCases(),
        "colouring": ColouringCases(),
        "transport": TransportCases(),
        "grouping": GroupingCases(),
        "hypergraph": HypergraphCases(),
    }
)
