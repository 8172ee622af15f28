"""What the passes work on: the request, its masks as bands, and the weight of each attention kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from apportion._core import sums as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import CapacityError
from apportion.ir.fields import instance
from apportion.ir.masks.bands import area, joined
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
    """A request with what several passes derive from it.

    rates: what tokens are shared by, one number > 0 a rank; None: the cluster's speeds. Where ranks are groups, whose
    speed is that of their slowest member, it is the sum over their members. caps: the largest number of tokens on each
    rank, where an explicit cap leaves them different ones.
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
        if self.batch.tokens > MOST_TOKENS:
            raise CapacityError(
                f"a microbatch of {self.batch.tokens} tokens: at most {MOST_TOKENS} are planned at a time; use several"
            )

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @cached_property
    def speeds(self) -> Floats:
        """float64 [ranks]: relative speed."""
        return np.asarray(self.cluster.speeds or np.ones(self.ranks), np.float64)

    @cached_property
    def token_rates(self) -> Floats:
        """float64 [ranks]: what tokens are shared by, the largest 1: alike ranks have 1.0 exactly."""
        rates = self.speeds if self.rates is None else np.asarray(self.rates, np.float64)
        found: Floats = rates / rates.max()
        return found

    @cached_property
    def token_shares(self) -> Floats:
        """float64 [ranks]: the batch's tokens by `token_rates`; the mean where ranks are alike."""
        shares: Floats = self.batch.tokens * self.token_rates / self.token_rates.sum()
        return shares

    @cached_property
    def token_caps(self) -> Ints:
        """int64 [ranks]: the largest number of tokens on each rank. Default: 1.02 times its share, rounded down so that
        the imbalance is at most 2 %, but no less than the share rounded up. Raises CapacityError."""
        tokens, ranks, given = self.batch.tokens, self.ranks, self.policy.token_cap
        if self.caps is not None:
            return np.asarray(self.caps, np.int64)
        if given is None:
            most = np.floor(_CAP_PERCENT * tokens * self.token_rates / (100 * self.token_rates.sum()))
            caps: Ints = np.maximum(most, np.ceil(self.token_shares)).astype(np.int64)
            return caps
        if given * ranks < tokens:
            raise CapacityError(
                f"the batch has {tokens} tokens but {ranks} ranks hold at most {given} each ({given * ranks} in all): "
                f"raise token_cap to at least {-(-tokens // ranks)} or use more ranks"
            )
        return np.full(ranks, min(given, MOST_TOKENS), np.int64)

    @cached_property
    def member_shares(self) -> Ints:
        """int64 [ranks] > 0: in what proportion the ranks of a group that splits heads share its tokens: their default
        caps, rounded up, or alike under an explicit cap."""
        return np.ones(self.ranks, np.int64) if self.policy.token_cap is not None else self.member_room

    @cached_property
    def member_room(self) -> Ints:
        """int64 [ranks] > 0: their default caps, rounded up, under an explicit one."""
        most = np.maximum(np.ceil(_CAP_PERCENT * self.token_shares / 100), 1).astype(np.int64)
        return most if self.policy.token_cap is None else np.minimum(most, self.policy.token_cap)

    @cached_property
    def token_cap(self) -> int:
        """The largest of the ranks' caps: what holds for every rank. Raises CapacityError."""
        return int(self.token_caps.max())

    @cached_property
    def cost(self) -> CostModel:
        """What attention, links and linear layers take on the request's hardware (default: the built-in H100)."""
        return CostModel(self.hardware or Hardware.load("h100"), self.model)

    @cached_property
    def bands(self) -> dict[str, Ints]:
        """kind -> int64 [bands, 6] in global tokens."""
        return {kind: self.batch.bands(kind) for kind in self.batch.kinds}

    @cached_property
    def joined_bands(self) -> dict[str, Ints]:
        """The same with those as one that one task can compute: what predicted times are of."""
        return {kind: joined(self.batch.bands(kind)) for kind in self.batch.kinds}

    @cached_property
    def reach(self) -> dict[str, float]:
        """kind -> keys that queries see over the tokens of a rank, each query as often as it has pairs: how far keys
        have to travel."""
        tokens, found = self.batch.tokens / self.ranks, {}
        for kind, bands in self.bands.items():
            pairs = area(bands).astype(np.float64)
            keys = pairs / np.maximum(bands[:, 1] - bands[:, 0], 1)
            found[kind] = float((pairs * keys).sum() / max(pairs.sum(), 1.0)) / tokens
        return found

    @cached_property
    def picked(self) -> dict[str, Profile]:
        """kind -> what its rows count where they choose keys at run time (`Model.balance`)."""
        found = dict[str, Profile]()
        for kind, held in self.model.balance.items():
            if kind in self.bands:
                found[kind] = profile({kind: self.bands[kind]}, {kind: 1}).capped(held["keys"])
        return found

    @cached_property
    def layers(self) -> dict[str, int]:
        """kind -> number of layers that use it."""
        return {kind: self.model.layers_of(kind) for kind in self.batch.kinds}

    @property
    def layer_count(self) -> int:
        """Layers of all kinds, recurrent ones too."""
        return sum(self.layers.values()) + sum(kind.layers for kind in self.model.recurrent.values())


