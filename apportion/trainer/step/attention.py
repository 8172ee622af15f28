"""Planned attention functions of layers.

out = planned_attention(q, k, v, handle, kind="global")                     q, k, v of this rank's rows
out, lse = planned_attention(q, k, v, handle, return_lse=True)              to merge it with other attention
out = planned_latent_attention(q, compressed, rotated, handle, expand, params)  sends latent rows (MLA)
out = planned_attention_block(hidden, position_ids, handle, project, params)    the plan projects the heads

`with check_kernels(True):` checks for NaN and an LSE of +inf after every kernel; it waits for the device each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from apportion.backends.torch.autograd import attend, attend_layer
from apportion.backends.torch.executor import Expansion, Layer, Projection
from apportion.backends.torch.graphs import nodes
from apportion.backends.torch.handle import PlanHandle as PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.kernels.checks import check_kernels as check_kernels
from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.remap import find_move, remap
from apportion.backends.torch.transport import Communicator as Communicator
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.tensors import Tensor as Name
from apportion.trainer.step import own_loss, wiring
from apportion.trainer.step.projection import check_projection

P = ParamSpec("P")
R = TypeVar("R")

_IN_PLAN = "the mask is part of the plan: pass it to the batch that you plan"
_DROPOUT = "attention dropout is not supported: forward and backward would draw masks on different ranks"

# argument of well-known attention functions -> what to do instead
_INSTEAD = {
    **dict.fromkeys(("dropout_p", "dropout"), _DROPOUT),
    **dict.fromkeys(("attn_mask", "attention_mask", "block_mask"), _IN_PLAN),
    "is_causal": f"{_IN_PLAN}, and pass causal=True to check that it is causal",
    "alibi_slopes": "ALiBi is not supported: tasks number rows within a tile and have no token positions",
    "attn_bias": "additive biases are not supported: their rows would have to be sent with the keys",
    "score_mod": "score modifications are not supported, except scale, softcap and sinks",
    "window_size": "the mask is part of the plan: write window=left + 1, or window=-1 for (-1, -1)",
    "sliding_window": "the mask is part of the plan: write window= with the same number of tokens",
    **dict.fromkeys(("scaling", "softmax_scale", "sm_scale"), "write scale="),
    **dict.fromkeys(("logits_soft_cap", "logit_cap"), "write softcap="),
    **dict.fromkeys(("s_aux", "softmax_offset"), "write sinks="),
}
_OPTIONS = "kind, scale, softcap, sinks, return_lse, window, causal and layer"


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: PlanHandle,
    kind: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    return_lse: bool = False,
    window: int | None = None,
    causal: bool | None = None,
    layer: str | int | None = None,
    **unsupported: Any,
) -> Any:
    """Attention over the whole microbatch for this rank's query rows; a collective: ranks without tokens call it too.

    q [rows, Hq, D], k [rows, Hk, D], v [rows, Hk, Dv]: the rank's rows in the plan's home layout (a leading
    batch dimension of 1 is kept). kind: attention kind, optional if the plan has only one. scale: D^-1/2 by default.
    softcap: c tanh(score / c). sinks [Hq]: learned logits added to each row's softmax sum.
    window and causal declare the layer's own mask, and are checked against the plan's mask of the kind: window is the
    number of tokens that a row sees up to itself (except images, whose tokens all see each other), -1 for no limit;
    causal is True if no row sees a later one, False if all masks let rows see later ones. None declares nothing; masks
    with more than 8 distinct diagonals are not checked. layer: its name in messages, ignored under torch.compile.
    Returns out [rows, Hq, Dv] in q's dtype; rows that see no key are 0. With return_lse, a pair: out, and the
    log-sum-exp of each row's scores, lse [rows, Hq] in float32 (float64 for float64), including the sink; -inf for rows
    that see no key. Both are differentiable once in q, k, v and sinks.

    Raises ConfigError for dropout, ALiBi, biases and masks as arguments, for a window or causal that differs from the
    plan's, and without a handle; UnknownNameError for a kind that the plan does not have, ExecutionError for wrong
    shapes or dtypes, cross-attention, and ranks that hold different plans.

    It is a single op, `torch.ops.apportion.attend`, eager or compiled, so selective activation checkpointing can save
    its output and skip the communication on recompute:

        def keep_attention(ctx, op, *args, **kwargs):
            attends = op == torch.ops.apportion.attend.default
            return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, keep_attention)
        out = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
    """
    _refuse(unsupported)
    _check_arguments(handle, window)
    batched = q.dim() == 4
    if batched:
        q, k, v = (without_batch(name, x, 3) for name, x in zip("qkv", (q, k, v), strict=True))
    local_layer = Layer(score_of(q.shape[-1], scale, softcap), sinks)
    declared = window, causal, _layer_name(layer)

    def run() -> tuple[Tensor, ...]:
        return attend(handle, handle.kind(kind), (q, k, v), local_layer, return_lse, declared)

    out, lse = run() if is_compiling() else run_recorded(handle, run, q, k, v)
    out = out.unsqueeze(0) if batched else out
    if not return_lse:
        return out
    lse = lse.to(accumulator_dtype(q.dtype))
    return out, lse.unsqueeze(0) if batched else lse


def planned_latent_attention(
    q: Tensor,
    compressed: Tensor,
    rotated: Tensor,
    handle: PlanHandle,
    expand: Expansion,
    params: Iterable[Tensor],
    kind: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    window: int | None = None,
    causal: bool | None = None,
    layer: str | int | None = None,
    **unsupported: Any,
) -> Tensor:
    """Multi-head latent attention: ranks exchange tokens' latent rows, and the layer's own projection runs where
    attention is computed, including for other ranks' rows.

    q [rows, Hq, D], compressed [rows, rank] (normed), rotated [rows, rope] (with its positions), under a plan whose
    model has `latent`. expand(compressed [n, rank], rotated [n, rope], heads) returns k [n, len(heads), D] and v [n,
    len(heads), Dv] for these query heads, in order; it must be row-wise, since it gets any part of any rank's rows.
    params: the tensors it uses that need gradients; their gradients include contributions of other ranks' rows, and are
    summed over ranks like those of all weights. Backward calls `expand` again. Otherwise like `planned_attention`.
    Returns out [rows, Hq, Dv].
    """
    _refuse(unsupported)
    _check_arguments(handle, window)
    name, score, weights = handle.kind(kind), score_of(q.shape[-1], scale, softcap), tuple(params)
    rows = q, rotated.unsqueeze(1), compressed.unsqueeze(1)
    home = {Name.Q: rows[:1], Name.KV: rows[1:]}
    declared = window, causal, _layer_name(layer)
    expand_now = with_current_autocast(expand, q.device.type)

    def run() -> tuple[Tensor, ...]:
        return (
            attend_layer(
                handle, name, home, Layer(score, sinks, expand=expand_now, params=weights), declared
            ),
        )

    result = (run() if is_compiling() else run_recorded(handle, run, *rows))[0]
    if not (wiring.watch.settled or is_compiling()):
        heads = tuple(range(handle.slice.header.q_heads))
        check_projection(lambda c, r: expand_now(c, r, heads), weights, compressed, rotated)
    return result


def planned_attention_block(
    hidden: Tensor,
    position_ids: Tensor,
    handle: PlanHandle,
    project: Projection,
    params: Iterable[Tensor],
    kind: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Projection and attention in one call, so that a plan may project a few heads at a time.

    hidden [rows, E] and position_ids [rows] of the rank's rows. project(hidden, position_ids, q_heads,
    kv_heads) returns q [n, len(q_heads), D], k [n, len(kv_heads), D], v [n, len(kv_heads), Dv] for the heads
    in this order (bias, norm, RoPE, LoRA inside; either list may be empty); params: the tensors it uses
    that need gradients. If the plan does not project, all heads are projected at once. Autocast holds
    for `project` in backward too, and rows are cast to the plan's dtype under it. Returns out [rows, Hq,
    Dv]. Raises the errors of `planned_attention`.
    """
    name = handle.kind(kind)
    header = handle.slice.header
    heads = tuple(range(header.q_heads)), tuple(range(header.kv_heads))
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    if not handle.projects(name):
        q, k, v = project(hidden, position_ids, *heads)
        if autocast:
            q, k, v = (rows.to(handle.dtype) for rows in (q, k, v))
        result: Tensor = planned_attention(q, k, v, handle, name, scale, softcap, sinks)
        return result
    score, weights = score_of(header.head_dim, scale, softcap), tuple(params)
    project_now = with_current_autocast(project, device)
    if autocast:
        hidden = hidden.to(handle.dtype)

    def run() -> tuple[Tensor, ...]:
        home = {Name.X: (hidden, position_ids)}
        return (attend_layer(handle, name, home, Layer(score, sinks, project_now, params=weights)),)

    (result,) = run_recorded(handle, run, hidden)
    if not (wiring.watch.settled or is_compiling()):
        check_projection(lambda x, at: project_now(x, at, *heads), weights, hidden, position_ids)
    return result


