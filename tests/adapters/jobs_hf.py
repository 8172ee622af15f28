"""Rank pool jobs with models of transformers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ApportionError
from apportion.ir.request.hf_config import model_of
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer import hf
from apportion.trainer.step import wiring
from tests.ranks.loading import planning_of

LENGTHS = [40, 1, 97, 23, 64, 9, 130, 33]
VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LOCAL = ["sliding_attention", "full_attention"]
#: name -> (class, attention implementation, config)
MODELS = {
    "llama": ("Llama", "sdpa", {}),
    "mistral": ("Mistral", "sdpa", {"sliding_window": 24}),
    "gemma2": ("Gemma2", "eager", {"sliding_window": 24, "layer_types": LOCAL, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", "sdpa", {"sliding_window": 24, "layer_types": LOCAL, "query_pre_attn_scalar": 8}),
    "phimoe": (
        "Phimoe",
        "sdpa",
        {"sliding_window": 24, "num_local_experts": 4},
    ),  # has a window only in its mask
    "gpt_oss": (
        "GptOss",
        "eager",
        {
            "sliding_window": 24,
            "layer_types": LOCAL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        "sdpa",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 16,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
ROPE = {"rope_theta": 1e4, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
#: rotary embeddings whose frequencies depend on the largest position of a call
ROPES = {
    "dynamic": {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 64},
    "longrope": {
        "rope_parameters": {
            **ROPE,
            **FACTORS,
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
        }
    },
}
#: further models that the guard accepts, also run on ranks
FURTHER = {
    "granite": ("Granite", "sdpa", {"embedding_multiplier": 2.0, "attention_multiplier": 0.2}),
    "olmo2": ("Olmo2", "sdpa", {}),
    "phi3": ("Phi3", "sdpa", {"pad_token_id": 0, "sliding_window": None}),
    "qwen2": ("Qwen2", "sdpa", {}),
    "seed_oss": ("SeedOss", "sdpa", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "qwen3_moe": (
        "Qwen3Moe",
        "sdpa",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


def new_model(name: str, **changes: Any) -> Any:
    """A small model of this name, identical on all ranks."""
    kind, own, options = {**MODELS, **FURTHER}[name]
    config, model = CLASSES.get(kind, (f"{kind}Config", f"{kind}ForCausalLM"))
    torch.manual_seed(0)
    config = getattr(transformers, config)(**{**SIZES, **options, **changes})  # type: ignore[dict-item]
    config._attn_implementation = own
    found = getattr(transformers, model)(config).train()
    with torch.no_grad():
        for key, value in found.named_parameters():  # some buffers are uninitialised
            value.normal_(std=1.0 if key.endswith("sinks") else 0.05)
    return found


class Documents:
    """Dataset of random tokens."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> Any:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, VOCABULARY, self.lengths[index])


class Weighted(Documents):
    """The same with a weight of each token."""

    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        return {"input_ids": ids, "loss_weights": (1 + ids % 3).astype(np.float32)}


def loader(
    model: Any,
    ranks: int,
    comm: Any = None,
    lengths: Any = LENGTHS,
    tokens: Any = None,
    microbatches: int = 1,
    dtype: Any = "fp32",
    recipe: Any = "fcp",
    **options: Any,
) -> Any:
    """An `hf.loader` whose plans are made in this process."""
    tokens = -(-sum(lengths) // ranks) if tokens is None else tokens
    shape = replace(model_of(model.config.to_dict()), dtype=dtype)
    job = Job(ap.Cluster(1, ranks), shape, Policy(find_recipe(recipe)), tokens, microbatches)
    dataset = options.pop("dataset", Documents)(lengths)
    options = {"shuffle": False, "communicator": comm, **options}
    return hf.loader(dataset, model, dtype=dtype, **planning_of(job), **options)


def packed(documents: Any, samples: Any, valid: Any, **kwargs: Any) -> Any:
    """Concatenated documents as transformers expects them: its masks follow from position ids that restart."""
    rows = [torch.from_numpy(documents[int(i)]) for i in samples]
    no_label = torch.tensor([-100])
    labels = torch.cat([torch.cat([ids[1:], no_label]) for ids in rows])[None]
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in rows])[None],
        "labels": labels,
        "shift_labels": labels,
        "num_items_in_batch": valid,
        "use_cache": False,
        **kwargs,
    }


