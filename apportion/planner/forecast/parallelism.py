"""Parallel layout of ranks: tensor × context × data × pipeline, innermost first.

    GPUs    0 1 2 3 4 5 6 7 │ 8 9 ...
            └tp┘└tp┘                     the heads and the FFN of a layer
            └── context ──┘              a sequence: over one group or, with one plan, all ranks of a stage
            └─── data ─────────┘         batches
    stage   └──── pipeline ────┘         layers

Without `context`, one plan distributes all sequences of a microbatch over all data × context ranks, as this planner
does. With `context` it is a static grid: groups of that many ranks with separate sequences, synchronized once per step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice, flag, instance, integer, keep
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.recurrent import Recurrent
from apportion.planner.forecast.experts import NO_EXPERTS, ExpertRanks, Experts

#: ways to assign sequences to the groups of a static grid
PACKINGS: tuple[Literal["order", "balanced"], ...] = ("order", "balanced")


@dataclass(frozen=True)
class Degrees:
    """tensor: ranks that split heads and FFN; pipeline: stages; virtual: chunks of layers of a stage (interleaved
    1F1B). microbatches: per step; with several stages multiplied by their number, so that a rank holds the same number
    of tokens at a time. expert: ranks over which the experts of a layer are spread. Raises ConfigError.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    microbatches: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            keep(self, f"parallelism.{field.name}", integer)
        if self.virtual > 1 and self.pipeline == 1:
            rule = "requires several pipeline stages"
            raise ConfigError("parallelism.virtual", self.virtual, rule, "write 1, or more stages")


