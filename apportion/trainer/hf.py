"""Hugging Face transformers adapter: planned attention in a model, and planned batches in its Trainer.

    dataset ──loader(dataset, model, …)──► PlannedBatch ──inputs──► model(**kwargs), with the plan's handle
                                                            attention layers ◄── enable(model)

Without a handle in its kwargs the model is unchanged, for generate, padded batches and any other evaluation.
Written for transformers 5.23, which sees N ranks as N data-parallel ranks; its own context parallelism stays off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel

from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.rehearsal import Rehearsal, is_whole
from apportion.ir.errors import ConfigError, ExecutionError, MissingDependencyError
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.structures import Documents
from apportion.ir.masks.windows import Causal, Chunked, SlidingWindow
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hf_config import masks_of, model_of, windows_of
from apportion.ir.request.hf_fields import (
    BOTH,
    CHUNKED,
    FULL,
    LINEAR,
    SLIDING,
    WINDOW_OF,
    layer_types,
    text_config,
)
from apportion.ir.request.hf_layers import recurrence_of
from apportion.trainer.loading.arguments import own_masks
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import LoaderOptions, PlannedLoader
from apportion.trainer.row_independence import check_rows
from apportion.trainer.step import wiring
from apportion.trainer.step.attention import PlanHandle, planned_attention, planned_latent_attention
from apportion.trainer.step.loss import check_share
from apportion.trainer.step.microbatch import WEIGHTS
from apportion.trainer.step.projection import LatentExpansion

try:
    from transformers import AttentionInterface, Cache

    from apportion.trainer import hf_vision
    from apportion.trainer.hf_recurrent import NAME as NAME, adapt, is_known, mixers_of
except ModuleNotFoundError as error:
    raise MissingDependencyError("transformers", "hf", "apportion.trainer.hf") from error

ATTENDING, RECURRING = (FULL, SLIDING, CHUNKED, BOTH), (LINEAR, BOTH)  # layer types
LAST = "apportion_last_position"  # kwarg: [1] int64, the largest position id of the whole microbatch

_EXPAND = "expand_kv"  # method of multi-head latent attention layers: (compressed, rotated) -> key, value

# kwargs that would change the mask, which planned attention takes from the plan
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_MASKING = ("attention_mask", "past_key_values", "cache_position", *_PACKED)


ModelType = TypeVar("ModelType", bound=Any)


def enable(model: ModelType, *, check: bool = True) -> ModelType:
    """Makes the model's attention run under a plan in forwards with a handle; returns the model. Call it before it is
    wrapped in DDP or FSDP. check: runs a tiny batch through the model, see `check_rows`; if the weights are not in
    this process yet, `loader` does this. Raises ConfigError for a model with a layer that is neither replaceable
    attention nor an adapted recurrence, other modules that use more than one row, or a loss other than next-token."""
    for layer in hf_vision.adapt(model):
        _add_hooks(layer)
    base, layers, mixers = _body(model), _layers(model), mixers_of(model)
    _require_known(model, layers, mixers)
    if not hasattr(base, "_served"):
        # layers that must use a handle, and those that have used it
        base._planned, base._served = {*map(_key, (*layers, *mixers))}, set()
        # whether forwards with gradients had a plan since the last step
        base._ran = model.base_model._ran = set()
        model.register_forward_pre_hook(_check_labels, with_kwargs=True)
        model.register_forward_hook(_share_loss, with_kwargs=True)
        base.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        base.register_forward_hook(_check_layers, with_kwargs=True)
        _add_hooks(base)
    base._chunk = _chunk(model)
    for layer, window in zip(layers, _windows(model, layers), strict=True):
        layer._window = window
        if hasattr(layer, _EXPAND):
            # unlike a closure, gets its own layer also in a copied or unpickled model
            setattr(layer, _EXPAND, partial(_expand_kv, layer))
    for mixer in mixers:
        if not hasattr(mixer, "_served"):
            adapt(mixer, base._served, _key(mixer))
    for layer in layers:  # hooks on layers too: checkpointing reruns single layers
        if not hasattr(layer, "_served"):  # added after the model was enabled
            layer._served = base._served
            _add_hooks(layer)
    wiring.watch.models[model], model._wrong = _note_changed, None
    model._checked = None  # the checked model's `_parts`; False: the model could not be checked yet
    if check:
        model._checked = check_rows(model, _arguments) and _parts(model)
    return model


def _parts(model: Any) -> list[Any]:
    """The loss, and classes, forwards and hooks of modules; a model is checked again if these have changed."""
    modules = model.named_modules()
    hooks = (
        (len(module._forward_pre_hooks), len(module._forward_hooks), type(module), _forward_of(module), name)
        for name, module in modules
    )
    return [model.loss_function, *hooks]


def _forward_of(module: Any) -> Any:
    """The function that replaces the class's forward; None if there is none, or only accelerate's, which casts."""
    forward = vars(module).get("_original_forward", vars(module).get("forward"))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def _check_changed(model: Any) -> None:
    """Checks a model again if its parts have changed since its last check. Raises the errors of `enable`."""
    if not getattr(model, "_checked", None) or model._checked == _parts(model) or not is_whole(model):
        return
    casts = vars(model).pop("forward") if "_original_forward" in vars(model) else None  # runs under autocast
    try:
        model._checked = check_rows(model, _arguments) and _parts(model)
    finally:
        if casts is not None:
            model.forward = casts


def _note_changed(model: Any) -> None:
    """Like `_check_changed`, but defers the error to the next forward under a plan: the model may not be in use."""
    model._wrong = None
    try:
        _check_adapters(model)
        _check_changed(model)
    except ConfigError as error:
        model._wrong = error


def _require_known(model: Any, layers: Sequence[Any], mixers: Sequence[Any]) -> None:
    """Raises ConfigError if some layers are neither replaceable attention nor a recurrence with an adapter."""
    config, name = model.config.get_text_config(), type(model).__name__
    if unknown := sorted({type(item).__name__ for item in mixers if not is_known(item)}):
        rule = f"there is no adapter for its recurrent layers, {', '.join(unknown)}"
        raise ConfigError("model", name, rule, "train it without context parallelism")
    attend, recur = ({item.layer_idx for item in group} for group in (layers, mixers))
    count, suffix = config.num_hidden_layers, ""
    is_right = len(attend) == count and not recur
    if recurrence_of(config.model_type) is not None:
        types = [*enumerate(layer_types(text_config(config.to_dict())))]
        expected = [{n for n, kind in types if kind in group} for group in (ATTENDING, RECURRING)]
        is_right = [attend, recur] == expected
        suffix = f", and {len(recur)} of {len(expected[1])} recurrent ones have an adapter"
    if not is_right or not model._can_set_attn_implementation():
        rule = f"{len(attend)} of its {count} layers are attention that can be replaced{suffix}"
        remedy = "plan models whose layers are attention, or recurrent layers with an adapter"
        raise ConfigError("model", name, rule, remedy)


def _body(model: Any) -> Any:
    """The module that runs the layers: OPT's head calls the decoder of its base model, whose own forward is not run."""
    return getattr(model.base_model, "decoder", model.base_model)