def reference_model(name: str, **changes: Any) -> Any:
    """The model for packed documents in one process. gpt-oss builds its masks without position ids and would attend to
    other documents, so a hook supplies its masks."""
    model = new_model(name, **changes)
    if name == "gpt_oss":
        model.model.register_forward_pre_hook(_masked, with_kwargs=True)
    return model


def _masked(module: Any, args: Any, kwargs: Any) -> Any:
    positions = kwargs["position_ids"][0]
    document, back = (positions == 0).cumsum(0), torch.arange(len(positions))
    back = back[:, None] - back
    visible = (document[:, None] == document) & (back >= 0)
    in_window = visible & (back < module.config.sliding_window)
    masks = {"full_attention": visible, "sliding_attention": in_window}
    biases = {
        kind: torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None] for kind, mask in masks.items()
    }
    return args, {**kwargs, "attention_mask": biases}


def gradients(model: Any) -> Any:
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def furthest(own: Any, other: Any) -> Any:
    """The largest difference, relative to the largest gradient."""
    assert own.keys() == other.keys()
    largest = max(value.abs().max() for value in other.values())
    return float(max((own[name] - other[name]).abs().max() for name in own) / largest)


def total(loss: Any, comm: Communicator) -> Any:
    return sum(row[0] for row in numbers(comm, loss))


def numbers(comm: Communicator, *values: Any) -> Any:
    """Gathers the float values of every rank."""
    rows = comm.all_gather(
        [np.float64(float(torch.as_tensor(value).detach())).view(np.int64) for value in values], "losses"
    )
    return [[float(np.int64(bits).view(np.float64)) for bits in row] for row in rows]


def agreement(
    comm: Communicator,
    name: str,
    wrap: Any = "plain",
    checkpointed: Any = False,
    autocast: Any = False,
    options: Any = (),
    changes: Any = None,
) -> Any:
    """The largest absolute difference of losses and largest relative difference of gradients from the model's own
    attention in one process, over all microbatches of an epoch; and the losses."""
    model, plain = (make(name, **(changes or {})) for make in (new_model, reference_model))
    hf.enable(model)
    if checkpointed:
        model.gradient_checkpointing_enable()
    wrapped = WRAPS[wrap](model, comm)
    batches = loader(model, comm.ranks, comm, **dict(options))
    losses, expected = [], []
    for batch in batches:
        with (
            synced(wrapped, batch.is_last or wrap == "ddp_every"),
            torch.autocast("cpu", torch.bfloat16, autocast),
        ):
            loss = wrapped(**hf.inputs(batch)).loss
            loss.backward()
        losses.append(total(loss, comm))
        with torch.autocast("cpu", torch.bfloat16, autocast):
            own = plain(**packed(batches.dataset, batch.samples, batch.valid_tokens)).loss
        own.backward()
        expected.append(float(own))
    if wrap == "plain":
        ap.sum_gradients(model, comm._base)
    off = max(abs(loss - own) for loss, own in zip(losses, expected, strict=True))
    return off, furthest(gradients(model), gradients(plain)), losses


def in_ddp(model: Any, comm: Communicator) -> Any:
    return ap.sum_gradients(DistributedDataParallel(model, process_group=comm._base))


