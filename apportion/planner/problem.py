"""Input of the passes: the request, its masks as bands, and the weight of each attention kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import CapacityError
from apportion.ir.fields import instance
from apportion.ir.masks.bands import area, merge_adjacent
from apportion.ir.masks.profile import Profile, profile
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.cost import CostModel
from apportion.planner.solvers.contracts import Partition
from apportion.planner.solvers.status import Limit, Termination
from apportion.planner.solvers.use import PartitionSolver

#: tokens are int32 in the columns of tasks
MOST_TOKENS = 2**31 - 1
# a rank's default cap, in percent of its share of the tokens
_CAP_PERCENT = 102


@dataclass(frozen=True)
class Problem:
    """A request with derived quantities shared by several passes.

    rates: proportions of token shares, one number > 0 per rank; None: the cluster's speeds. A group's rate is the sum
    over its members, its speed that of its slowest member. caps: explicit token caps that differ by rank.
    """

    batch: Batch
    cluster: Cluster
    model: Model
    policy: Policy
    hardware: Hardware | None = None
    rates: tuple[float, ...] | None = None
    caps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, kind in (("batch", Batch), ("cluster", Cluster), ("model", Model), ("policy", Policy)):
            instance(name, getattr(self, name), kind)

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @cached_property
    def speeds(self) -> Floats:
        """float64 [ranks]: relative speed."""
        return np.asarray(self.cluster.speeds or np.ones(self.ranks), np.float64)

    @cached_property
    def token_rates(self) -> Floats:
        """float64 [ranks]: proportions of token shares, largest 1; exactly 1.0 for equal ranks."""
        rates = self.speeds if self.rates is None else np.asarray(self.rates, np.float64)
        result: Floats = rates / rates.max()
        return result

    @cached_property
    def token_shares(self) -> Floats:
        """float64 [ranks]: the batch's tokens in proportion to `token_rates`; the mean for equal ranks."""
        shares: Floats = self.batch.tokens * self.token_rates / self.token_rates.sum()
        return shares

    @cached_property
    def token_caps(self) -> Ints:
        """int64 [ranks]: maximum tokens of each rank. Default: 1.02 times its share, rounded down so that the imbalance
        is at most 2 %, but no less than the share rounded up. Raises CapacityError."""
        tokens, ranks, cap = self.batch.tokens, self.ranks, self.policy.token_cap
        if self.caps is not None:
            return np.asarray(self.caps, np.int64)
        if cap is None:
            limit = np.floor(_CAP_PERCENT * tokens * self.token_rates / (100 * self.token_rates.sum()))
            caps: Ints = np.maximum(limit, np.ceil(self.token_shares)).astype(np.int64)
            return caps
        if cap * ranks < tokens:
            raise CapacityError(
                f"the batch has {tokens} tokens but {ranks} ranks hold at most {cap} each ({cap * ranks} in total): "
                f"raise token_cap to at least {-(-tokens // ranks)} or use more ranks"
            )
        return np.full(ranks, min(cap, MOST_TOKENS), np.int64)

    @cached_property
    def member_shares(self) -> Ints:
        """int64 [ranks] > 0: proportions in which the ranks of a group that splits heads share its tokens: default
        caps, rounded up, or equal under an explicit cap."""
        return np.ones(self.ranks, np.int64) if self.policy.token_cap is not None else self.member_room

    @cached_property
    def member_room(self) -> Ints:
        """int64 [ranks] > 0: default caps, rounded up, but at most an explicit cap."""
        limit = np.maximum(np.ceil(_CAP_PERCENT * self.token_shares / 100), 1).astype(np.int64)
        return limit if self.policy.token_cap is None else np.minimum(limit, self.policy.token_cap)

    @cached_property
    def token_cap(self) -> int:
        """The largest cap of any rank. Raises CapacityError."""
        return int(self.token_caps.max())

    @cached_property
    def cost(self) -> CostModel:
        """The cost model of the request's hardware (default: the built-in H100)."""
        return CostModel(self.hardware or Hardware.load("h100"), self.model)

    @cached_property
    def bands(self) -> dict[str, Ints]:
        """kind -> int64 [bands, 6] in global tokens."""
        return {kind: self.batch.bands(kind) for kind in self.batch.kinds}

    @cached_property
    def joined_bands(self) -> dict[str, Ints]:
        """kind -> bands, merged where one task can compute them together, for predicted times."""
        return {kind: merge_adjacent(self.batch.bands(kind)) for kind in self.batch.kinds}

    @cached_property
    def reach(self) -> dict[str, float]:
        """kind -> mean keys per query, weighted by pairs, divided by the mean tokens per rank."""
        tokens, result = self.batch.tokens / self.ranks, {}
        for kind, bands in self.bands.items():
            pairs = area(bands).astype(np.float64)
            keys = pairs / np.maximum(bands[:, 1] - bands[:, 0], 1)
            result[kind] = float((pairs * keys).sum() / max(pairs.sum(), 1.0)) / tokens
        return result

    @cached_property
    def chosen_keys(self) -> dict[str, Profile]:
        """kind -> number of keys chosen by its query rows, for kinds that choose keys at run time (`Model.balance`)."""
        profiles = dict[str, Profile]()
        for kind, parameters in self.model.balance.items():
            if kind in self.bands:
                profiles[kind] = profile({kind: self.bands[kind]}, {kind: 1}).capped(parameters["keys"])
        return profiles

    @cached_property
    def layers(self) -> dict[str, int]:
        """kind -> number of layers that use it."""
        return {kind: self.model.layers_of(kind) for kind in self.batch.kinds}

    @property
    def layer_count(self) -> int:
        """Number of layers of all kinds, including recurrent ones."""
        return sum(self.layers.values()) + sum(kind.layers for kind in self.model.recurrent.values())


