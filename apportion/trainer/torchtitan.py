"""TorchTitan 0.3 adapter: its trainer with planned attention and planned data.

    def llama3_planned():                              # in your config registry
        return planned(llama3_8b(), dataset="my.documents", tokens_per_rank=8192)

Context parallelism stays 1: the data-parallel ranks are the ranks of the job. Titan divides losses by the valid tokens
of all ranks and sums gradients itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.ir.fields import read_text
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner.iteration.ticks import TickTable, tick_table
from apportion.trainer.loading.arguments import own_masks
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.shared import (
    communicator_of,
    count_planned,
    digest_of,
    endless,
    join_halves,
    kinds_of,
    require,
    require_equal,
    require_known,
    run_halves,
)
from apportion.trainer.step import wiring
from apportion.trainer.step.attention import PlanHandle, planned_attention
from apportion.trainer.step.microbatch import require_calls
from apportion.trainer.step.pingpong import PingPongLayer
from apportion.trainer.ticks import TickPipeline

try:
    import tyro
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config.override import OverrideConfig, derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
    from torchtitan.protocols.module import Module
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    raise MissingDependencyError("torchtitan", "torchtitan", "apportion.trainer.torchtitan") from error

_PASSED_ON = ("source", "tokens_per_rank", "microbatches", "recipe", "seed", "timeout_s", "workers")
_LOGGED_METRICS = ("tokens_per_s", "waited_s", "fallbacks")
_OVERRIDES = [f"{__name__}.planned_flex", f"{__name__}.planned_varlen"]
FULL, WINDOW = "basic_mask", "sliding_window_mask"  # Titan's names of attention kinds
_UNSPLIT = "train it without ping_pong and ticks"


class PlannedMasks(dict[str, tuple[PlanHandle, str]]):
    """kind -> (handle, kind), passed to Titan's models as masks, with the `to` that its validator calls. handles: of
    two halves; ticks: the iteration's ticks."""

    handles: tuple[PlanHandle, ...] = ()
    ticks: tuple[PlannedBatch, ...] = ()

    @property
    def handle(self) -> PlanHandle:
        return next(iter(self.values()))[0]

    def to(self, *_: Any) -> PlannedMasks:
        return self


class PlannedAttention(Module):
    """Planned attention. window: tokens that a row of this layer sees, -1 for all; causal: later ones are hidden."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int | None = None
        causal: bool | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mask: dict[str, Any] = {"window": config.window, "causal": config.causal}

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, **kw: Any
    ) -> Any:
        """Runs attention: [1, rows, heads, D] -> [1, rows, heads, Dv]."""
        transform, _ = kw.pop("out_transform", None), kw.pop("enable_gqa", None)
        handle, kind = self.mask_of(attention_masks) if isinstance(attention_masks, dict) else attention_masks
        lse = transform is not None
        result = planned_attention(q_BLNH, k_BLNH, v_BLNH, handle, kind, return_lse=lse, **self.mask, **kw)
        return result if transform is None else transform(*result)

    def mask_of(self, masks: dict[str, tuple[PlanHandle, str]]) -> tuple[PlanHandle, str]:
        """This layer's mask, unless the model has selected one already."""
        name = WINDOW if (self.mask["window"] or -1) > 0 else FULL
        return masks.get(name) or next(iter(masks.values()))


def require_dense(block: Any) -> None:
    """Raises ConfigError for a block that cannot be split at its attention, as ping_pong and ticks require."""
    require_known("torchtitan", type(block), "forward", remedy=_UNSPLIT)
    if type(block.attention) is not GQAttention or not hasattr(block, "feed_forward"):
        rule = (
            "has no dense feed-forward network after grouped-query attention, which halves and ticks require"
        )
        raise ConfigError("layer", type(block).__name__, rule, _UNSPLIT)