def run_recorded(
    handle: PlanHandle, run: Callable[[], tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Calls `run`. In the first forward also records its result, for the check that reruns the calling model."""
    watch, trial = wiring.watch, wiring.watch.trial
    watch.record_attention(handle)
    if trial is None or handle.feeds:
        watch.require_all_rows("an encoder")
        return run()
    if trial.part is not None:
        return trial.part.answer(*inputs)
    trial.eager = True
    try:
        results, trial.handle = run(), ref(handle)
    finally:
        trial.eager = False
    if results[0].requires_grad and not watch.settled:
        results[0].register_hook(partial(watch.note_backward, handle))  # type: ignore[no-untyped-call]
    module = trial.keep(handle, results, partial(watch.tensors, handle), watch.models)
    if module is not None:
        enabled = any(item in watch.models for item in module.modules())
        (watch.track if enabled else watch.add_unknown)(module.parameters())
        watch.modules[module] = None
        own_loss.check_next_forward(module)
    elif handle.communicator.ranks > 1 and not (trial.met or watch.settled):  # by code outside any module
        leaves = (getattr(node, "variable", None) for node in nodes([results[0].grad_fn]))
        watch.add_unknown(item for item in leaves if isinstance(item, nn.Parameter))
    return results


def with_current_autocast(function: Callable[P, R], device: str) -> Callable[P, R]:
    """Wraps a layer's function, which backward calls again, to use this call's autocast there too."""
    if not torch.is_autocast_enabled(device):
        return function
    dtype = torch.get_autocast_dtype(device)

    def cast(*args: P.args, **kwargs: P.kwargs) -> R:
        # before 2.10 torch keeps weights that it casts without grad mode, and later uses of them get no gradient
        with torch.autocast(device, dtype, cache_enabled=False):
            return function(*args, **kwargs)

    return cast


def planned_remap(x: Tensor, handle: PlanHandle, source: str, target: str) -> Tensor:
    """Moves rows of layout `source` to layout `target`, for layers that need a layout other than attention's.

    x [rows of source, ...] -> [rows of target, ...], differentiable; every rank calls it. Raises UnknownNameError if
    the plan has no move between the two, ExecutionError for a different number of rows.
    """
    wiring.watch.require_all_rows("planned_remap")
    return remap(x, handle, *find_move(handle, source, target))


def score_of(width: int, scale: float | None, softcap: float | None) -> Score:
    """Scale and softcap for heads of that width. Raises ConfigError."""
    refuse_gradients("multiply q by a learnt scale; detach others", scale=scale, softcap=softcap)
    if softcap is not None and not softcap > 0:
        raise ConfigError("softcap", softcap, "must be positive", "pass None for no softcap")
    return Score(width**-0.5 if scale is None else scale, softcap)


def refuse_gradients(remedy: str, **constants: Any) -> None:
    """Raises ConfigError for arguments that are tensors with a gradient, which would be lost."""
    for name, value in constants.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigError(
                name, "a learnt tensor", "is a constant here, and would get no gradient", remedy
            )


def _layer_name(layer: str | int | None) -> str | None:
    """A layer's name in messages; None under torch.compile, which would make a graph for each layer."""
    return None if layer is None or is_compiling() else str(layer)


def _refuse(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _INSTEAD:
            unknown = f"planned_attention() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{unknown}; options are {_OPTIONS}")
        is_default = value is None or value is False or (name in ("dropout_p", "dropout") and not value)
        if not is_default:
            raise ConfigError(name, value, "is not an argument here", _INSTEAD[name])


def _check_arguments(handle: object, window: object) -> None:
    if not isinstance(handle, PlanHandle):
        rule = "planned attention runs under a plan"
        raise ConfigError("handle", handle, rule, "pass batch.handle of this microbatch")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer)):
        remedy = "pass the number of tokens that a row sees up to itself"
        raise ConfigError("window", window, "must be an integer", remedy)


def without_batch(name: str, tensor: Tensor, dims: int) -> Tensor:
    """The tensor, of `dims` dimensions, without its batch dimension of 1. Raises ExecutionError."""
    if tensor.dim() != 1 + dims or tensor.shape[0] != 1:
        rule = "a batch dimension must be 1, with sequences concatenated"
        raise ExecutionError(f"{name} has shape {tuple(tensor.shape)}: {rule}")
    return tensor[0]
