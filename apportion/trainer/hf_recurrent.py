"""Recurrent layers of transformers under a plan: Gated DeltaNet, Kimi Delta Attention, Mamba-2, lightning attention.

    layer(hidden, apportion=handle) ──projections──► causal_conv1d_fn(…, apportion=…) ──► planned_conv
                                                     mamba2_chunk_scan(…, apportion=…) ──► planned_scan ──norm, gate──►

Layers keep their own code except for functions that look at more than one row: these are wrapped once, and behave as
before unless a handle is among their arguments. Written for transformers 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, softplus
from transformers.activations import ACT2FN

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.recurrent import chunk_recurrence, normalised
from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.rehearsal import Rehearsal
from apportion.trainer.step.recurrence import planned_conv, planned_scan

NAME = "apportion"  # kwarg of the handle


@dataclass(frozen=True)
class Mixing:
    """Takes the handle's place among the arguments of a layer's functions. name: the layer's, for errors."""

    handle: PlanHandle | Rehearsal
    name: str

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [1, rows, channels] -> the same shape."""
        if isinstance(self.handle, PlanHandle):
            result: Tensor = planned_conv(x, weight, self.handle, bias=bias)
            return result
        lengths = self.handle.lengths

        def run() -> Tensor:
            parts = [part.T[None] for part in torch.split(x[0], lengths)]
            overlap = weight.shape[1] - 1
            outs = [
                conv1d(part, weight[:, None], bias, padding=overlap, groups=len(weight)) for part in parts
            ]
            return torch.cat([out[..., : out.shape[-1] - overlap] for out in outs], -1).mT

        return self.handle.replay(f"the input rows of the convolution of {self.name}", [x], run)

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Like `planned_scan`, with a leading dimension of 1 in all tensors."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        if isinstance(self.handle, PlanHandle):
            result: Tensor = planned_scan(None, q, k, v, g, beta, self.handle, scale=scale)
            return result
        ends = torch.tensor([0, *self.handle.lengths]).cumsum(0)

        def run() -> Tensor:
            return chunk_recurrence(q, k, v, g, beta, scale, cu_seqlens=ends)[0]

        inputs = [x for x in (q, k, v, g, beta) if x is not None]
        return self.handle.replay(f"the input rows of the recurrence of {self.name}", inputs, run)


def mixers_of(model: Any) -> list[Any]:
    """The recurrent layers of a model, with or without an adapter."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and _is_recurrent(module)]


def _is_recurrent(module: Any) -> bool:
    return hasattr(module, "conv1d") or type(module).__name__.endswith("LightningAttention")


def is_known(mixer: Any) -> bool:
    """True if there is an adapter for the layer."""
    home = sys.modules[type(mixer).__module__]
    return type(mixer).__name__ == _LIGHTNING or any(hasattr(home, name) for name in _SCANS)


def adapt(mixer: Any, served: set[Any], key: Any) -> None:
    """Makes a known layer (see `is_known`) run under a plan if it gets a handle, and add its `key` to `served`."""
    mixer._served = served
    mixer.register_forward_pre_hook(_MixingHook(type(mixer), key), with_kwargs=True)


class _MixingHook:
    """Passes a layer its `Mixing` in place of the handle. Replaces the functions that layers of its class call, also
    when it is unpickled, in another process."""

    def __init__(self, cls: type, key: Any) -> None:
        self._cls, self._key = cls, key
        for name, planned in {**_SCANS, **_OTHERS}.items():
            _replace(sys.modules[cls.__module__], name, planned)
        if cls.__name__ == _LIGHTNING:
            _replace(cls, "forward", _lightning)

    def __reduce__(self) -> tuple[Any, ...]:
        return _MixingHook, (self._cls, self._key)

    def __call__(self, mixer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get(NAME) is None:
            return None
        mixer._served.add(self._key)
        return args, {**kwargs, NAME: Mixing(kwargs[NAME], f"layer {mixer.layer_idx}")}


def _replace(home: Any, name: str, planned: Callable[..., Any]) -> None:
    """Makes a function of layers call `planned(mixing, ...)` if a handle's `Mixing` is among its arguments."""
    original = getattr(home, name, None)
    if original is None or hasattr(original, "unplanned"):
        return

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        mixing = kwargs.get(NAME)
        return planned(mixing, *args, **kwargs) if isinstance(mixing, Mixing) else original(*args, **kwargs)

    replacement.unplanned = original  # type: ignore[attr-defined]
    setattr(home, name, replacement)


# ---- the functions under a plan


def _conv(
    mixing: Mixing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Any:
    out = mixing.conv(x.mT.to(weight.dtype), weight, bias).mT
    return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)


def _delta(mixing: Mixing, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    if kwargs["use_qk_l2norm_in_kernel"]:
        q, k = normalised(q), normalised(k)
    return mixing.scan(q, k, v, kwargs["g"], kwargs["beta"]), None


def _mamba2(mixing: Mixing, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
    dt = dt.to(accumulator_dtype(x.dtype))
    dt = softplus(dt + kwargs["dt_bias"]).clamp(*kwargs["dt_limit"])
    out = mixing.scan(C, B, (x * dt[..., None]).to(x.dtype), A * dt, None, 1.0)
    return out + kwargs["D"][:, None] * x


def _lightning(mixing: Mixing, layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    shape = *hidden_states.shape[:2], layer.num_attention_heads, 3 * layer.head_dim
    q, k, v = layer.act_fn(layer.qkv_proj(hidden_states)).view(shape).split(layer.head_dim, -1)
    decay = -layer.slope_rate.flatten().expand(*shape[:3])
    out = layer.norm(mixing.scan(q, k, v, decay, None, 1.0).flatten(2))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * out), None


_LIGHTNING = "MiniMaxLightningAttention"
_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _mamba2,
}
#: without a fused result, layers call the parts
_OTHERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
}
