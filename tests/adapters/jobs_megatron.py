"""Rank pool jobs with Megatron-Core: a tiny GPTModel under its schedules, with plans or its own attention."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from apportion.backends.torch.transport import Communicator

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import megatron_cpu  # noqa: F401
import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

from apportion.backends.torch.kernels.recurrent import normalised
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ApportionError
from apportion.ir.masks.specs import causal
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.ticks import tick_table
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.megatron import (
    endless,
    forward_step,
    model_of,
    planned_loader,
    planned_spec,
    tick_step,
)
from tests.adapters.documents import VOCABULARY, Apart, Documents, documents, packed
from tests.ranks.loading import HereSource, planning_of

moe_utils.te_general_gemm = None  # Megatron reads it even without Transformer Engine
TOKENS, SEED = 128, 3
# Gated DeltaNet requires flash-linear-attention, but its torch path only calls this function
gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, normalised
MODELS = {
    "llama": {},
    "gated_delta_net": {
        "num_layers": 3,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 0, 1],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "deterministic_mode": True,  # its own torch kernel
    },
    "gpt_oss": {
        "softmax_type": "learnable",
        "window_size": (6, 0),
        "window_attn_skip_freq": 2,
        "no_rope_freq": [0, 1],
    },
}


class OwnCore(DotProductAttention):
    """Core attention of the user's own."""

    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(query * 0.5, *args, **kwargs)


