"""Training configuration apart from attention: inputs of forecasts that plans do not depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from apportion.ir.errors import ConfigError
from apportion.ir.fields import instance, mapping
from apportion.ir.request.hf_config import vocabulary_fields
from apportion.ir.request.hf_experts import layer_fields
from apportion.planner import options
from apportion.planner.forecast.experts import NO_EXPERTS, Experts
from apportion.planner.options import Bytes, Count, Natural

ShardedState = Literal["optimizer", "gradients", "weights"]


@dataclass(frozen=True)
class Training:
    """vocab: size of the vocabulary. tied: True if head and embedding share a matrix.

    sharding: which of optimizer state, gradients and weights are sharded over ranks: none (`ddp`), the first (`zero1`),
    the first two (`zero2`), all three (`fsdp`). gradients: dtype in which they are stored and summed, float32 or the
    model's. optimizer_bytes: state per parameter; None: Adam's, with a float32 copy of narrower weights. recompute:
    what backward recomputes: nothing, all but attention's outputs (`selective`), or whole layers (`full`). loss_tokens:
    tokens whose logits exist at once, for tiled or fused losses. mlp_tile: tokens per tile of the FFN, None: all.
    Forward saves nothing of a tile, so backward repeats its forward (ALST's tiled MLP). offload: True if saved
    activations are in host memory (ALST); copies overlap the work of a layer. chunks: number of sequence chunks per
    layer, with inactive data on the host (FPDT); for one long causal sequence under `ulysses` or `upipe`, with full
    recomputation and offloading. overlap: True if traffic of weights and gradients overlaps the layers' work; False as
    in Megatron-LM without its overlap options. ffns: number of layers with an FFN or experts, None: all. gated: True if
    FFNs have a gate: three matrices, else two. experts: of layers with experts. kv_rank, q_rank: ranks of MLA's
    low-rank projections, 0: none; rope_dim: width of the part of K that all heads share. Raises ConfigError.
    """

    vocab: Count = 128256
    tied: bool = False
    sharding: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    gradients: Literal["fp32", "model"] = "fp32"
    optimizer_bytes: Bytes | None = None
    recompute: Literal["none", "selective", "full"] = "selective"
    loss_tokens: Count = 4096
    mlp_tile: Count | None = None
    offload: bool = False
    chunks: Count = 1
    overlap: bool = True
    ffns: Count | None = None
    gated: bool = True
    experts: Experts = NO_EXPERTS
    q_rank: Natural = 0
    kv_rank: Natural = 0
    rope_dim: Natural = 0

    def __post_init__(self) -> None:
        instance("training.experts", self.experts, Experts, "use Training.from_data for a mapping")
        options.keep(self, "training")
        if self.chunks > 1 and not (self.offload and self.recompute == "full"):
            rule = "chunks are kept on the host and recomputed"
            remedy = "write offload: true, recompute: full"
            raise ConfigError("training.chunks", self.chunks, rule, remedy)

        if self.experts.count and self.tiles_mlp:
            rule = "FFNs in tiles or chunks are not supported in forecasts with experts"
            raise ConfigError("training.experts.count", self.experts.count, rule, "drop mlp_tile and chunks")

    @property
    def matrices(self) -> int:
        """Number of matrices of an FFN."""
        return 2 + self.gated

    def ffn_share(self, layers: int) -> float:
        """Fraction of the layers with an FFN or experts. Raises ConfigError."""
        ffns = layers if self.ffns is None else self.ffns
        if ffns > layers:
            rule = f"must be at most the number of layers, {layers}"
            raise ConfigError("training.ffns", ffns, rule, "count layers with an FFN")
        return ffns / layers

    def sparse_share(self, layers: int) -> float:
        """Fraction of the layers with experts. Raises ConfigError."""
        return self.experts.share(layers if self.ffns is None else self.ffns) * self.ffn_share(layers)

    @property
    def tiles_mlp(self) -> bool:
        """True if backward repeats the FFN's forward, tile by tile or, like DeepSpeed's FPDT, in chunks."""
        return self.mlp_tile is not None or self.chunks > 1

    @staticmethod
    def from_data(data: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Training:
        """Builds a training from plain data, all fields optional. config: data of a Hugging Face `config.json`, the
        default for `vocab`, `tied`, experts and MLA's ranks. Raises ConfigError, also for unsupported experts."""
        if config is not None:
            config_fields = vocabulary_fields(mapping("config", config), data) | layer_fields(config)
            data = mapping("training", data)
            expert_fields = mapping("training.experts", data.get("experts", {}))
            data = {**config_fields, **data, "experts": {**config_fields["experts"], **expert_fields}}
        return options.read(Training, "training", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return asdict(self)

    def shards(self, state: ShardedState) -> bool:
        """True if each rank holds only a share of this state."""
        level = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[self.sharding]
        return level > ("optimizer", "gradients", "weights").index(state)