def split(block: Any, masks: PlannedMasks) -> PingPongLayer:
    """Splits a dense block, [rows, E], at its attention."""
    attention = block.attention

    def pre(hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = attention.qkv_linear(block.attention_norm(hidden[None]))
        if attention.q_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = attention.rope(q, k, positions[None])
        return q[0], k[0], v[0]

    def post(hidden: Tensor, out: Tensor) -> Tensor:
        x = hidden[None] + attention.wo(out[None].flatten(2))
        rows: Tensor = (x + block.feed_forward(block.ffn_norm(x)))[0]
        return rows

    handle, kind = attention.inner_attention.mask_of(masks)
    handle.check(kind, **attention.inner_attention.mask)
    return PingPongLayer(pre, post, block.parameters(), kind, attention.scaling)


def take_turns(block: Any) -> None:
    """Makes a dense block run two halves in ping-pong when it gets two."""
    original, settings = block.forward, block.attention.inner_attention.mask

    def forward(x: Tensor, attention_masks: PlannedMasks, positions: Any = None) -> Any:
        if not attention_masks.handles:
            return original(x, attention_masks, positions)
        return run_halves(split(block, attention_masks), x[0], attention_masks.handles, settings)[None]

    block.forward = forward


@override(target=FlexAttention.Config, description="context parallelism by Apportion's plans")
def planned_flex(config: FlexAttention.Config) -> Any:
    is_own = config._owner is not FlexAttention  # a LoRA converter derives configs, but not their owners
    return config if is_own else derive(config, PlannedAttention.Config)


@override(target=VarlenAttention.Config, description="context parallelism by Apportion's plans")
def planned_varlen(config: VarlenAttention.Config) -> Any:
    left, right = config.window_size
    mask = {"window": -1 if left < 0 else left + 1, "causal": right == 0}
    is_own = config._owner is not VarlenAttention
    return config if is_own else derive(config, PlannedAttention.Config, **mask)


class PlannedSelectiveAC(SelectiveAC):
    """Saves the results of planned attention, so that recomputing a block does not communicate."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), torch.ops.apportion.attend.default}


def job_of(config: Trainer.Config) -> dict[str, Any]:
    """Job arguments. model: heads of one tensor-parallel rank, dtype and kinds; masks: per kind, or None (causal);
    masked_by: the model's class if it may have other masks. Raises ConfigError for attention other than grouped-query
    attention, and for multi-token prediction."""
    model, tp = config.model_spec.model, config.parallelism.tensor_parallel_degree
    attention = model.first_attention
    if not hasattr(attention, "n_kv_heads"):
        actual = None if attention is None else type(attention).__module__
        rule = "must be grouped-query attention, the only kind that this adapter plans"
        raise ConfigError("attention", actual, rule, "train another model")
    if depths := len(getattr(model, "mtp_layers", ())):
        rule, remedy = "a rank's next rows are not the next tokens", "leave them out"
        raise ConfigError("mtp_layers", depths, rule, remedy)
    heads, kv_heads = attention.n_heads, attention.n_kv_heads or attention.n_heads
    windows = [getattr(layer.attention, "sliding_window_size", None) or 0 for layer in model.layers]
    layers, masks = kinds_of(windows, FULL, WINDOW)
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[config.training.mixed_precision_param]
    head_dim = attention.head_dim or model.dim // heads
    shape = Model(heads // tp, kv_heads // tp, head_dim, dtype=dtype, hidden=model.dim, layers=layers)
    return {"model": shape, "masks": masks, "masked_by": type(model)._owner if masks is None else None}


# ---- Titan's data and trainer


class PlannedDataLoader(BaseDataLoader):
    """A planned loader. dataset: "module.function", called with Titan's tokenizer and dataset_path to get samples."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        source: str = "local"
        token_file: str | None = None  # of a service
        cluster: str | None = None  # a file
        tokens_per_rank: int | None = None
        microbatches: int = 1
        recipe: str | None = None
        seed: int = 0
        infinite: bool = True  # endless passes, with only whole iterations of each
        rows_multiple: int = 8  # of a rank's rows: ChunkedLossWrapper splits them into 8 chunks
        timeout_s: float = 300.0
        workers: int = 0
        ping_pong: bool = False  # runs two microbatches at a time, whose layers take turns
        ticks: int = (
            0  # chunks per stage, whose attention all stages compute together; 0: Titan's own schedules
        )
        _placement: Annotated[Any, tyro.conf.Suppress] = None  # see PlannedTrainer

    def __init__(
        self, config: Config, *, tokenizer: Any, dp_world_size: int, seq_len: int, **titan: Any
    ) -> None:
        require("training.local_batch_size", titan["local_batch_size"], 1, "documents are concatenated")
        placement = {"tp": 1, "stages": 1, **(config._placement or {})}
        stages = placement.pop("stages")
        try:
            make = resolve_name(config.dataset)
        except (AttributeError, ValueError) as error:
            rule = f"must name a function ({error})"
            raise ConfigError("dataset", config.dataset, rule, 'write "module.function"') from error
        data = make(tokenizer, config.dataset_path)
        if (longest := max(data.lengths)) > seq_len:
            rule = f"limits the model's positions, and a document has {longest} tokens"
            raise ConfigError("sequence length", seq_len, rule, "raise it, or cut the document")
        options = {name: getattr(config, name) for name in _PASSED_ON}
        options["rows_multiple"] = config.rows_multiple * placement.pop("tp")
        options["token"] = None if config.token_file is None else read_text(Path(config.token_file)).strip()
        masked_by = placement.pop("masked_by", None)
        if own_masks(data) is not None:
            placement.pop("masks", None)
        elif masked_by is not None:
            remedy = "give the dataset masks, or the layers sliding_window_size"
            require_known("torchtitan", masked_by, "get_attention_masks", remedy=remedy)
        self.table: TickTable | None = None
        self.infinite, self.pairs = config.infinite, config.ping_pong and config.infinite
        if config.ticks:
            require("ping_pong", config.ping_pong, False, "stages take turns already")
            options["ticks"] = self.table = tick_table(stages, options.pop("microbatches"), config.ticks)
        ranks = dp_world_size * (stages if config.ticks else 1)
        cluster = Cluster.load(config.cluster) if config.cluster else Cluster(1, ranks)
        self.loader = PlannedLoader(data, cluster, drop_last=self.infinite, **options, **placement)
        wiring.watch.trusted.add(self.loader)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        passes: Any = PlannedLoader.iterations if self.table else PlannedLoader.pairs if self.pairs else iter
        for item in endless(self.loader, passes) if self.infinite else passes(self.loader):
            batches = item if isinstance(item, tuple) else (item,)
            for b in batches:
                b.check_unweighted("Titan's loss")
            handles = tuple(b.handle for b in batches) if self.pairs else ()
            ticks = batches if self.table else ()
            for rows in [join_halves(batches)] if self.table is None else self._microbatches(batches):
                masks = PlannedMasks({kind: (rows.handle, kind) for kind in rows.handle.kinds})
                masks.handles, masks.ticks = handles, ticks
                inputs = {"input": rows.tokens[None], "positions": rows.position_ids[None]}
                yield {**inputs, "attention_masks": masks}, rows.labels[None]

    def _microbatches(self, ticks: tuple[PlannedBatch, ...]) -> list[PlannedBatch]:
        """The microbatches of this rank's stage, each once."""
        table, ranks = cast("TickTable", self.table), ticks[0].handle.communicator
        stage = ranks.rank * table.stages // ranks.ranks
        by_number = dict(zip(table.microbatch[:, stage].tolist(), ticks, strict=True))
        return [by_number[number] for number in range(table.microbatches)]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.loader.load_state_dict(state)


class PlannedTrainer(Trainer):
    """Titan's trainer; passes the model and this rank's position to the parts above before anything is built."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        job, pairs, table = self.dataloader.loader.job, self.dataloader.pairs, self.dataloader.table
        count = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches * (1 + pairs)
        expected = job.microbatches if table is None else table.microbatches
        require("microbatches of global_batch_size", count, expected, "a step is an iteration")
        remedy = 'build the layers with attn_backend="flex" or "varlen"'
        self.planned_layers = count_planned(self.model_parts, "inner_attention", PlannedAttention, remedy)
        if pairs or table:
            self._check_splits(config, table)
        if pairs:
            for block in self._blocks():
                take_turns(block)

    def _blocks(self) -> list[Any]:
        """The attention blocks of this stage."""
        modules = (module for part in self.model_parts for module in part.modules())
        return [module for module in modules if "attention" in module._modules]

    def _check_splits(self, config: Config, table: TickTable | None) -> None:
        """Raises ConfigError if halves, or ticks of a table, cannot split layers at attention."""
        selective = isinstance(config.activation_checkpoint, SelectiveAC.Config)
        require("selective activation_checkpoint", selective, False, "it cannot save split attention")
        require("compile.enable", config.compile.enable, False, "layers run in their own autograd function")
        require("tensor_parallel_degree", self.parallel_dims.tp, 1, "its ranks would split the rows")
        for block in self._blocks():
            require_dense(block)
        if table is None:
            return
        checkpointing = config.activation_checkpoint
        require("activation_checkpoint", checkpointing, None, "ticks keep the layers' activations")
        require("validator.enable", config.validator.enable, False, "ticks exist only in training")
        layers, stages = len(config.model_spec.model.layers), table.stages * table.virtual
        for part in self.model_parts:
            require_known("torchtitan", type(part), "forward", remedy="train it without ticks")
        layer_counts = [len(part.layers) for part in self.model_parts]
        rule = "chunks must have equal layer counts"
        if layers % stages:
            raise ConfigError("layers", layers, rule, f"use a multiple of {stages}, or fewer stages")
        require("layers of this stage's chunks", layer_counts, [layers // stages] * table.virtual, rule)

    def init_distributed(self) -> Any:
        config, dims = self.config, super().init_distributed()
        require("parallelism.context_parallel_degree", dims.cp, 1, "data-parallel ranks are the job's ranks")
        config.override = OverrideConfig(imports=[*config.override.imports, *_OVERRIDES])
        if type(config.activation_checkpoint) is SelectiveAC.Config:
            config.activation_checkpoint = derive(config.activation_checkpoint, PlannedSelectiveAC.Config)
        ranks = torch.arange(dims.world_size).view(dims.pp, -1, dims.tp)
        groups = ranks.transpose(1, 2).flatten(0, 1)  # ranks with equal pipeline and tensor positions
        if getattr(config.dataloader, "ticks", 0):
            groups = ranks.permute(2, 0, 1).flatten(1)  # of all stages
        communicator = communicator_of(groups.tolist())
        placement = {**job_of(config), "communicator": communicator, "tp": dims.tp, "stages": dims.pp}
        config.validator = replace(config.validator)
        for owner in (config, config.validator):
            if isinstance(owner.dataloader, PlannedDataLoader.Config):
                owner.dataloader = replace(owner.dataloader, _placement=placement)
        return dims

    def forward_backward_step(self, *, input_dict: Any, **kwargs: Any) -> Tensor:
        batches = input_dict if isinstance(input_dict, list) else [input_dict]
        if batches[0]["attention_masks"].ticks:
            return self._run_ticks(batches[0]["attention_masks"], **kwargs)
        handles = [entry["attention_masks"].handle for entry in batches]
        inputs, labels = (entry["input"] for entry in batches), kwargs["labels"]
        targets = labels if isinstance(labels, list) else [labels]
        self._check_batches(handles, [*zip(inputs, targets, strict=True)])
        call_counts = [handle.calls for handle in handles]
        loss: Tensor = super().forward_backward_step(input_dict=input_dict, **kwargs)
        for handle, calls in zip(handles, call_counts, strict=True):
            remedy = "the model must pass attention_masks to every layer"
            require_calls(handle, calls, self.planned_layers, remedy)
        return loss

    def _check_batches(self, handles: Sequence[PlanHandle], columns: Sequence[Sequence[Tensor]]) -> None:
        """Raises ExecutionError if tensor-parallel ranks or pipeline stages have read different microbatches. columns:
        each microbatch's tensors to compare. A collective."""
        digest = 0
        for handle, of_rows in zip(handles, columns, strict=True):
            digest = digest_of(handle, of_rows, digest)
        meshes = (self.parallel_dims.get_optional_mesh(name) for name in ("pp", "tp"))
        require_equal([digest], [mesh.get_group() for mesh in meshes if mesh is not None], self.device)

    def _run_ticks(
        self, masks: PlannedMasks, labels: Sequence[Tensor], global_valid_tokens: Tensor
    ) -> Tensor:
        """Runs an iteration instead of Titan's schedule; returns the loss on the last stage, as schedules do. Weights
        stay unsharded; gradients of microbatches are accumulated as in FSDP, and reduced at the end."""
        parts, ticks = self.model_parts, [item.to(self.device) for item in masks.ticks]
        self.ntokens_seen += sum(item.numel() for item in labels)
        for part in parts:
            part._get_fsdp_state()._lazy_init()
            _gather(part)
        chunks = [[split(block, masks) for block in part.layers.values()] for part in parts]
        first, last = parts[0], parts[-1]

        def embed(batch: PlannedBatch) -> Tensor:
            hidden: Tensor = first.tok_embeddings.forward(batch.tokens[None])[0]
            return hidden

        def loss(hidden: Tensor, batch: PlannedBatch) -> Tensor:
            hidden = last.norm.forward(hidden[None])
            logits = hidden if last._skip_lm_head else last.lm_head.forward(hidden)
            total: Tensor = self.loss_fn(logits, batch.labels[None], global_valid_tokens)[0]
            _gather(last)  # a chunked loss has resharded the head
            return total

        def finish(chunk: int) -> None:
            _finish_backward(parts[chunk], last=False)

        row = (self.config.model_spec.model.dim,)
        with self.train_context():
            total = TickPipeline(self.dataloader.table, chunks, row, embed, loss, done=finish).step(ticks)
        for part in parts:
            _finish_backward(part, last=True)
        return total.float() if last.norm is not None else torch.tensor([-1.0], device=self.device)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            planning_metrics = self.dataloader.loader.metrics()
            self.metrics_processor.logger.log(
                {f"planning/{name}": planning_metrics[name] for name in _LOGGED_METRICS}, self.step
            )


def _gather(part: Any) -> None:
    """Unshards the weights of all modules."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _finish_backward(part: Any, last: bool) -> None:
    """Does FSDP's work at the end of a backward: accumulates gradients in its reduction dtype, and after the last one
    reduces them over ranks."""
    part.set_is_last_backward(last)
    part.set_reshard_after_backward(last)
    part.set_requires_gradient_sync(last)
    part._get_fsdp_state()._root_post_backward_final_callback()


def planned(config: Trainer.Config, validation: str | None = None, **data: Any) -> Any:
    """A `PlannedTrainer.Config`. data: fields of `PlannedDataLoader.Config`; validation: the validator's dataset."""
    loader: Any = PlannedDataLoader.Config(**data)
    microbatches = loader.microbatches if loader.ticks else 1
    training = replace(config.training, local_batch_size=microbatches)
    training.disable_cuda_graphs = True  # the number of rows varies by microbatch
    changes = {"dataloader": loader, "training": training}
    if loader.ticks:
        even = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
        changes["parallelism"] = replace(config.parallelism, **even)
    if validation is not None:
        held_out = replace(loader, dataset=validation)
        changes["validator"] = replace(config.validator, enable=True, dataloader=held_out)
    return derive(config, PlannedTrainer.Config, **changes)