@dataclass(frozen=True)
class Parallelism:
    """recipe: for the attention plans. context: ranks per group of a static grid, None for one plan over all ranks.
    packing: for static grids, assignment of sequences to groups: in data order, cut when a group is full, or longest
    first to the group with the least work. ping_pong: True if each microbatch is planned as two halves whose layers
    alternate: messages of one overlap the other's attention, products, row work and tensor-parallel traffic. Raises
    ConfigError.
    """

    recipe: Recipe
    degrees: Degrees = Degrees()
    context: int | None = None
    packing: Literal["order", "balanced"] | None = None
    ping_pong: bool = False

    def __post_init__(self) -> None:
        instance("parallelism.recipe", self.recipe, Recipe)
        instance("parallelism.degrees", self.degrees, Degrees)
        keep(self, "parallelism.ping_pong", flag)
        if self.context is None:
            if self.packing is not None:
                raise ConfigError(
                    "parallelism.packing", self.packing, "requires a static grid", "drop it, or set context"
                )
        else:
            keep(self, "parallelism.context", integer)
            choice("parallelism.packing", self.packing or "none", PACKINGS)

    @property
    def tensor(self) -> int:
        return self.degrees.tensor

    @property
    def pipeline(self) -> int:
        return self.degrees.pipeline

    @property
    def expert(self) -> int:
        return self.degrees.expert

    @property
    def virtual(self) -> int:
        return self.degrees.virtual

    def ranks(self, cluster: Cluster) -> int:
        """Data × context ranks of a stage. Raises ConfigError if the degrees do not divide the cluster."""
        per_stage = self.tensor * self.pipeline
        if cluster.ranks % per_stage:
            rule = f"must divide the {cluster.ranks} ranks"
            raise ConfigError("parallelism.tensor x parallelism.pipeline", per_stage, rule, "use divisors")
        return cluster.ranks // per_stage

    def stage(self, cluster: Cluster) -> Cluster:
        """The data × context ranks of a stage for the planner: one per tensor-parallel group, whose ranks are in one
        node and each move their own heads. Ranks that share a NIC get equal parts of it, also across groups and stages.
        Raises ConfigError."""
        ranks = self.ranks(cluster)
        _check_divides("parallelism.tensor", self.tensor, cluster.ranks_per_node, "the ranks of a node")
        on_node = cluster.ranks_per_node // self.tensor
        per_node = min(on_node, ranks)
        if ranks % per_node:
            rule = f"leaves stages of {ranks * self.tensor} ranks, which must span whole nodes or fit in one"
            raise ConfigError("parallelism.pipeline", self.pipeline, rule, "use another degree")
        on_nic = min(self.tensor, max(1, cluster.ranks_per_node // cluster.nics_per_node))  # a group's ranks
        nics = max(1, cluster.nics_per_node * on_nic * per_node // cluster.ranks_per_node)
        share = min(1.0, cluster.nics_per_node / cluster.ranks_per_node) / min(1.0, nics / per_node)
        return replace(
            cluster,
            nodes=ranks // per_node,
            ranks_per_node=per_node,
            nics_per_node=nics,
            inter_gbs=cluster.inter_gbs * share,
            speeds=self._speeds(cluster),
        )

    def group(self, cluster: Cluster) -> Cluster:
        """The ranks of one group of `stage`. Raises ConfigError."""
        stage = self.stage(cluster)
        if self.context is None:
            return stage
        _check_divides(
            "parallelism.context", self.context, stage.ranks, "the data x context ranks of a stage"
        )
        if stage.speeds is not None:
            rule = "static grids do not support speeds"
            raise ConfigError(
                "cluster.speeds", stage.speeds[:4], rule, "leave them out, or plan over all ranks"
            )
        per_node = min(stage.ranks_per_node, self.context)
        if self.context % per_node:
            rule = f"must span whole nodes of {per_node} ranks, or fit in one"
            raise ConfigError("parallelism.context", self.context, rule, "use another degree")
        share = max(1, stage.nics_per_node * per_node // stage.ranks_per_node)
        return replace(stage, nodes=self.context // per_node, ranks_per_node=per_node, nics_per_node=share)

    def groups(self, cluster: Cluster) -> int:
        """Number of groups of a stage; 1 for a plan over all ranks. Raises ConfigError."""
        return self.stage(cluster).ranks // self.group(cluster).ranks

    def steps(self) -> int:
        """Microbatches per stage in a step."""
        return self.degrees.microbatches * self.pipeline

    def rank_model(self, model: Model) -> Model:
        """The model of one tensor-parallel rank; if there are fewer KV heads than ranks, they are replicated. Raises
        ConfigError."""
        if self.tensor == 1:
            return model
        for field, count in (("q_heads", model.q_heads), ("ffn", model.ffn)):
            _check_divides("parallelism.tensor", self.tensor, count, f"model.{field}")
        if max(model.kv_heads, self.tensor) % min(model.kv_heads, self.tensor):
            rule = f"must divide model.kv_heads ({model.kv_heads}), or be a multiple of it"
            raise ConfigError("parallelism.tensor", self.tensor, rule, "use another degree")
        return replace(
            model,
            q_heads=model.q_heads // self.tensor,
            kv_heads=max(1, model.kv_heads // self.tensor),
            ffn=model.ffn // self.tensor,
            recurrent={name: self._rank_kind(name, kind) for name, kind in model.recurrent.items()},
        )

    def _rank_kind(self, name: str, kind: Recurrent) -> Recurrent:
        _check_divides("parallelism.tensor", self.tensor, kind.heads, f"heads of model.recurrent.{name}")
        heads, qk_heads = kind.heads // self.tensor, max(1, kind.qk_heads // self.tensor)
        if heads % qk_heads:
            rule = (
                f"must divide key_heads of model.recurrent.{name} ({kind.key_heads}), or be a multiple of it"
            )
            raise ConfigError("parallelism.tensor", self.tensor, rule, "use another degree")
        return replace(kind, heads=heads, key_heads=qk_heads)

    def stage_layers(self, layers: int) -> float:
        """Layers of each stage. Raises ConfigError if they do not divide evenly."""
        _check_divides(
            "parallelism.pipeline x parallelism.virtual", self.pipeline * self.virtual, layers, "the layers"
        )
        return layers / self.pipeline

    def check(self, cluster: Cluster, model: Model, layers: int, experts: Experts = NO_EXPERTS) -> None:
        """Raises ConfigError for degrees that do not divide evenly, and for ping-pong halves with experts or recurrent
        layers."""
        self.group(cluster)
        self.rank_model(model)
        self.stage_layers(layers)
        if experts.count:
            self._check_experts(cluster, experts, layers)
        if self.ping_pong and model.recurrent:
            rule = "forecasts do not support ping-pong with recurrent layers"
            raise ConfigError("parallelism.ping_pong", True, rule, "leave it out")
        if self.expert > 1 and not experts.count:
            rule, remedy = "requires a model with experts", "write 1, or set training.experts"
            raise ConfigError("parallelism.expert", self.expert, rule, remedy)

    def _check_experts(self, cluster: Cluster, experts: Experts, layers: int) -> None:
        experts.share(layers)
        _check_divides("parallelism.expert", self.expert, experts.count, "the experts of a layer")
        ranks = self.ranks(cluster) * self.tensor
        if max(self.expert, self.tensor) % min(self.expert, self.tensor):
            rule = f"must divide the tensor-parallel degree ({self.tensor}), or be a multiple of it"
            raise ConfigError("parallelism.expert", self.expert, rule, "use another degree")
        ExpertRanks(cluster, self.expert, ranks)
        expert_ranks, group = self.expert // self.tensor, self.group(cluster).ranks
        if expert_ranks > 1 and max(expert_ranks, group) % min(expert_ranks, group):
            rule = f"must divide the {group * self.tensor} ranks of a group, or be a multiple of them"
            raise ConfigError("parallelism.expert", self.expert, rule, "use another degree")
        if experts.shared % self.tensor:
            _check_divides("parallelism.tensor", self.tensor, experts.shared, "training.experts.shared")
        if cluster.speeds is not None:
            rule = "forecasts with experts require ranks of equal speed"
            raise ConfigError("cluster.speeds", cluster.speeds[:4], rule, "leave them out")
        if self.ping_pong:
            rule = "forecasts do not support ping-pong with experts"
            raise ConfigError("parallelism.ping_pong", True, rule, "leave it out")

    def canonical_form(self, cluster: Cluster) -> Parallelism:
        """The canonical parallelism with the same plans: degrees that do not affect attention are 1, and a grid of one
        group is a plan over all ranks."""
        degrees = replace(self.degrees, virtual=1, expert=1)
        if self.context is None or self.context * self.tensor * self.pipeline < cluster.ranks:
            return replace(self, degrees=degrees)
        return replace(self, degrees=degrees, context=None, packing=None)

    def to_data(self) -> dict[str, Any]:
        """Plain data; microbatches per stage."""
        return {
            "recipe": self.recipe.name,
            "context": self.context,
            "packing": self.packing,
            "ping_pong": self.ping_pong,
            **asdict(self.degrees),
            "microbatches": self.steps(),
        }

    def __str__(self) -> str:
        name = self.recipe.name
        named = {"TP": self.tensor, "PP": self.pipeline, "EP": self.expert}
        degrees = [f"{letters} {degree}" for letters, degree in named.items() if degree > 1]
        if self.virtual > 1:
            degrees.append(f"{self.virtual} chunks")
        if self.context is not None:
            degrees.insert(0, f"CP {self.context}, {self.packing}")
        if self.ping_pong:
            degrees.append("ping-pong")
        return name + "".join(f", {degree}" for degree in degrees)

    def _speeds(self, cluster: Cluster) -> tuple[float, ...] | None:
        if cluster.speeds is None:
            return None
        if self.tensor * self.pipeline > 1:
            rule = "speeds are per rank, not per tensor-parallel group and stage"
            raise ConfigError(
                "cluster.speeds", cluster.speeds[:4], rule, "leave them out, or use TP 1 and PP 1"
            )
        return cluster.speeds


def _check_divides(field: str, degree: int, total: int, label: str) -> None:
    if total % degree or total < degree:
        raise ConfigError(field, degree, f"must divide {label} ({total})", "use a divisor")
