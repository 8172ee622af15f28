"""Megatron-Core 0.16 adapter: planned attention in its layer spec, and a forward step for its schedules.

    model = GPTModel(config, planned_spec(get_gpt_layer_local_spec()), ...)
    loader = planned_loader(dataset, config, cluster=cluster, tokens_per_rank=8192)
    batches = endless(loader)  # one for all steps
    get_forward_backward_func()(forward_step_func=forward_step, data_iterator=batches, model=model, ...)

Context parallelism stays 1: the data-parallel ranks are the ranks of the job. `calculate_per_token_loss` must be set,
and `variable_seq_lengths` with pipeline stages. Kinds of attention are called "full" and "window".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack
from warnings import warn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softplus

from apportion.backends.torch.kernels.recurrent import normalised
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError, ExecutionError, MissingDependencyError
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.recurrent import Recurrent
from apportion.planner.iteration.ticks import TickTable
from apportion.trainer.loading.arguments import own_masks
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import LoaderOptions, PlannedLoader
from apportion.trainer.shared import (
    count_planned,
    digest_of,
    endless as endless,
    join_halves,
    kinds_of,
    require,
    require_equal,
    require_known,
    run_halves,
)
from apportion.trainer.step import wiring
from apportion.trainer.step.attention import PlanHandle, planned_attention
from apportion.trainer.step.microbatch import WEIGHTS, require_calls
from apportion.trainer.step.pingpong import PingPongLayer
from apportion.trainer.step.recurrence import planned_conv, planned_scan
from apportion.trainer.ticks import TickPipeline

try:
    from megatron.core import parallel_state
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_linear_attention_pattern,
    )
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.utils import is_layer_window_attention
    from megatron.core.utils import unwrap_model
except ModuleNotFoundError as error:
    raise MissingDependencyError("megatron-core", "megatron", "apportion.trainer.megatron") from error

GATED = "gated_delta_net"  # Megatron's name of the variant, and the recurrent kind
_FINALIZE = "config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads"
_LOCAL_LOSSES = ("aux_loss", "seq_aux_loss")
_ROTARY = "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"
_POSITIONS = ("rope", "learned_absolute", "none")


def planned_spec(spec: Any) -> Any:
    """The spec of a layer, or of a block of layers, with planned core attention, and planned Gated DeltaNets. Raises
    ConfigError for stacks of Mamba layers, and for core attention of other packages."""
    for layer in getattr(spec, "layer_specs", [spec]):
        attention = getattr(layer.submodules, "self_attention", None)
        if attention is None:
            rule = "has no self_attention; Mamba mixers are not supported by this adapter"
            remedy = "pass specs of GPTModel's layers, or train a hybrid of transformers"
            raise ConfigError("spec", getattr(layer.module, "__name__", layer.module), rule, remedy)
        if attention.module in (GatedDeltaNet, PlannedGatedDeltaNet):
            attention.module = PlannedGatedDeltaNet
            continue
        core = attention.submodules.core_attention
        core = getattr(core, "module", core)
        if not issubclass(core, PlannedCoreAttention):
            require_known("megatron", core, "forward", remedy="derive it from PlannedCoreAttention")
            attention.submodules.core_attention = PlannedCoreAttention
    return spec


def planned_loader(
    dataset: Any, config: Any, cluster: Cluster, tokens_per_rank: int, **options: Unpack[LoaderOptions]
) -> PlannedLoader:
    """`PlannedLoader` for a TransformerConfig; every tensor-parallel rank and pipeline stage makes one."""
    _check_config(config)
    hosts = parallel_state.get_data_parallel_group_gloo()
    communicator = Communicator(parallel_state.get_data_parallel_group(), hosts=hosts)
    rows = config.tensor_model_parallel_size if config.sequence_parallel else 1
    masks = kinds(config)[1] if own_masks(dataset) is None else None
    settings: LoaderOptions = {"masks": masks, "communicator": communicator, "rows_multiple": rows}
    settings = {**settings, "drop_last": True, **options}
    loader = PlannedLoader(dataset, cluster, model_of(config), tokens_per_rank, **settings)
    wiring.watch.trusted.add(loader)
    return loader


def forward_step(
    data_iterator: Iterator[PlannedBatch | tuple[PlannedBatch, PlannedBatch]], model: Any
) -> tuple[Tensor, Any]:
    """Runs the next batch, or the next two of `PlannedLoader.pairs`. Returns (loss of each row, or hidden states of a
    stage; a function from this to (sum, tokens, report)). Raises ConfigError if gradients are not divided by tokens,
    for layers without planned attention and unsupported features (yarn, mrope, MLA, multi-token prediction, routers
    that look at a rank's rows; some only in halves); ExecutionError if a layer did not use the plan."""
    module = unwrap_model(model)
    _check(module)
    scales = getattr(type(model), "scale_gradients", None)
    if module.training and scales is _BaseDataParallel.scale_gradients:
        rule = "does not divide gradients by the tokens of all ranks"
        raise ConfigError("model", type(model).__name__, rule, "wrap it in DistributedDataParallel")
    if _is_rotary(module) and not isinstance(module.rotary_pos_emb, PlannedRotary):
        module.rotary_pos_emb = PlannedRotary(module.rotary_pos_emb)
    item = next(data_iterator)
    device = next(model.parameters()).device
    host_batches = item if isinstance(item, tuple) else (item,)
    batches = [batch.to(device) for batch in host_batches]
    if len(batches) > 1:
        for layer in _splittable_layers(module):
            layer.forward = partial(paired_layer, layer, layer.forward)
    longest, limit = max(int(max(batch.batch.lengths)) for batch in batches), module.max_sequence_length
    if module.position_embedding_type == "learned_absolute" and longest > limit:
        rule = f"the model has positions for {limit} tokens"
        remedy = "leave out longer documents, or build it with more positions"
        raise ConfigError("sequence length", longest, rule, remedy)
    if module.training and torch.is_grad_enabled():
        _note(module, host_batches)
    rows = join_halves(batches)
    labels = rows.labels.clamp(min=0)  # Megatron's cross entropy does not support -100
    arguments = (rows.tokens[None], rows.position_ids[None], None)
    handles = tuple(batch.handle for batch in batches)
    params = PlannedSeqParams(batch=rows, positions=_positions(batches), handles=handles)
    calls = rows.handle.calls
    padding = _padding(rows, module)
    output = model(*arguments, labels=labels[None], packed_seq_params=params, padding_mask=padding)
    require_calls(rows.handle, calls, module.planned_layers, "each layer must call its core attention")
    return output, partial(loss_of, rows)


def tick_step(
    ticks: Sequence[PlannedBatch], models: Sequence[Any], table: TickTable, forward_only: bool = False
) -> list[dict[str, Tensor]]:
    """Runs an iteration of `planned_loader(..., ticks=table, communicator=...)`, with the ranks of all stages, instead
    of Megatron's schedule; returns reports of the microbatches on the last stage. models: this stage's chunks, in
    order. Raises the errors of `forward_step` and `TickPipeline`."""
    modules = [unwrap_model(model) for model in models]
    chunks, reports = [], list[dict[str, Tensor]]()
    tokens = torch.zeros((), dtype=torch.int, device=ticks[0].tokens.device)
    for module in modules:
        _check(module)
        rotary = getattr(module.rotary_pos_emb, "own", module.rotary_pos_emb) if _is_rotary(module) else None
        angles = None if rotary is None else rotary(_positions(ticks))
        chunks.append([split(layer, angles, ticks[0].handle) for layer in _splittable_layers(module)])
        for part, methods in ((module, ("forward", "_preprocess")), (module.decoder, ("forward",))):
            require_known("megatron", type(part), *methods, remedy="train it without ticks")
    first, last, config = modules[0], modules[-1], modules[0].config
    require("recompute_granularity", config.recompute_granularity, None, "ticks keep the layers' activations")

    def embed(batch: PlannedBatch) -> Tensor:
        hidden: Tensor = first.embedding(input_ids=batch.tokens[None], position_ids=batch.position_ids[None])
        return hidden

    def loss(hidden: Tensor, batch: PlannedBatch) -> Tensor:
        labels, none = batch.labels.clamp(min=0)[None], dict.fromkeys(_ROTARY)
        hidden = last.decoder.final_layernorm(hidden)
        total, count, report = loss_of(batch, last._postprocess(hidden, None, None, labels, **none))
        tokens.add_(count)
        reports.append(report)
        return total

    pipeline = TickPipeline(table, chunks, (1, config.hidden_size), embed, loss, config.params_dtype)
    pipeline.step(ticks, not forward_only)
    if not forward_only:
        config.finalize_model_grads_func([*models], tokens)
    return reports


def _is_rotary(module: Any) -> bool:
    return bool(module.position_embedding_type == "rope")


def _check_config(config: Any) -> None:
    require("context_parallel_size", config.context_parallel_size, 1, "data-parallel ranks are the job's")
    require("attention_dropout", config.attention_dropout, 0.0, "forward and backward would draw elsewhere")
    require("calculate_per_token_loss", config.calculate_per_token_loss, True, "ranks have unequal tokens")


def _check(module: Any) -> None:
    config, positions = module.config, module.position_embedding_type
    _check_config(config)
    experts = bool(config.num_moe_experts)
    types, weights = map(np.atleast_1d, (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff))
    local = [kind for kind, weight in zip(types, weights, strict=True) if weight and kind in _LOCAL_LOSSES]
    depends, omit = "it depends on the rows that a rank holds", "leave it out"
    divides, undivided = "Megatron divides gradients by the tokens of all ranks there", module.training
    undivided = undivided and config.finalize_model_grads_func is None
    looks_ahead = config.window_size is not None and config.window_size[1] != 0
    bias = "moe_router_enable_expert_bias"
    unmasked = "needs unmasked rows in Megatron, but other balancing needs masked rows"
    biased = experts and config.moe_router_enable_expert_bias and weights.any()
    balancing, capacity = "moe_router_load_balancing_type", experts and config.moe_expert_capacity_factor
    tp, unsummed = config.tensor_model_parallel_size, experts and config.expert_model_parallel_size == 1
    unsummed = unsummed and config.expert_tensor_parallel_size < tp
    apart, sharded = "Megatron would not sum experts' gradients over tensor-parallel ranks", f"set it to {tp}"
    for name, is_refused, rule, remedy in (
        ("finalize_model_grads_func", undivided, divides, _FINALIZE),
        ("position_embedding_type", positions not in _POSITIONS, f"must be one of {_POSITIONS}", "name one"),
        ("multi_latent_attention", config.multi_latent_attention, "this adapter does not support it", omit),
        ("window_size", looks_ahead, "its plans allow no later token", "write (tokens before, 0)"),
        ("mtp_num_layers", config.mtp_num_layers, "a rank's next rows are not the next tokens", omit),
        ("moe_expert_capacity_factor", capacity, depends, omit),
        (balancing, experts and "sinkhorn" in types, depends, "use another one"),
        (balancing, experts and local, depends, "use global_aux_loss, or a weight of 0"),
        (bias, biased, unmasked, "leave one of them out"),
        ("expert_tensor_parallel_size", unsummed, apart, sharded),
    ):
        if is_refused:
            raise ConfigError(name, getattr(config, name, positions), rule, remedy)
    if not hasattr(module, "planned_layers"):
        remedy = "build the model with planned_spec(spec), of a layer or a block of layers"
        arguments = "core_attention", PlannedCoreAttention, remedy, (PlannedGatedDeltaNet,)
        module.planned_layers = count_planned([module], *arguments)
        if experts and config.moe_z_loss_coeff and tp > 1:
            rule = f"Megatron's z loss of routers is {tp} times too small with tensor parallelism"
            warn(f"{rule} and calculate_per_token_loss: multiply moe_z_loss_coeff by {tp}", stacklevel=2)


def _padding(rows: PlannedBatch, module: Any) -> Tensor | None:
    """The padding mask for routers, [1, rows]; None without experts, and with an expert bias, whose count of tokens
    fails under Megatron's mask, so no row may be padded. Raises ConfigError."""
    config = module.config
    if not config.num_moe_experts:
        return None
    gathers = config.moe_token_dispatcher_type == "allgather" and config.expert_model_parallel_size > 1
    if gathers and not rows.handle.envelope.rows:
        rule, remedy = (
            "needs the same number of rows on all ranks",
            'use "alltoall", or pass the loader an envelope= of rows',
        )
        raise ConfigError("moe_token_dispatcher_type", "allgather", rule, remedy)
    padding = (rows.sample_ids < 0)[None]
    if config.moe_router_enable_expert_bias:
        if padding.any():
            rule, remedy = (
                "Megatron cannot exclude padding from its token counts",
                "pad no rows (rows_multiple=1)",
            )
            raise ConfigError("moe_router_enable_expert_bias", True, rule, remedy)
        return None
    if config.sequence_parallel and not module.pre_process:  # Megatron splits it on the first stage only
        size, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        padding = padding.chunk(size, 1)[rank]
    return padding


class CheckedSteps:
    """Megatron's `finalize_model_grads_func`, for the batches of a step. Raises before gradients are divided:
    ExecutionError if tensor-parallel ranks, stages, or a stage's chunks read different batches; ConfigError for samples
    with loss weights, which are scaled by their iteration's total weight, unless the step is one whole iteration."""

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self._finalize = finalize
        self._digests: dict[int, list[int]] = {}  # of each chunk: of its batches up to each one
        self._weighted: list[PlannedBatch] = []

    def note(self, chunk: int, batches: Sequence[PlannedBatch]) -> None:
        """Raises ExecutionError at once if a chunk of this stage reads other batches than the first one, since hidden
        states of other shapes would follow."""
        read, first = self._digests.setdefault(chunk, []), next(iter(self._digests.values()))
        for batch in batches:
            read.append(digest_of(batch.handle, (batch.tokens, batch.labels), *read[-1:]))
            if read != first[: len(read)]:
                remedy = "give each chunk an iterator over a loader of its own, with the same samples"
                raise ExecutionError(f"chunks of this stage have read different batches: {remedy}")
            self._weighted += [batch] if WEIGHTS in batch.fields else []

    def __call__(self, models: Any, *args: Any, **kwargs: Any) -> Any:
        digests, self._digests = self._digests, {}
        batches, self._weighted = self._weighted, []
        if digests:
            device = next(models[0].parameters()).device
            whole = (read[-1] for read in digests.values())
            require_equal(whole, [parallel_state.get_model_parallel_group()], device)
        is_whole = any(batch.microbatch == 0 for batch in batches) and any(batch.is_last for batch in batches)
        if batches and not (is_whole and len({batch.iteration for batch in batches}) == 1):
            rule = "must be one iteration of the loader, as loss_weights are scaled by the total of the iteration"
            remedy = "pass microbatches= to planned_loader, equal to the schedule's num_microbatches"
            raise ConfigError("microbatches of a step", len(batches), rule, remedy)
        return self._finalize(models, *args, **kwargs)


def _note(module: Any, batches: Sequence[PlannedBatch]) -> None:
    """Records batches of the current step for `CheckedSteps`."""
    config = module.config
    if not isinstance(config.finalize_model_grads_func, CheckedSteps):
        config.finalize_model_grads_func = CheckedSteps(config.finalize_model_grads_func)
    config.finalize_model_grads_func.note(id(module), batches)


def _positions(batches: Sequence[PlannedBatch]) -> int:
    """A table length above the largest position id: a power of 2, since Megatron caches tables."""
    return 1 << max(int(batch.position_ids.max()) for batch in batches if len(batch.tokens)).bit_length()


def _splittable_layers(module: Any) -> list[Any]:
    """The layers to split at core attention for halves and ticks, except those already prepared. Raises ConfigError
    if they cannot be split."""
    config, reason = module.config, "layers run in their own autograd function"
    for name, expected, rule in (
        ("sequence_parallel", False, "its ranks would split the rows of halves"),
        ("num_moe_experts", None, "it is not supported around attention"),
        ("experimental_attention_variant", None, "recurrent layers do not take turns"),
        ("gradient_accumulation_fusion", False, reason),
        ("fine_grained_activation_offloading", False, reason),
        ("fp8", None, reason),
        ("attention_output_gate", False, "it is not supported"),
    ):
        require(name, getattr(config, name), expected, rule)
    if config.recompute_granularity == "selective":
        raise ConfigError("recompute_granularity", "selective", reason, "recompute whole layers, or none")
    layers = [layer for layer in module.decoder.layers if "forward" not in vars(layer)]
    for layer in layers:
        for part, methods in (
            (layer, ("forward", "_forward_attention")),
            (layer.self_attention, ("forward",)),
        ):
            require_known("megatron", type(part), *methods, remedy="train it without ping-pong and ticks")
    return layers


def split(layer: Any, table: Any, handle: PlanHandle) -> PingPongLayer:
    """Splits a TransformerLayer, [rows, 1, E], at its core attention. table: rotary angles; None: no RoPE."""
    attention, core = layer.self_attention, layer.self_attention.core_attention
    if layer.config.no_rope_freq and layer.config.no_rope_freq[attention.layer_number - 1]:
        table = None

    def pre(hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = attention.get_query_key_value_tensors(layer.input_layernorm(hidden))
        if table is not None:
            rotate = partial(apply_rotary_pos_emb, freqs=table[positions], config=layer.config)
            q, k = rotate(q), rotate(k)
        return q.squeeze(1), k.squeeze(1), v.squeeze(1)

    def post(hidden: Tensor, out: Tensor) -> Tensor:
        projected = attention.linear_proj(out.flatten(1).unsqueeze(1))
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        with layer.bias_dropout_add_exec_handler():
            hidden = add(projected, hidden, layer.hidden_dropout)
        result: Tensor = layer._forward_mlp(hidden)
        return result

    kind, sinks = core.kind_under(handle), core.softmax_offset
    return PingPongLayer(pre, post, layer.parameters(), kind, core.scale, sinks=sinks)


def paired_layer(layer: Any, layer_forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a TransformerLayer that separates the rows of two halves. layer_forward: the layer's forward."""
    params = kwargs["packed_seq_params"]
    if len(params.handles) == 1:
        return layer_forward(hidden_states, *args, **kwargs)
    pair = split(layer, params.table, params.handles[0])
    mask = layer.self_attention.core_attention.declared_mask
    return run_halves(pair, hidden_states, params.handles, mask), None


def loss_of(batch: PlannedBatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum, tokens, report) of a batch; Megatron divides the sum by the tokens of all ranks and microbatches."""
    has_label = batch.labels >= 0
    weights = batch.fields.get(WEIGHTS, torch.ones_like(losses[0]))
    total = (losses[0] * has_label * weights).sum() * (batch.valid_tokens / (batch.total_weight or 1.0))
    return total, has_label.sum().int(), {"lm loss": torch.stack((total.detach(), has_label.sum()))}


# ---- replacements of Megatron's core attention and rotary embedding


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Parameters of core attention and RoPE. qkv_format stays None, so tensors keep the shape [rows, 1, heads, D]."""

    batch: Any = None  # PlannedBatch; two halves are joined
    positions: int = 0  # at least the largest position id plus one
    handles: Any = ()  # of each half
    table: Any = None  # rotary angles of all positions


class PlannedCoreAttention(DotProductAttention):
    """Planned core attention: q [rows, 1, heads, D], k and v of this tensor-parallel rank -> [rows, 1, heads * D]. Has
    the parameters of Megatron's class, including those of `softmax_type`."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.kind, self.window = kind_of(config, layer_number)
        scaled = config.apply_query_key_layer_scaling
        self.scale = self.softmax_scale * (layer_number if scaled else 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        handle = _handle_of("planned core attention", kwargs)
        kind, settings = self.kind_under(handle), {**self.declared_mask, "sinks": self.softmax_offset}
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        out: Tensor = planned_attention(q, k, v, handle, kind, self.scale, **settings)
        return out.flatten(1).unsqueeze(1)

    @property
    def declared_mask(self) -> dict[str, Any]:
        """The mask that the layer declares, as arguments of `planned_attention`."""
        causal = "causal" in self.attn_mask_type.name
        return {"window": self.window, "causal": causal, "layer": self.layer_number}

    def kind_under(self, handle: PlanHandle) -> str | None:
        return self.kind if len(handle.kinds) > 1 else None


class PlannedGatedDeltaNet(GatedDeltaNet):
    """[rows, 1, E] -> [rows, 1, E] and a bias. Has the parameters of Megatron's class, which does not sum gradients
    of the output's norm over tensor-parallel ranks; this class does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.out_norm.parameters():
            if self.tp_size > 1 and not getattr(param, "sequence_parallel", False):  # then Megatron sums them
                param.register_hook(self._sum_over_ranks)

    def _sum_over_ranks(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.pg_collection.tp)
        return total

    def forward(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        handle, tp = _handle_of("a planned Gated DeltaNet", kwargs), self.tp_size
        mixed = self.in_proj(hidden_states)[0].squeeze(1)
        heads = self.num_value_heads
        widths = [2 * self.qk_dim + self.v_dim, self.v_dim, heads, heads]
        qkv, gate, beta, alpha = mixed.split([width // tp for width in widths], -1)
        qkv = planned_conv(qkv, self.conv1d.weight.squeeze(1), handle, bias=self.conv1d.bias)
        parts = self.act_fn(qkv).split([width // tp for width in (self.qk_dim, self.qk_dim, self.v_dim)], -1)
        dims = self.key_head_dim, self.key_head_dim, self.value_head_dim
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
        if self.use_qk_l2norm:
            q, k = normalised(q), normalised(k)
        decay = -self.A_log.exp() * softplus(alpha.float() + self.dt_bias)
        out = planned_scan(None, q, k, v, decay, beta.sigmoid(), handle)
        normed = self._apply_gated_norm(out, gate.reshape(*out.shape))
        return self.out_proj(normed.view(len(out), 1, -1))


def _handle_of(layer: str, kwargs: dict[str, Any]) -> PlanHandle:
    """The handle among a layer's arguments. Raises ExecutionError if there is none."""
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, PlannedSeqParams) or params.batch is None:
        raise ExecutionError(f"{layer} got no plan: call the model through `forward_step`")
    handle: PlanHandle = params.batch.handle
    return handle


class PlannedRotary(torch.nn.Module):
    """Rotary embedding that indexes Megatron's table by the rows' positions; Megatron's own counts rows from 0."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        params = args[4] if len(args) > 4 else None
        is_planned = isinstance(params, PlannedSeqParams)
        return params if is_planned else self.own.get_rotary_seq_len(*args, **kwargs)

    def forward(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(rows, PlannedSeqParams):
            return self.own(rows, *args, **kwargs)
        table, ids = self.own(rows.positions), rows.batch.position_ids
        rows.table = table[0] if isinstance(table, tuple) else table
        return (rows.table[ids], table[1]) if isinstance(table, tuple) else rows.table[ids]


def model_of(config: Any) -> Model:
    """The planning model of a config: heads of one tensor-parallel rank, dtype and kinds."""
    tp = config.tensor_model_parallel_size
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(config.params_dtype, "fp32")
    heads, kv_heads = config.num_attention_heads // tp, max(config.num_query_groups // tp, 1)
    sizes = {"dtype": dtype, "hidden": config.hidden_size, "layers": kinds(config)[0]}
    return Model(heads, kv_heads, config.kv_channels, **sizes, recurrent=recurrent_of(config))


def recurrent_of(config: Any) -> dict[str, Recurrent]:
    """The recurrent kinds of a `Model`: Gated DeltaNets, with the heads of one tensor-parallel rank."""
    if not (layers := sum(_recurrent_layers(config))):
        return {}
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    counts = (count // config.tensor_model_parallel_size for count in (heads, key_heads))
    names = ("heads", "key_heads", "key_dim", "value_dim", "conv", "layers")
    sizes = *counts, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return {GATED: Recurrent(**dict(zip(names, (*sizes, layers), strict=True)))}


def _recurrent_layers(config: Any) -> list[int]:
    """1 for each recurrent layer, else 0."""
    if config.experimental_attention_variant != GATED:
        return [0] * config.num_layers
    return list(get_linear_attention_pattern(config))


def kinds(config: Any) -> tuple[Any, Any]:
    """Like `kinds_of`, for layers with attention."""
    attends = (number for number, recurs in enumerate(_recurrent_layers(config), 1) if not recurs)
    return kinds_of([kind_of(config, number)[1] for number in attends], "full", "window")


def kind_of(config: Any, layer_number: int) -> tuple[str, int]:
    """A layer's kind, and the tokens that a row sees, including itself; -1 for all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return "full", -1
    return "window", config.window_size[0] + 1
