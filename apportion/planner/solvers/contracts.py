"""The five kinds of solvers: problems and results as arrays.

    kind        problem              result        built in
    partition   PartitionProblem     Partition     lpt, lpt_near, swap, ilp
    colouring   ColouringProblem     Colouring     matching, flow
    transport   TransportProblem     Transport     flow
    grouping    GroupingProblem      Grouping      ilp
    hypergraph  HypergraphProblem    VertexRanks   greedy, mtkahypar

A solver is a function (problem, budget) -> result. It is deterministic, its value does not depend on the order of the
items, it reports why it stopped, and it respects the budget: `apportion.testing` checks that. A problem without a
solution ends INFEASIBLE; inconsistent arrays raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import ConfigError
from apportion.planner.solvers.status import Budget, Termination


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """K items to pack into bins, minimizing the heaviest bin (weight over speed).

    weights, sizes: int64 [K], >= 0; caps: int64 [bins], the largest sum of sizes in each bin; speeds: float64 [bins],
    default 1. allowed: each item's allowed bins (None: any bin), or None: any bin for all. families: int64 [K], equal
    for items that should be near each other; zones: int64 [bins], equal for nearby bins. Solvers may ignore both.
    """

    weights: Ints
    sizes: Ints
    caps: Ints
    speeds: Floats | None = None
    allowed: Sequence[tuple[int, ...] | None] | None = None
    families: Ints | None = None
    zones: Ints | None = None

    def __post_init__(self) -> None:
        check_same_length("weights", self.weights, "sizes", self.sizes)
        if self.families is not None:
            check_same_length("weights", self.weights, "families", self.families)
        if self.zones is not None:
            check_same_length("caps", self.caps, "zones", self.zones)
        if np.ndim(self.caps) != 1 or not len(self.caps):
            raise ConfigError("caps", self.caps, "must have one cap per bin", "write np.full(bins, cap)")
        if self.speeds is not None:
            check_same_length("speeds", self.speeds, "caps", self.caps)
        if self.allowed is not None:
            check_same_length("allowed", self.allowed, "weights", self.weights)
        if any(bins is not None and not len(bins) for bins in self.allowed or ()):
            raise ConfigError("allowed", (), "allows no bin for an item", "give None where any bin will do")

    @property
    def bins(self) -> int:
        return len(self.caps)

    @property
    def rates(self) -> Floats:
        """float64 [bins]: the speeds."""
        return np.ones(self.bins) if self.speeds is None else np.ascontiguousarray(self.speeds, np.float64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Items in bins. bin: int64 [K], -1 if no bin has room. The value is the heaviest bin's weight over its speed.

    If there is no answer (NO_SOLUTION, INFEASIBLE), only items that fit have bins.
    """

    bin: Ints
    termination: Termination


@dataclass(frozen=True, eq=False)
class ColouringProblem:
    """Edges src -> dst, integers [E] in [0, ranks), to split into as few matchings as possible."""

    src: Ints
    dst: Ints
    ranks: int

    def __post_init__(self) -> None:
        check_same_length("src", self.src, "dst", self.dst)
        check_positive("ranks", self.ranks)


@dataclass(frozen=True, eq=False)
class Colouring:
    """Colours of edges. colour: integers [E]; edges of one colour share no sender and no receiver. The value is the
    number of colours."""

    colour: Ints
    termination: Termination


@dataclass(frozen=True)
class TwoLevelCost:
    """Costs of moving a row: `intra` within a node of `ranks_per_node` consecutive ranks, `inter`, at least as much,
    between nodes."""

    ranks_per_node: int
    intra: float
    inter: float

    def __post_init__(self) -> None:
        check_positive("cost.ranks_per_node", self.ranks_per_node)
        if not 0 <= self.intra <= self.inter < np.inf:
            rule = "must be costs with 0 <= intra <= inter"
            raise ConfigError("cost", (self.intra, self.inter), rule, "swap them")