@dataclass(frozen=True)
class Departure:
    """A pass's departure from its recipe. field: the parameter, as named in errors; asked, used: its values, plain
    data; why: in words."""

    field: str
    asked: Any
    used: Any
    why: str


class Pass(Protocol):
    """Contract of all passes: frozen dataclasses whose fields are parameters. Subclasses of a step's contract inherit
    its defaults; `registry` validates passes."""


@dataclass(frozen=True)
class Shards:
    """Blocks of tokens: block b has tokens [starts[b], starts[b + 1]). A piece is a set of blocks that placement keeps
    together.

    starts: int64 [blocks + 1]; piece: int64 [blocks], numbered from 0; weight: int64 [blocks], allowed pairs of the
    block's queries, summed over kinds, each times its layers. limit: the reason why blocks are not small enough for an
    even placement. solved: a solver and its placement of the pieces by `weight`, if the choice of blocks computed one.
    """

    starts: Ints
    piece: Ints
    weight: Ints
    block_tokens: int
    limit: Limit | None = None
    solved: tuple[PartitionSolver, Partition] | None = None

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @cached_property
    def pieces(self) -> int:
        return int(self.piece.max()) + 1 if len(self.piece) else 0

    @cached_property
    def piece_weights(self) -> Ints:
        """int64 [pieces]: weight of each piece."""
        return self.per_piece(self.weight)

    def per_piece(self, values: Ints) -> Ints:
        """Sums an int64 [blocks] column over the blocks of each piece."""
        return exact_sums(self.piece, values, self.pieces)


@dataclass(frozen=True)
class Execution:
    """The rank of each cell in one phase of one attention kind.

    rank: int32 [head groups, cells]; division: int32 [head groups, cells], the part of the phase in which it runs, from
    0; None: the rounds of its tiles decide when it runs.
    """

    rank: Ints
    division: Ints | None = None


@dataclass(frozen=True)
class Placement:
    """Homes of blocks. home: int64 [blocks], the rank of each block of `starts` (which may cut the shards further).

    bound: a lower bound on the busiest rank's load over its speed, in the units of `weight`. groups: None, or int64
    [groups + 1], the first rank of each group of consecutive ranks, and the end: `home` then has group numbers, and a
    group's ranks share its tokens and split the heads (Ulysses). termination: how the solver of the homes ended, in its
    own units; None: a heuristic ran to its end. execution: (kind, phase) -> ranks of the cells that `cut_cells`
    makes from the kind's bands and `starts`; None: every rank computes its own queries. head_groups: number of
    contiguous shares of the query heads in `execution`. departures: deviations from the recipe's request.
    """

    starts: Ints
    home: Ints
    weight: Ints
    bound: float
    groups: Ints | None = None
    termination: Termination | None = None
    execution: Mapping[tuple[str, str], Execution] | None = None
    head_groups: int = 1
    departures: tuple[Departure, ...] = ()

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    def rank_sums(self, values: Ints, ranks: int) -> Ints:
        """int64 [ranks]: a per-block column summed over the blocks of each rank."""
        return exact_sums(self.home, values, ranks)


class ShardPass(Pass, Protocol):
    """Cuts sequences into blocks."""

    @abstractmethod
    def __call__(self, problem: Problem) -> Shards: ...


class PlacePass(Pass, Protocol):
    """Assigns blocks to ranks. is_uncapped: True if it has no token cap, so that the resulting maximum is reported as
    the cap."""

    is_uncapped: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, problem: Problem, shards: Shards) -> Placement: ...


def exact_sums(index: Ints, values: Ints, size: int) -> Ints:
    """int64 [size]: exact sums of int32 or int64 `values` by `index`, without float64 rounding."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index.astype(np.int64, copy=False), values.astype(np.int64, copy=False))
    return sums