def in_fsdp(model: Any, comm: Communicator) -> Any:
    mesh = DeviceMesh.from_group(comm._base, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return ap.sum_gradients(fully_shard(model, mesh=mesh))


#: ddp_every: reduces gradients with every microbatch
WRAPS = {"plain": lambda model, comm: model, "ddp": in_ddp, "ddp_every": in_ddp, "fsdp": in_fsdp}


def synced(model: Any, is_last: Any) -> Any:
    """Reduces gradients only with the last microbatch of an iteration."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


def loop_error(comm: Communicator, mistake: str) -> str:
    """The error that ends a loop with this mistake; "" if there is none."""
    wiring.watch = wiring.Watch()
    model = hf.enable(new_model("llama"))
    if mistake == "frozen":
        model.model.embed_tokens.weight.requires_grad_(False).add_(comm.rank)
    kind, _, summed = mistake.partition(" ")
    batches = loader(model, comm.ranks, comm)
    wrapped = model
    if kind.startswith("ddp"):
        wrapped = DistributedDataParallel(model, process_group=comm._base)
    elif kind.startswith("fsdp"):
        wrapped = fully_shard(model, mesh=DeviceMesh.from_group(comm._base, "cpu"))
    wrapped = ap.sum_gradients(wrapped) if summed else wrapped
    called = torch.compile(wrapped, backend="aot_eager") if kind.endswith("compiled") else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    try:
        for batch in batches:
            given = hf.inputs(batch)
            if kind in ("rows", "copies"):
                tokens = batch.tokens.clone() if kind == "copies" else batch.tokens
                given = {"input_ids": tokens[None], "labels": batch.labels[None]}
            called(**given).loss.backward()
            if kind in ("summed", "frozen"):
                ap.sum_gradients(model, comm._base)
            optimizer.step()
    except ApportionError as error:
        return str(error)
    return ""


def scoring_error(comm: Communicator, length: int, count: int) -> str:
    """Returns the error of scoring the samples `count` at a time, without the plan and before a step; "" for none."""
    wiring.watch = wiring.Watch()
    model = hf.enable(new_model("llama"))
    batches = loader(model, comm.ranks, comm, lengths=[length] * 2 * comm.ranks)
    try:
        for batch in batches:
            samples = torch.stack(
                [torch.from_numpy(batches.dataset[int(i)]) for i in batch.sample_ids.unique()]
            )
            with torch.no_grad():
                for tokens in samples.split(count):
                    model(input_ids=tokens)
            model(**hf.inputs(batch))
    except ApportionError as error:
        return str(error)
    return ""


class WrappedModel(torch.nn.Module):
    """Custom layers after a transformers model."""

    def __init__(self, model: Any, mixing: bool) -> None:
        super().__init__()
        self.model, self.mixing, self.own = model, mixing, torch.nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, batch: Any) -> Any:
        logits = self.model(**hf.inputs(batch)).logits[0]
        return logits + self.own(logits.roll(1, 0) if self.mixing else logits)


def wrapped_model_error(comm: Communicator, mistake: str) -> str:
    """The error of a step of a `WrappedModel`; "" if there is none."""
    wiring.watch = wiring.Watch()
    torch.manual_seed(0)
    model = WrappedModel(hf.enable(new_model("llama")), mistake == "mixed")
    (batch,) = loader(model.model, comm.ranks, comm)
    ap.normalised_loss(model(batch), batch.labels, batch.valid_tokens).backward()
    ap.sum_gradients(model, comm._base)
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    except ApportionError as error:
        return str(error)
    return ""


def loss_warnings(comm: Communicator, mistake: str) -> list[str]:
    """The warnings of two steps with the model's loss, a custom loss on its logits, or an added term."""
    wiring.watch = wiring.Watch()
    model = hf.enable(new_model("llama"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        for batch in loader(model, comm.ranks, comm, tokens=120, drop_last=False):
            output = model(**hf.inputs(batch))
            term = output.logits.logsumexp(-1).square().mean()
            loss = {"": output.loss, "own": term, "added": output.loss + term}[mistake]
            loss.backward()
            ap.sum_gradients(model, comm._base)
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in found]
