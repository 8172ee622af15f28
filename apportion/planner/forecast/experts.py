"""Mixture-of-experts layers and low-rank attention projections (MLA): memory, compute and communication.

    tokens of a rank ──router──► active rows each ──all-to-all──► experts' ranks ──all-to-all──► sums of rows
                                                   dispatch        FFN of `width`   combine

Whole experts are spread over `expert` consecutive ranks of a stage, including tensor-parallel ones (Megatron's folding,
expert-tensor degree 1); ranks with the same experts replicate or shard them, like other weights on data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.request.cluster import Cluster
from apportion.planner import options
from apportion.planner.options import Natural, Positive


@dataclass(frozen=True)
class Experts:
    """count: routed experts of a layer, 0: none. active: experts per token. width: FFN size of one expert. shared:
    total FFN size of the shared experts. dense: number of layers with one FFN of the model's size instead of experts.

    imbalance: rows of the fullest rank of an expert-parallel group over the group's mean, an assumption, as the router
    is unknown; scenarios scale the part above 1 by 0 to 2. capacity: rows to which every expert is padded, over an even
    share of the fullest rank's rows; None: dropless. dispatch: what a token sends between nodes: one row per expert, or
    one per node, forwarded inside it and summed there on return (DeepEP). nodes: maximum number of nodes with experts
    of one token, 0: any. Raises ConfigError.
    """

    count: Natural = 0
    active: Natural = 0
    width: Natural = 0
    shared: Natural = 0
    dense: Natural = 0
    imbalance: Annotated[float, Meta(ge=1, le=1e6)] = 1.2
    capacity: Positive | None = None
    dispatch: Literal["expert", "node"] = "expert"
    nodes: Natural = 0

    def __post_init__(self) -> None:
        options.keep(self, "training.experts")
        if not self.count:
            for field in ("active", "width", "shared", "dense"):
                if getattr(self, field):
                    rule, remedy = "requires layers with experts, and there are none", "write count"
                    raise ConfigError(f"training.experts.{field}", getattr(self, field), rule, remedy)
        elif not 1 <= self.active <= self.count:
            rule = f"must be from 1 to count ({self.count})"
            raise ConfigError(
                "training.experts.active", self.active, rule, "write the number of experts per token"
            )
        elif not self.width:
            raise ConfigError(
                "training.experts.width", 0, "must be at least 1", "write the FFN size of an expert"
            )

    def share(self, layers: int) -> float:
        """The fraction of `layers` layers that have experts. Raises ConfigError."""
        if self.dense > layers:
            rule = f"must be at most the number of layers, {layers}"
            raise ConfigError("training.experts.dense", self.dense, rule, "count the layers without experts")
        return (layers - self.dense) / layers if self.count else 0.0

    def spread(self, degree: int, excess: float = 1.0) -> float:
        """Rows of an expert-parallel group's fullest rank over its mean; excess: a factor on the part above 1."""
        if self.capacity is not None:
            return self.capacity
        return 1.0 if degree == 1 else 1 + (self.imbalance - 1) * excess


NO_EXPERTS = Experts()


class ExpertRows(NamedTuple):
    """Rows of one layer with experts for one microbatch. sent: by the rank with the most tokens; received: by the
    fullest rank of an expert-parallel group; both padded if experts have a capacity; mean: per expert, without padding;
    uneven: tokens of the fullest rank over the largest mean of an expert-parallel group."""

    sent: float
    received: float
    mean: float
    uneven: float

    @staticmethod
    def of(experts: Experts, tokens: Ints, degree: int, tensor: int, spread: float) -> ExpertRows:
        """Computes the rows. tokens: int64 [ranks], per tensor-parallel group of a plan; degree: ranks of an
        expert-parallel group; spread: see `Experts`."""
        group_size = min(max(1, degree // tensor), len(tokens))
        means = tokens.reshape(-1, group_size).mean(1)
        maximum, mean = float(tokens.max()), float(means.max())
        shared = experts.active / tensor
        received = shared * spread * (mean if experts.capacity is None else maximum)
        sent = shared * maximum if experts.capacity is None else received
        return ExpertRows(sent, received, shared * mean * degree / experts.count, maximum / mean)


@dataclass(frozen=True)
class ExpertRanks:
    """Expert-parallel groups of a stage, each with all experts of a layer. cluster: all ranks, with their links;
    degree: ranks of a group; ranks: GPUs of a stage. Raises ConfigError."""

    cluster: Cluster
    degree: int
    ranks: int

    def __post_init__(self) -> None:
        on_node = min(self.ranks, self.cluster.ranks_per_node)
        if self.ranks % self.degree or (self.degree % on_node and on_node % self.degree):
            rule = f"must divide the {self.ranks} ranks of a stage, and span whole nodes of {on_node} or fit in one"
            raise ConfigError("parallelism.expert", self.degree, rule, "use another degree")

    @cached_property
    def replica_cluster(self) -> Cluster:
        """Ranks with the same experts: every `degree`-th rank."""
        on_node = max(1, min(self.ranks, self.cluster.ranks_per_node) // self.degree)
        nodes, gbs = self.ranks // self.degree // on_node, self.cluster.inter_gbs_per_rank
        shape = replace(self.cluster, nodes=nodes, ranks_per_node=on_node, speeds=None)
        return replace(shape, nics_per_node=on_node, inter_gbs=gbs)

    def dispatch_us(self, experts: Experts, rows: ExpertRows, row_bytes: float) -> float:
        """Time of one all-to-all, to the experts or back: the slower of the fullest rank's concurrent transfers to
        other nodes and within its own, plus a latency. All experts are equally likely."""
        if self.degree == 1:
            return 0.0
        on_node = min(self.degree, self.cluster.ranks_per_node)
        nodes, size = self.degree // on_node, max(rows.sent, rows.received) * row_bytes
        far = (nodes - 1) / nodes
        if experts.dispatch == "node":
            # expected number of nodes of a token's experts
            node_count = nodes * (1 - (1 - 1 / nodes) ** experts.active)
            far *= min(node_count, experts.nodes or node_count) / experts.active
        near = (on_node - 1) / on_node * (1.0 if experts.dispatch == "node" else 1 / nodes)
        slower = max(
            size * far / (self.cluster.inter_gbs_per_rank * 1e3), size * near / (self.cluster.intra_gbs * 1e3)
        )
        return slower + (self.cluster.inter_latency_us if nodes > 1 else self.cluster.intra_latency_us)