@dataclass(frozen=True, eq=False)
class TransportProblem:
    """Rows to move from ranks with a surplus to ranks with a deficit.

    surplus: int64 [ranks], adds up to 0; positive to send, negative to receive. objective: "sum" of all costs;
    "minmax": largest cost of a rank, for its sends or its receives; "senders": for its sends only.
    """

    surplus: Ints
    cost: TwoLevelCost
    objective: Literal["sum", "minmax", "senders"] = "sum"

    def __post_init__(self) -> None:
        if int(self.surplus.sum()):
            raise ConfigError(
                "surplus", int(self.surplus.sum()), "must add up to 0", "send exactly as much as is received"
            )
        if self.objective not in ("sum", "minmax", "senders"):
            raise ConfigError("objective", self.objective, "must be sum, minmax or senders", "write minmax")

    def prices(self, src: Ints, dst: Ints) -> Floats:
        """float64 [flows]: cost of one row of each flow."""
        same_node = src // self.cost.ranks_per_node == dst // self.cost.ranks_per_node
        return np.where(same_node, self.cost.intra, self.cost.inter)


@dataclass(frozen=True, eq=False)
class Transport:
    """Rows to move: `rows` rows go from rank `src` to rank `dst`: int64 [flows], rows > 0, each pair once, sorted by
    src and dst."""

    src: Ints
    dst: Ints
    rows: Ints
    termination: Termination


@dataclass(frozen=True, eq=False)
class GroupingProblem:
    """FlexSP's problem: groups of ranks, and a group for each of K sequences, minimizing the slowest group's time.

    times: float64 [K, D], the time of each sequence in a group of each degree, infinity if forbidden; sizes: int64 [K]
    tokens; degrees: int64 [D] ranks of a group, ascending; ranks: limit for all groups together; cap: tokens per rank,
    so a group of P ranks holds at most P * cap.
    """

    times: Floats
    sizes: Ints
    degrees: Ints
    ranks: int
    cap: int

    def __post_init__(self) -> None:
        check_same_length("times", self.times, "sizes", self.sizes)
        check_positive("ranks", self.ranks)
        if self.times.ndim != 2 or self.times.shape[1] != len(self.degrees) or not len(self.degrees):
            raise ConfigError(
                "times", self.times.shape, "must have a column per degree", "write one time for each"
            )
        if self.degrees[0] < 1 or (np.diff(self.degrees) <= 0).any():
            raise ConfigError(
                "degrees", self.degrees.tolist(), "must be ascending, from 1 or more", "sort them"
            )
        if np.isnan(self.times).any() or (self.times < 0).any():
            raise ConfigError("times", float(self.times.min()), "must not be negative", "use inf to forbid")


@dataclass(frozen=True, eq=False)
class Grouping:
    """Sequences in groups.

    degree: int64 [groups], descending; group: int64 [K], -1 if there is no answer; time: float64 [groups]. The
    value is the largest time.
    """

    degree: Ints
    group: Ints
    time: Floats
    termination: Termination