def _key(layer: Any) -> str:
    """The layer's name in errors."""
    return f"{layer.layer_idx}{'' if hasattr(layer, 'is_causal') else ' (recurrent)'}"


def _add_hooks(module: Any) -> None:
    """Makes the module use planned attention during a forward that gets a handle."""
    module._unplanned = None  # the implementation to restore
    module._rotary = [part for part in module.modules() if _is_rotary(part)]
    module.register_forward_pre_hook(_begin, with_kwargs=True)
    module.register_forward_hook(_end, always_call=True)
    for rotary in module._rotary:
        if not hasattr(rotary, "_last"):
            rotary._last = None
            rotary.register_forward_pre_hook(_append_last, with_kwargs=True)
            rotary.register_forward_hook(_drop_last)


def _layers(model: Any) -> list[Any]:
    """The model's attention layers, without those of an encoder."""
    candidates = (
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    )
    return [module for module in candidates if not hasattr(module, "_encodes")]


def _windows(model: Any, layers: Sequence[Any]) -> list[int | None]:
    """The config's window of each layer, for layers that know it only through their mask (PhiMoE); None if the
    config cannot be read: such layers are not checked."""
    try:
        windows = windows_of(model.config.get_text_config().to_dict())
        return [windows[layer.layer_idx] for layer in layers]
    except (ConfigError, IndexError):
        return [None] * len(layers)