@dataclass(frozen=True)
class Departure:
    """What a pass did instead of what its recipe asks for. field: the parameter, as errors name it; asked, used: its
    values, plain data; why: in words."""

    field: str
    asked: Any
    used: Any
    why: str


class Pass(Protocol):
    """What the passes of all steps say of themselves: frozen dataclasses, whose fields are parameters. A subclass of
    its step's contract has the defaults; `registry` checks whatever is a pass."""


@dataclass(frozen=True)
class Shards:
    """Blocks: block b is the tokens [starts[b], starts[b + 1]). A piece is what placement cannot split.

    starts: int64 [blocks + 1]; piece: int64 [blocks], numbered from 0; weight: int64 [blocks], allowed pairs of the
    block's queries, summed over kinds times layers. limit: why blocks are not as small as an even placement takes.
    solved: the placement of pieces by `weight` that a solver found while blocks were chosen.
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
        """int64 [pieces]"""
        return self.per_piece(self.weight)

    def per_piece(self, values: Ints) -> Ints:
        """Sums of an int64 [blocks] column over the blocks of each piece."""
        return exact_sums(self.piece, values, self.pieces)


@dataclass(frozen=True)
class Execution:
    """Who computes each cell in one phase of one attention kind.

    rank: int32 [head groups, cells]; division: int32 [head groups, cells], the part of the phase in which it is
    computed, counted from 0, or None where tiles say when.
    """

    rank: Ints
    division: Ints | None = None


@dataclass(frozen=True)
class Placement:
    """home: int64 [blocks], the rank of each block of `starts` (which may cut the shards further).

    bound: a lower bound of the busiest rank's load over its speed, in the units of `weight`.
    groups: None, or int64 [groups + 1], the first rank of each group of consecutive ranks, and the end: then `home`
    counts groups, whose ranks share its tokens and split the heads (Ulysses).
    termination: why the solver stopped that chose the homes, in its own units; None: a heuristic ran to its end.
    execution: (kind, phase) -> who computes the cells that `cut_cells` makes of the kind's bands and `starts`; None:
    every rank computes what its queries see. head_groups: contiguous shares of the query heads in it. departures: from
    what was asked for.
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
        """int64 [ranks]: sums of a per-block column over the blocks of each rank."""
        return exact_sums(self.home, values, ranks)


class ShardPass(Pass, Protocol):
    """Cuts sequences into blocks."""

    @abstractmethod
    def __call__(self, problem: Problem) -> Shards: ...


class PlacePass(Pass, Protocol):
    """Gives blocks to ranks. own_cap: it has no token cap of its own: what the fullest rank comes to is promised."""

    own_cap: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, problem: Problem, shards: Shards) -> Placement: ...


def exact_sums(index: Ints, values: Ints, size: int) -> Ints:
    """int64 [size]: sums of int32 or int64 `values` by `index`, exact where float64 would round."""
    return core.exact_sums(np.ascontiguousarray(index), np.ascontiguousarray(values), size)
