"""How a model is trained, besides its attention: what a forecast must know and a planner need not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from apportion.ir.errors import ConfigError
from apportion.ir.fields import instance, mapping
from apportion.ir.request.hf_config import head_fields
from apportion.ir.request.hf_experts import layer_fields
from apportion.planner import options
from apportion.planner.forecast.experts import NO_EXPERTS, Experts
from apportion.planner.options import Bytes, Count, Natural

Held = Literal["optimizer", "gradients", "weights"]


@dataclass(frozen=True)
class Training:
    """vocab: tokens that the head tells apart. tied: whether head and embedding are one matrix.

    sharding: who holds what of the optimizer's state, the gradients and the weights: every rank all of it (`ddp`), or
    a share of the first (`zero1`), of the first two (`zero2`), of all three (`fsdp`).
    gradients: the dtype in which they are kept and summed, float32 or the model's. optimizer_bytes: of state a
    parameter; none: Adam's, with a float32 copy of weights that are narrower.
    recompute: what backward makes anew: nothing, all but attention's outputs (`selective`), or all of a layer (`full`).
    loss_tokens: of how many tokens the logits are there at once; losses that are tiled or fused keep no more.
    mlp_tile: of how many tokens the FFN is computed at a time, none: of all. Forward keeps nothing of a tile, so
    backward runs its forward once more (ALST's tiled MLP).
    offload: whether what layers keep for backward is in host memory (ALST); copies run beside the work of a layer.
    chunks: parts of the sequence that a layer is computed in, with all that is not at work on the host (FPDT); of one
    long causal sequence under `ulysses` or `upipe`, with full recomputation and offloading.
    overlap: whether traffic of weights and gradients runs beside work of the layers, or while nothing else does, as in
    Megatron-LM where its overlapping is not switched on.
    experts: of the layers that have some. kv_rank, q_rank: of MLA's projections of low rank, 0: none; rope_dim: of its
    heads' numbers those that K shares among heads.
    Raises ConfigError.
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
    experts: Experts = NO_EXPERTS
    q_rank: Natural = 0
    kv_rank: Natural = 0
    rope_dim: Natural = 0

    def __post_init__(self) -> None:
        instance("training.experts", self.experts, Experts, "use Training.from_data for a mapping")
        options.keep(self, "training")
        if self.chunks > 1 and not (self.offload and self.recompute == "full"):
            rule, remedy = "chunks live on the host and are made anew", "write offload: true, recompute: full"
            raise ConfigError("training.chunks", self.chunks, rule, remedy)

        if self.experts.count and self.tiles_mlp:
            rule = "FFNs in tiles or chunks are not priced with experts"
            raise ConfigError("training.experts.count", self.experts.count, rule, "drop mlp_tile and chunks")

    @property
    def tiles_mlp(self) -> bool:
        """Whether backward runs the FFN's forward once more, tile by tile or, as FPDT does in DeepSpeed, in chunks."""
        return self.mlp_tile is not None or self.chunks > 1

    @staticmethod
    def from_data(data: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Training:
        """The training of plain data, all fields optional. config: the data of a Hugging Face `config.json`, which says
        `vocab`, `tied`, experts and MLA's ranks where `data` do not. Raises ConfigError, also where experts are
        of a type that is not priced."""
        if config is not None:
            found = head_fields(mapping("config", config), data) | layer_fields(config)
            data = mapping("training", data)
            named = mapping("training.experts", data.get("experts", {}))
            data = {**found, **data, "experts": {**found["experts"], **named}}
        return options.read(Training, "training", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return asdict(self)

    def shards(self, what: Held) -> bool:
        """Whether each rank holds only a share of it."""
        held = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[self.sharding]
        return held > ("optimizer", "gradients", "weights").index(what)