def _chunk(model: Any) -> int | None:
    """Tokens per chunk; None for models without chunked layers."""
    text = text_config(model.config.to_dict())
    has_chunks = CHUNKED in (text.get("layer_types") or ())
    return int(text[WINDOW_OF[CHUNKED]]) if has_chunks else None


def require_enabled(model: Any) -> None:
    """Raises ConfigError for a model with attention layers that lack the hooks of `enable`."""
    layers = [*_layers(model), *mixers_of(model)]
    missing = [_key(layer) for layer in layers if not hasattr(layer, "_served")]
    if missing or not layers:
        names = f"layers [{', '.join(missing)}]" if layers else "its layers"
        rule = f"is not enabled: attention of {names} would ignore the plan"
        remedy = "call hf.enable(model) first, also for a copy that was loaded from a checkpoint"
        raise ConfigError("model", type(model).__name__, rule, remedy)
    _check_adapters(model)


def _check_adapters(model: Any) -> None:
    """Raises ConfigError for PEFT adapters that depend on other rows."""
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            rule = "the adapter starts where these tokens occur in a text, which may be on another rank"
            raise ConfigError(
                "alora_invocation_tokens", adapter.alora_invocation_tokens, rule, "leave it out"
            )
        if getattr(adapter, "is_prompt_learning", False):
            rule = "adds virtual tokens in front of each rank's rows, not of each text"
            raise ConfigError("peft_config", type(adapter).__name__, rule, "train LoRA, or without plans")


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
    """The attention function that transformers calls: query [1, Hq, rows, D], key and value [1, Hk, rows, D] ->
    [1, rows, Hq, Dv]; for latent attention key and value are the results of `_expand_kv`. Raises the
    errors of `planned_attention`, which compares the layer's window with the plan's."""
    handle: PlanHandle | Rehearsal | None = kwargs.get(NAME)
    if handle is None:
        rule = "does not receive the keyword arguments of forward, so the plan does not reach it"
        raise ConfigError("attention", type(module).__name__, rule, "train without context parallelism")
    module._served.add(_key(module))
    latent = hasattr(module, _EXPAND)
    if isinstance(handle, Rehearsal):
        if latent:
            key, value = getattr(type(module), _EXPAND)(module, value, key)
        return handle.attend(f"layer {module.layer_idx}", query, key, value), None
    kind = _kind(module, handle)
    device = query.device.type  # autocast leaves q and k in float32 after RoPE
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    q, k, v = (tensor.transpose(1, 2).to(dtype) for tensor in (query, key, value))
    window = kwargs["sliding_window"] or -1 if "sliding_window" in kwargs else module._window
    options = {"window": window, "layer": module.layer_idx, "dropout": kwargs.get("dropout", 0.0)}
    looks_ahead = not (module.is_causal and getattr(module.config, "is_causal", True))
    options["causal"] = False if looks_ahead else None  # the masks of a causal model may look ahead
    if latent:
        expand = LatentExpansion(module.kv_b_proj, module.qk_nope_head_dim, module.v_head_dim)
        layer = handle, expand, expand.params, kind, scaling, softcap, s_aux
        return planned_latent_attention(q[0], v[0, :, 0], k[0, :, 0], *layer, **options)[None], None
    return planned_attention(q, k, v, handle, kind, scaling, softcap, s_aux, **options), None


