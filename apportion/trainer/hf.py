"""Hugging Face transformers: planned attention in a model, and planned batches in its Trainer.

    dataset ──loader(dataset, model, …)──► PlannedBatch ──inputs──► model(**kwargs), with the plan's handle
                                                            attention layers ◄── enable(model)

Without a handle in its kwargs the model is as it was: generate, padded batches and evaluation of any other kind.
Written for transformers 5.23; N ranks are N data-parallel ranks to it, and its own context parallelism stays off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from apportion.backends.torch.memory.arrays import DTYPES
from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.ir.request.hf_config import masks_of, model_of
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.step.attention import PlanHandle, planned_attention

try:
    from transformers import AttentionInterface
except ModuleNotFoundError as error:
    raise MissingDependencyError("transformers", "hf", "apportion.trainer.hf") from error

NAME = "apportion"  # of the attention implementation, and of the kwarg that brings the handle


def enable(model: Any) -> Any:
    """Has the model's attention run under a plan wherever a forward is given a handle; returns the model. Before it is
    wrapped in DDP or FSDP. Raises ConfigError for a model whose layers are not all attention that can be replaced."""
    AttentionInterface.register(NAME, attention)
    layers = [
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    count = model.config.get_text_config().num_hidden_layers
    if len({layer.layer_idx for layer in layers}) != count or not model._can_set_attn_implementation():
        rule = f"{len(layers)} of its {count} layers are attention that can be replaced"
        raise ConfigError("model", type(model).__name__, rule, "plan models of attention layers alone")
    for module in (model.base_model, *layers):  # layers again: checkpointing runs them a second time, alone
        module._unplanned = None  # the implementation to go back to
        module.register_forward_pre_hook(_begin, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)
    model.register_forward_hook(_balance, with_kwargs=True)
    return model


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls, by name behind the mask: query [1, Hq, rows, D], key and value [1, Hk, rows, D] ->
    [1, rows, Hq, Dv]. Raises as `planned_attention`, which holds the layer's window against the plan's."""
    handle: PlanHandle = kwargs[NAME]
    kind = module.config.layer_types[module.layer_idx] if len(handle.kinds) > 1 else None
    device = query.device.type  # autocast leaves q and k in float32 behind RoPE
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (query, key, value))
    window, dropout = kwargs.get("sliding_window") or -1, kwargs.get("dropout", 0.0)
    own = {"window": window, "layer": module.layer_idx, "dropout": dropout}
    looks_ahead = not (module.is_causal and getattr(module.config, "is_causal", True))
    own["causal"] = False if looks_ahead else None  # a causal model may be given masks that look ahead
    return planned_attention(q, k, v, handle, kind, scaling, softcap, s_aux, **own), None


def loader(
    dataset: Any, model: Any, *, dtype: str | None = None, sent_gradients: str = "wide", **options: Any
) -> PlannedLoader:
    """`PlannedLoader(dataset, **options)` with what the config of `model` says: heads, masks of its kinds of layers.

    dtype: of q, k and v, "bf16" where autocast or FSDP casts; by default that of the parameters. sent_gradients: as of
    `apportion.Model`. Masks in `options` or of the dataset win. Ranks have at least one row, which layers want, and the
    stream "train" has no short iteration.
    """
    config = model.config.get_text_config().to_dict()
    own = next(name for name, value in DTYPES.items() if value == model.dtype)
    if getattr(dataset, "masks", None) is None and options.get("masks") is None:
        options["masks"] = masks_of(config)
    options = {"rows_multiple": 1, "drop_last": options.get("stream", "train") == "train", **options}
    planned = replace(model_of(config), dtype=dtype or own, sent_gradients=sent_gradients)
    return PlannedLoader(dataset, model=planned, **options)


def inputs(batch: PlannedBatch) -> dict[str, Any]:
    """The kwargs of the model's forward; its loss is this rank's share of the step's mean, as `normalised_loss`. Raises
    ConfigError for samples with `loss_weights`, which that does not know."""
    batch.check_unweighted("the model's own loss")
    labels = batch.labels[None]  # shifted: the label of a row may be a token of another rank
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "labels": labels,
        "shift_labels": labels,
        "num_items_in_batch": max(batch.valid_tokens, 1),
        "use_cache": False,
        NAME: batch.handle,
    }


# ---- hooks of an enabled model


def _begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    config = module.config.get_text_config()
    if kwargs.get(NAME) is not None and config._attn_implementation != NAME:
        module._unplanned, config._attn_implementation = config._attn_implementation, NAME


def _end(module: Any, args: Any, output: Any) -> None:
    if module._unplanned is not None:
        module.config.get_text_config()._attn_implementation, module._unplanned = module._unplanned, None


def _balance(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """The router's auxiliary loss is not a sum over rows: this rank's share of that of the whole microbatch."""
    handle, own = kwargs.get(NAME), getattr(output, "aux_loss", None)
    if handle is None or own is None:
        return
    output.aux_loss = _share(output.router_logits, model.num_experts_per_tok, handle)
    if output.loss is not None:
        output.loss = output.loss + model.router_aux_loss_coef * (output.aux_loss - own)


def _share(logits: Sequence[Tensor], top_k: int, handle: PlanHandle) -> Tensor:
    """E · sum over experts of (share of the tokens sent there) · (mean probability), Switch Transformers (arXiv
    2101.03961), eq. 4 to 6: shares of all ranks, and of the mean what this rank's rows add. A collective."""
    probabilities = torch.stack([layer[: handle.rows] for layer in logits]).softmax(-1).float()
    experts = probabilities.shape[-1]
    sent = one_hot(probabilities.topk(top_k).indices, experts).sum((0, 1, 2))
    here = [*sent.tolist(), probabilities[..., 0].numel()]
    *everywhere, rows = torch.tensor(handle.communicator.all_gather(here)).sum(0).tolist()
    weights = probabilities.new_tensor(everywhere) / rows
    share: Tensor = experts * (weights * probabilities.sum((0, 1)) / rows).sum()
    return share