@dataclass(frozen=True, eq=False)
class HypergraphProblem:
    """Vertices with two weights to assign to nodes * ranks_per_node ranks, so that hyperedges span few ranks.

    flops, tokens: int64 [V] >= 0, the two weights. ptr: int64 [E + 1], pins: int64: hyperedge e has the vertices
    pins[ptr[e] : ptr[e + 1]]; price: int64 [E] >= 0. The value is the sum of price times (ranks spanned - 1).
    flops_slack, tokens_slack: eps of (nodes, ranks). A node has at most (1 + eps[0]) times its share of a weight, a
    rank (1 + eps[0]) (1 + eps[1]) times, both rounded down, but no less than the share rounded up. Shares of flops
    follow `speeds`, those of tokens `room`: float64 [ranks], default 1. fixed: int64 [V], the required rank of a
    vertex, -1: any.
    """

    flops: Ints
    tokens: Ints
    ptr: Ints
    pins: Ints
    price: Ints
    nodes: int
    ranks_per_node: int
    flops_slack: tuple[float, float]
    tokens_slack: tuple[float, float]
    fixed: Ints | None = None
    speeds: Floats | None = None
    room: Floats | None = None

    def __post_init__(self) -> None:
        check_same_length("tokens", self.tokens, "flops", self.flops)
        check_same_length("price", self.price, "ptr[1:]", self.ptr[1:])
        check_positive("nodes", self.nodes)
        check_positive("ranks_per_node", self.ranks_per_node)
        if self.fixed is not None:
            check_same_length("fixed", self.fixed, "flops", self.flops)
        for name, shares in (("speeds", self.speeds), ("room", self.room)):
            if shares is not None and len(shares) != self.ranks:
                raise ConfigError(name, len(shares), f"must be {self.ranks}, one per rank", "leave it out")
        if min(*self.flops_slack, *self.tokens_slack) < 0:
            slack = (*self.flops_slack, *self.tokens_slack)
            raise ConfigError("slack", slack, "must not be negative", "use 0.05")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def required(self) -> Ints:
        """int64 [V]: the required rank of each vertex, -1: any."""
        return np.full(len(self.flops), -1, np.int64) if self.fixed is None else self.fixed

    @property
    def flops_shares(self) -> Floats:
        """float64 [ranks]: proportions of the ranks' flops."""
        return np.ones(self.ranks) if self.speeds is None else np.asarray(self.speeds, np.float64)

    @property
    def tokens_shares(self) -> Floats:
        """float64 [ranks]: proportions of the ranks' tokens."""
        return np.ones(self.ranks) if self.room is None else np.asarray(self.room, np.float64)

    @cached_property
    def flops_caps(self) -> tuple[Ints, Ints]:
        """int64 [nodes], int64 [ranks]: limits on flops."""
        return caps_of(int(self.flops.sum()), self.flops_slack, self.flops_shares, self.nodes)

    @cached_property
    def tokens_caps(self) -> tuple[Ints, Ints]:
        """int64 [nodes], int64 [ranks]: limits on tokens."""
        return caps_of(int(self.tokens.sum()), self.tokens_slack, self.tokens_shares, self.nodes)


def caps_of(total: int, slack: tuple[float, float], shares: Floats, nodes: int) -> tuple[Ints, Ints]:
    """int64 [nodes], int64 [ranks]: limits on each share of `total`; shares: float64 [ranks], see HypergraphProblem."""
    mean = total * shares / shares.sum()
    factor = (1 + slack[0]) * (1 + slack[1])
    ranks = np.maximum(np.floor(mean * factor + _ROUNDING), np.ceil(mean - _ROUNDING)).astype(np.int64)
    node_share = mean.reshape(nodes, -1).sum(1)
    node_caps = np.maximum(np.floor(node_share * (1 + slack[0]) + _ROUNDING), np.ceil(node_share - _ROUNDING))
    return np.minimum(node_caps.astype(np.int64), ranks.reshape(nodes, -1).sum(1)), ranks


@dataclass(frozen=True, eq=False)
class VertexRanks:
    """Ranks of vertices. rank: int64 [V], -1 if there is no answer. node_value: the sum of price times (nodes spanned -
    1).

    flops_imbalance, tokens_imbalance: the fullest rank's sum over its share, less 1. The value is in `termination`.
    """

    rank: Ints
    node_value: float
    flops_imbalance: float
    tokens_imbalance: float
    termination: Termination


# tolerated rounding error of float products
_ROUNDING = 1e-6

P = TypeVar("P", contravariant=True)
R = TypeVar("R", covariant=True)


class Solver(Protocol[P, R]):
    """Signature of a solver, as loaded by an Entry; passes call it through `use`."""

    def __call__(self, problem: P, budget: Budget) -> R: ...


#: kind -> (problem, result)
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "partition": (PartitionProblem, Partition),
    "colouring": (ColouringProblem, Colouring),
    "transport": (TransportProblem, Transport),
    "grouping": (GroupingProblem, Grouping),
    "hypergraph": (HypergraphProblem, VertexRanks),
}


def check_same_length(name: str, column: Sized, other_name: str, other_column: Sized) -> None:
    """Raises ConfigError if two columns differ in length."""
    if len(column) != len(other_column):
        rule = f"must have as many entries as {other_name} ({len(other_column)})"
        raise ConfigError(name, len(column), rule, "give one entry per item")


def check_positive(name: str, value: int) -> None:
    """Raises ConfigError for a count below 1."""
    if value < 1:
        raise ConfigError(name, value, "must be at least 1", "use 1 or more")