AttentionInterface.register(NAME, attention)  # at import, which precedes unpickling an enabled model


def _kind(layer: Any, handle: PlanHandle) -> str | None:
    """The layer's attention kind in the plan; None for the only one."""
    if hasattr(layer, "_kind") or len(handle.kinds) == 1:  # an encoder's layer has its own
        return getattr(layer, "_kind", None)
    return str(layer.config.layer_types[layer.layer_idx])


def _expand_kv(layer: Any, compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a layer's own expansion: planned attention gets latent rows as key and value, [1, 1, rows, rope] and
    [1, 1, rows, rank], and expands them where they are read."""
    if layer.config._attn_implementation == NAME:
        return rotated, compressed
    expanded: tuple[Tensor, Tensor] = getattr(type(layer), _EXPAND)(layer, compressed, rotated)
    return expanded


def loader(
    dataset: Any,
    model: Any,
    cluster: Cluster,
    tokens_per_rank: int,
    *,
    dtype: str | None = None,
    sent_gradients: str = "wide",
    **options: Unpack[LoaderOptions],
) -> PlannedLoader:
    """`PlannedLoader` with heads, and masks by kind of layer, from the config of `model`. options: of `PlannedLoader`.

    dtype: of q, k and v, "bf16" if autocast or FSDP casts; by default the parameters' dtype. sent_gradients: see
    `apportion.Model`. Masks in `options` or of the dataset take precedence. Ranks have at least one row, which layers
    need, and short iterations are dropped: evaluate with drop_last=False. Raises ConfigError if `model` is not enabled.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile
    model = model.module if isinstance(model, DistributedDataParallel) else model
    require_enabled(model)
    inner = next((module for module in model.modules() if "_checked" in vars(module)), model)  # inside PEFT's
    if getattr(inner, "_checked", None) is False:
        inner._checked = check_rows(inner, _arguments) and _parts(inner)
    _check_changed(inner)
    if "_checked" in vars(inner):  # may be a copy of the model that was enabled
        wiring.watch.models[inner] = _note_changed
    wiring.watch.add_unknown(model.parameters())
    config = model.config.get_text_config().to_dict()
    own_dtype = next(name for name, value in DTYPES.items() if value == inner.dtype)
    if own_masks(dataset) is None and options.get("masks") is None:
        options["masks"] = masks_of(config)
    planned_model = replace(model_of(config), dtype=dtype or own_dtype, sent_gradients=sent_gradients)
    own_options: LoaderOptions = {"rows_multiple": 1, "drop_last": True, **options}
    result = PlannedLoader(dataset, cluster, planned_model, tokens_per_rank, **own_options)
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", result._form.vocabulary)
    result._form = replace(result._form, vocabulary=embeddings)
    return result


def inputs(batch: PlannedBatch) -> dict[str, Any]:
    """The kwargs of the model's forward; its loss is this rank's share of the step's mean, like `normalised_loss`. If
    samples have `loss_weights`, which the model's loss would ignore, labels are left out, and the model computes none.
    A model that is not enabled refuses the kwargs, and the first optimizer step raises ExecutionError if no attention
    has used the plan."""
    wiring.watch.expect(batch.handle)
    batch.check_unchanged()
    rows = batch.tokens, batch.position_ids, batch.labels
    arguments = _arguments(*rows, max(batch.valid_tokens, 1), batch.batch.last_position, batch.handle)
    if WEIGHTS in batch.fields:
        del arguments["labels"], arguments["shift_labels"]
    # keeps the batch until forward checks it: trainers fetch a step's kwargs first, and keep only these
    arguments[LAST]._batch = batch
    return arguments | hf_vision.arguments(batch)


def _arguments(
    tokens: Tensor, positions: Tensor, labels: Tensor, valid: float, last: int, handle: Any
) -> dict[str, Any]:
    rows = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    rows |= {"shift_labels": labels}  # shifted before sharding: a row's label may be another rank's token
    options = {"num_items_in_batch": valid, "use_cache": False, "past_key_values": _NoCache()}
    options |= {NAME: handle, LAST: positions.new_tensor([last])}
    return {**{name: tensor[None] for name, tensor in rows.items()}, **options}


# ---- hooks of an enabled model


class _NoCache:
    """A cache that raises an error when unplanned attention reads it."""

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Cache, name):
            raise AttributeError(name)
        rule = "rows of a plan reached attention that does not use the plan"
        remedy = (
            f"call hf.enable(model), also for a loaded copy, and pass on {NAME!r} and the other arguments"
        )
        raise ConfigError("model", "its own attention", rule, remedy)