class OwnLayer(TransformerLayer):
    """A layer of the user's own."""

    def _forward_attention(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._forward_attention(hidden_states * 0.5, *args, **kwargs)


class OwnGPTModel(GPTModel):
    """A model of the user's own."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = super()._preprocess(*args, **kwargs)
        return (None if hidden is None else hidden * 0.5, *rest)


def _own_spec(part: Any, _: Any) -> Any:
    spec = get_gpt_layer_local_spec()
    if part is OwnLayer:
        spec.module = part
    else:
        spec.submodules.self_attention.submodules.core_attention = part
    return spec


class Unscaled(DistributedDataParallel):
    """A wrapper that does not divide gradients, like Megatron's of torch's FSDP2."""

    scale_gradients = _BaseDataParallel.scale_gradients


@dataclass(frozen=True)
class Case:
    model: str = "llama"
    steps: int = 3
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    tp: int = 1
    pp: int = 1
    positions: str = "rope"
    longest: int = 256  # positions
    divides: bool = True  # whether gradients are divided by the tokens of all ranks
    options: dict = field(default_factory=dict)  # of the TransformerConfig
    spec: str = "layer"  # or "block": a spec per layer; "own": not planned; "recurrent": a layer without core attention
    bypasses: bool = False  # whether a layer bypasses its core attention
    folder: str = ""  # for saving and resuming a run
    rows: int = 1  # ranks pad their rows to a multiple of this
    weighted: bool = False  # whether samples have loss weights
    masked: bool = False  # whether the dataset has masks
    ping_pong: bool = False
    ticks: bool = False  # whether all stages compute the attention of each tick
    apart: bool = False  # whether tensor-parallel ranks and stages read different tokens
    unscaled: bool = False  # whether the model's wrapper does not divide gradients
    kind: type[GPTModel] = GPTModel


def config_of(case: Any) -> Any:
    loader_options = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": case.pp > 1,
        "moe_token_dispatcher_type": "alltoall",  # required by Megatron here, even without experts
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
    }
    return TransformerConfig(**{**loader_options, **MODELS[case.model], **case.options})


def _block_spec(config: Any) -> Any:
    """A block spec with Gated DeltaNets, which Megatron builds only with Transformer Engine."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if config.experimental_attention_variant == "gated_delta_net":
        pattern = get_linear_attention_pattern(config)
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        for layer, recurs in zip(spec.layer_specs, pattern, strict=True):
            if recurs:
                layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return spec


SPECS: dict[str, Any] = {
    "layer": lambda config: get_gpt_layer_local_spec(),
    "own": lambda config: get_gpt_layer_local_spec(),
    "block": _block_spec,
    "recurrent": lambda config: get_gpt_layer_local_spec(),
    "own core": partial(_own_spec, OwnCore),
    "own layer": partial(_own_spec, OwnLayer),
}


def model_from(case: Any, config: Any, own: Any) -> Any:
    """A model whose weights do not depend on the number of ranks."""
    spec = SPECS[case.spec](config)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = case.kind(
        config,
        spec if own or case.spec == "own" else planned_spec(spec),
        vocab_size=VOCABULARY,
        max_sequence_length=case.longest,
        position_embedding_type=case.positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    same_weights(model, case)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
    config.finalize_model_grads_func = finalize_model_grads if case.divides else None
    return (Unscaled if case.unscaled else DistributedDataParallel)(config, ddp, model)


@torch.no_grad()
def same_weights(model: Any, case: Any) -> None:
    """Sets weights by the parameter's name in the whole model, independently of the ranks."""
    at = parallel_state.get_tensor_model_parallel_rank()
    for name, one in model.named_parameters():
        if "layernorm" in name:
            continue
        parts = name.split(".")
        if "layers" in parts:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
        split = getattr(one, "tensor_model_parallel", False) or parts[-1] == "softmax_offset"
        dim, stride = (max(getattr(one, "partition_dim", 0), 0), max(getattr(one, "partition_stride", 1), 1))
        shape = [size * (case.tp if split and number == dim else 1) for number, size in enumerate(one.shape)]
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        full = torch.randn(shape, generator=generator) / 6
        if split and case.model == "gated_delta_net" and parts[-2] in ("in_proj", "conv1d"):
            # q, k, v, gate, beta, alpha
            columns = [16, 16, 48, 48, 4, 4][: 3 if parts[-2] == "conv1d" else 6]
            full = torch.cat([part.chunk(case.tp)[at] for part in full.split(columns)])
        elif split:
            full = torch.cat(full.chunk(case.tp * stride, dim)[at :: case.tp], dim)
        one.copy_(full)


def own_step(data_iterator: Any, model: Any) -> Any:
    """A forward step with Megatron's own attention, document by document."""
    tokens, positions, labels = next(data_iterator)
    counts = torch.bincount((positions == 0).cumsum(0) - 1).tolist()
    pieces = zip(*(column.split(counts) for column in (tokens, positions, labels.clamp(min=0))), strict=True)
    losses = [model(ids[None], at[None], None, labels=targets[None]) for ids, at, targets in pieces]
    return torch.cat(losses, 1), partial(_own_loss, labels)


def _own_loss(labels: Any, losses: Any) -> Any:
    labelled = labels >= 0
    total = (losses[0] * labelled).sum()
    return total, labelled.sum().int(), {"lm loss": torch.stack((total.detach(), labelled.sum()))}


def own_data(case: Any) -> Any:
    return packed(documents(), TOKENS, case.microbatches, SEED, multiple=1)


class WeightedDocuments(Documents):
    def __getitem__(self, index: int) -> Any:
        tokens = super().__getitem__(index)
        return {"input_ids": tokens, "loss_weights": 0.25 + np.arange(len(tokens)) % 4}


class MaskedDocuments(Documents):
    @property
    def masks(self) -> Any:
        return [causal()] * len(self)


def planned_data(case: Any, config: Any, ranks: int) -> Any:
    cluster = Cluster(1, ranks // case.tp // case.pp)
    if case.ticks:
        loader_options = {
            "cluster": Cluster(1, ranks),
            "tokens_per_rank": TOKENS // cluster.ranks,
            "seed": SEED,
        }
        loader_options |= {"source": HereSource(), "communicator": Communicator.shared()}
        return planned_loader(
            documents(), config, **loader_options, ticks=tick_table(case.pp, case.microbatches)
        )
    policy = Policy(find_recipe("fcp"), seed=SEED)
    job = Job(cluster, model_of(config), policy, TOKENS // cluster.ranks, case.microbatches)
    dataset = WeightedDocuments() if case.weighted else Apart() if case.apart else documents()
    dataset = MaskedDocuments() if case.masked else dataset
    return planned_loader(dataset, config, **planning_of(job), rows_multiple=case.rows)


def train(comm: Communicator, own: Any, case: Any) -> Any:
    """The loss of each step, and the last step's gradients by name."""
    with _parallel(case):
        config = config_of(case)
        model = model_from(case, config, own)
        loader = None if own else planned_data(case, config, comm.ranks)
        return _steps(case, model, loader, Path(case.folder, f"{comm.rank}.pt") if case.folder else None)


@contextmanager
def _parallel(case: Any) -> Iterator[Any]:
    sizes = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
    sizes |= {name: size for name, size in case.options.items() if name.startswith("expert_")}
    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _steps(case: Any, model: Any, loader: Any, saved: Any) -> Any:
    optimizer, losses, first_step = torch.optim.SGD(model.parameters(), lr=0.1), [], 0
    if saved and saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
        first_step = state["step"]
    passes = PlannedLoader.pairs if case.ping_pong else iter
    data = own_data(case) if loader is None else endless(loader, passes)
    if case.ticks and loader is not None:
        table, data = tick_table(case.pp, case.microbatches), endless(loader, PlannedLoader.iterations)
    for _ in range(first_step, case.steps):
        model.zero_grad_buffer()
        if case.ticks and loader is not None:
            reports = tick_step(next(data), [model], table)
        else:
            reports = get_forward_backward_func()(
                forward_step_func=own_step if loader is None else forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=case.microbatches // (1 + case.ping_pong),
                seq_length=TOKENS,
                micro_batch_size=1,
                forward_only=False,
            )
        losses.append(_mean(reports))
        grads = {name: one.main_grad.clone() for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            one.grad = grads[name].to(one.dtype)
        optimizer.step()
        optimizer.zero_grad()  # otherwise backward would accumulate
    if saved:
        state = {"model": model.state_dict(), "loader": loader.state_dict(), "step": case.steps}
        torch.save(state, saved)
    return losses, {name: grad.float().numpy() for name, grad in grads.items()}


def refusal(comm: Communicator, case: Any) -> Any:
    """The error for a config, raised by the first step at the latest; "" if there is none."""
    with _parallel(case):
        config = config_of(case)
        try:
            model = model_from(case, config, own=False)
            if case.spec == "recurrent":
                model.module.decoder.layers[1].self_attention = torch.nn.Identity()
            if case.bypasses:
                core = model.module.decoder.layers[1].self_attention.core_attention
                core.forward = lambda query, *_, **kwargs: query.flatten(2)
            loader = planned_data(case, config, comm.ranks)
            if case.ticks:
                tick_step(next(loader.iterations()), [model], tick_table(case.pp, case.microbatches))
            passes = PlannedLoader.pairs if case.ping_pong else iter
            forward_step(endless(loader, passes), model)
        except ApportionError as error:
            return str(error)
        return ""


def weighted_steps(comm: Communicator, case: Any, num_microbatches: int) -> Any:
    """The losses of two steps of `num_microbatches` microbatches, or the error."""
    with _parallel(case):
        config = config_of(case)
        model, data = model_from(case, config, own=False), endless(planned_data(case, config, comm.ranks))
        run = partial(
            get_forward_backward_func(), forward_step_func=forward_step, data_iterator=data, model=model
        )
        sizes = {"num_microbatches": num_microbatches, "seq_length": TOKENS, "micro_batch_size": 1}
        try:
            return [_mean(run(**sizes, forward_only=False)) for _ in range(2)]
        except ApportionError as error:
            return str(error)


def _mean(reports: Any) -> Any:
    """The mean loss per token over data-parallel ranks; None for a stage without loss."""
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total[0] / total[1])