def _check_labels(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises ConfigError unless labels are shifted and a rank's loss is its share of the step's mean."""
    handle = kwargs.get(NAME)
    if handle is None:
        return None
    if not is_compiling() and model._wrong is not None:
        raise model._wrong
    if kwargs.get("logits_to_keep"):
        rule = "would omit rows from the loss"
        remedy = "leave it out, and set the labels of the other rows to -100"
        raise ConfigError("logits_to_keep", "a number", rule, remedy)
    if not is_compiling() and model._checked and model.loss_function != model._checked[0]:
        rule = "was replaced after hf.enable, which checks that it is a sum over rows"
        raise ConfigError("loss_function", str(model.loss_function), rule, "call hf.enable(model) again")
    expected = {} if is_compiling() else _label_kwargs(model, handle)
    for name in ("shift_labels", "num_items_in_batch", "labels"):
        actual = kwargs.get(name)
        if actual is None:
            if name != "labels" and kwargs.get("labels") is not None:
                rule = "must accompany labels: a plan's labels are shifted, and the mean is over all ranks"
                raise ConfigError(name, None, rule, "call model(**hf.inputs(batch))")
        elif name in expected and not torch.equal(torch.as_tensor(actual).double().cpu(), expected[name]):
            rule = "differs from the batch's, so the ranks' shares would not add up to one mean"
            remedy = "put labels into the samples, or compute another loss with ap.normalised_loss"
            raise ConfigError(name, "changed", rule, remedy)
    return args, _without_guard(kwargs)


def _label_kwargs(model: Any, handle: Any) -> dict[str, Tensor]:
    """The labels of a batch and their number; except on CPUs, only in the model's first forward, since copying
    them waits for the device."""
    batch = wiring.watch.find_batch(handle)
    if batch is None or (model.device.type != "cpu" and hasattr(model, "_labels_checked")):
        return {}
    model._labels_checked = True
    labels, valid = batch.labels[None].cpu().double(), max(batch.valid_tokens, 1)
    return {"shift_labels": labels, "labels": labels, "num_items_in_batch": torch.tensor(valid).double()}


def _check_inputs(base: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises ConfigError for arguments that would change the mask, and for positions that are not the plan's."""
    handle = kwargs.get(NAME)
    if torch.is_grad_enabled() and base.training and not is_compiling():
        base._ran.add(handle is not None)
        wiring.watch.own_loss = True
    if handle is None:
        if not is_compiling():
            _refuse_rows(kwargs.get("input_ids", next(iter(args), None)))
        return None
    base._served.clear()
    kwargs = _without_guard(kwargs)
    for name in _MASKING:
        if kwargs.get(name) is not None:
            rule = "conflicts with the plan, which already contains the mask"
            type_name = type(kwargs[name]).__name__
            raise ConfigError(name, type_name, rule, "leave it out; pass masks= to the loader")
    if not isinstance(handle, Rehearsal):
        _check_positions(base, handle, kwargs.get("position_ids"))
        if not is_compiling():
            _check_windows(base, handle)
            if base._chunk is not None:
                _check_chunks(base, handle)
    return args, kwargs


def _refuse_rows(tokens: Any) -> None:
    """Raises ConfigError if a model gets a rank's rows without the plan: attention would see only these rows."""
    for batch in wiring.watch.batches if isinstance(tokens, Tensor) else ():
        rows = batch.tokens
        if batch.handle.communicator.ranks == 1 or not tokens.numel() or tokens.numel() != rows.numel():
            continue
        is_view = tokens.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        is_copy = not wiring.watch.settled and torch.equal(tokens.flatten().cpu(), rows.cpu())
        is_own = is_copy and not torch.is_grad_enabled() and _are_texts(batch, tokens.shape[-1])
        if is_view or (is_copy and not is_own):
            rule = "are only this rank's rows of the texts, and the model ran without the plan"
            raise ConfigError("input_ids", "batch.tokens", rule, "call model(**hf.inputs(batch))")


def _are_texts(batch: PlannedBatch, length: int) -> bool:
    """True if every group of `length` rows of a rank is the start of one sample: such rows may be evaluated as texts,
    without a plan."""
    samples, positions = (x.cpu().reshape(-1, length) for x in (batch.sample_ids, batch.position_ids))
    return bool((samples == samples[:, :1]).all() and (positions == torch.arange(length)).all())


def _check_windows(base: Any, handle: PlanHandle) -> None:
    """Compares the plan with windows that the config has got since `enable`: only the masks of unplanned attention
    follow them, and not the layers. Raises ConfigError."""
    layers = _layers(base)
    for layer, window in zip(layers, _windows(base, layers), strict=True):
        if window not in (None, getattr(layer, "_window", window)):
            handle.check(handle.kind(_kind(layer, handle)), window, None, str(layer.layer_idx))


def _check_chunks(base: Any, handle: PlanHandle) -> None:
    """Raises ConfigError if the plan's mask of chunked layers lets a token see another chunk, or not all of its own. A
    plan does not record this, but the batch does; masks of other types are not compared."""
    batch: Any = wiring.watch.find_batch(handle)
    if batch is None:
        return
    whole, kind = batch.batch, CHUNKED if len(handle.kinds) > 1 else handle.kinds[0]
    specs = whole.masks[kind].specs
    expected = tuple(_chunked(spec, base._chunk) for spec in specs)
    if expected != specs:
        masks = {kind: replace(whole.masks[kind], specs=expected)}
        chunked = Batch(whole.lengths, masks)
        if chunked.area(kind) != whole.area(kind):
            rule = f"layers of {type(base).__name__} see chunks of {base._chunk} tokens"
            remedy = f"pass masks={{{kind!r}: ap.masks.chunked({base._chunk})}}, or mask= to ap.Samples"
            raise ConfigError("masks", kind, rule, remedy)


def _chunked(spec: Mask, size: int) -> Mask:
    if isinstance(spec, Documents):
        return replace(spec, mask=_chunked(spec.mask, size))
    return Chunked(size) if isinstance(spec, Causal | Chunked | SlidingWindow) else spec


def _without_guard(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not isinstance(value, _NoCache)}


def _check_positions(base: Any, handle: PlanHandle, positions: Tensor | None) -> None:
    """Compares position ids; except on CPUs, only in the model's first forward, since it waits for the device."""
    remedy = "pass batch.position_ids[None] by name"
    if positions is None:
        raise ConfigError("position_ids", None, "a model without them counts a rank's rows from 0", remedy)
    if is_compiling():  # comparing row counts would compile a graph for each plan
        return
    if positions.shape[-1] != handle.padded_rows:
        rule = f"this rank has {handle.padded_rows} rows"
        raise ConfigError("position_ids.shape", tuple(positions.shape), rule, remedy)
    if positions.numel() != handle.padded_rows or (
        positions.device.type != "cpu" and hasattr(base, "_compared")
    ):
        return
    base._compared = True
    if not torch.equal(positions.flatten()[: handle.rows].cpu(), handle.position_ids):
        raise ConfigError("position_ids", "other ids", "must be the position ids of the plan's rows", remedy)


def _check_layers(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Raises ExecutionError if an attention layer did not use the handle."""
    if kwargs.get(NAME) is None:
        return
    if missing := sorted(base._planned - base._served):
        names = f"layers [{', '.join(missing)}] of {type(base).__name__}"
        rule = "did not use the plan: they were replaced, skipped, or use another implementation"
        raise ExecutionError(f"{names} {rule}; call hf.enable when the model is complete")
    base._served.clear()  # restores the state that torch.compile guards on


def _begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    config = module.config.get_text_config()
    if kwargs.get(NAME) is not None and config._attn_implementation != NAME:
        module._unplanned, config._attn_implementation = config._attn_implementation, NAME
    if module._rotary and kwargs.get(NAME) is not None and kwargs.get(LAST) is None:
        rule = "rotary embeddings may look at the largest position of the whole microbatch"
        raise ConfigError(LAST, None, rule, "call the model with hf.inputs(batch)")
    for rotary in module._rotary:
        rotary._last = kwargs.get(LAST)


def _end(module: Any, args: Any, output: Any) -> None:
    for rotary in module._rotary:
        rotary._last = None
    if module._unplanned is not None:
        module.config.get_text_config()._attn_implementation, module._unplanned = module._unplanned, None


def _is_rotary(module: Any) -> bool:
    """True for a rotary embedding; `dynamic` and `longrope` derive frequencies from a call's largest position id."""
    parameters = signature(type(module).forward).parameters
    table = "position_ids" in parameters and not any(True for _ in module.parameters())
    return table and not hasattr(module, "_encodes")


def _append_last(rotary: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Appends a row with the largest position of the microbatch to this rank's rows, for a rotary embedding."""
    if rotary._last is None:
        return None
    bound = signature(rotary.forward).bind(*args, **kwargs)
    ids = bound.arguments["position_ids"]
    bound.arguments["position_ids"] = torch.cat((ids, rotary._last.expand(*ids.shape[:-1], 1)), -1)
    return bound.args, bound.kwargs


def _drop_last(rotary: Any, args: Any, output: Any) -> Any:
    """Drops the appended row of cos and sin [..., rows + 1, width], or of one tensor of complex numbers."""
    if rotary._last is None:
        return output
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(part[..., :-1, :] for part in output)


def _share_loss(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Replaces the router's auxiliary loss, which is not a sum over rows, with this rank's share of the whole
    microbatch's loss. Raises the errors of `check_share`."""
    handle = kwargs.get(NAME)
    own_loss = getattr(output, "aux_loss", None)
    loss = getattr(output, "loss", None)
    if handle is not None and own_loss is not None:
        output.aux_loss = _balance_loss(output.router_logits, model.num_experts_per_tok, handle)
        if loss is not None:
            output.loss = loss = loss + model.router_aux_loss_coef * (output.aux_loss - own_loss)
    if isinstance(handle, PlanHandle) and loss is not None:
        check_share(loss, wiring.watch.find_batch(handle))


def _balance_loss(logits: Sequence[Tensor], top_k: int, handle: PlanHandle) -> Tensor:
    """E · sum over experts of (share of the tokens sent there) · (mean probability), Switch Transformers (arXiv
    2101.03961), eq. 4 to 6: shares over all ranks, times this rank's contribution to the mean. A collective."""
    probabilities = torch.stack([layer[: handle.rows] for layer in logits]).softmax(-1)
    probabilities = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    experts = probabilities.shape[-1]
    counts = one_hot(probabilities.topk(top_k).indices, experts).sum((0, 1, 2))
    local = [*counts.tolist(), probabilities[..., 0].numel()]
    *total, rows = torch.tensor(handle.communicator.all_gather(local, "routed tokens")).sum(0).tolist()
    weights = probabilities.new_tensor(total) / rows
    share: Tensor = experts * (weights * probabilities.sum((0, 1)) / rows).sum()
    return share
