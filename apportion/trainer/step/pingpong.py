"""Two halves of a microbatch through the same layers, so that one computes while the other communicates.

    layer = PingPongLayer(pre, post, params=block.parameters())
    for ping, pong in loader.pairs():                            each planned separately, for the same ranks
        hidden_a, hidden_b = ping_pong([layer, ...], hidden_a, hidden_b, ping.handle, pong.handle)

Results and gradients equal those of running the halves in sequence; backward takes turns too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from apportion.backends.torch import pingpong as backend
from apportion.backends.torch.autograd import check_shape
from apportion.backends.torch.executor import Projection
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.pingpong import Post, Pre
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.plan.tables import Header
from apportion.trainer.step.attention import score_of, with_current_autocast

__all__ = ["PingPongLayer", "ping_pong", "ping_pong_attention"]

#: q [rows, Hq, D], k [rows, Hk, D], v [rows, Hk, Dv] of a half
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PingPongLayer:
    """A layer split at its attention, as in DistCA (section 4.1, figure 7).

    pre(hidden [n, E], position_ids [n]) -> q [n, Hq, D], k [n, Hk, D], v [n, Hk, Dv]: norm, projections, RoPE.
    post(hidden [n, E], out [n, Hq, Dv]) -> hidden [n, E]: projection, residuals, FFN; its first argument is the layer's
    own input. Both are called once per half, on a rank's rows of that half, possibly none. params: every tensor that
    they use and that requires a gradient, e.g. `block.parameters()`; a missing one is an error, not a lost gradient.
    kind, scale, softcap, sinks: as in `planned_attention`.

    project(hidden, position_ids, q_heads, kv_heads) -> q, k, v of these heads: replaces `pre`, as in
    `planned_attention_block`; with it the halves' plans may project heads themselves, or not.

    Calling it runs `ping_pong` on this layer; a stack of layers in one `ping_pong` hides more communication, since
    halves do not wait for each other between layers. With torch.compile, create layers outside the compiled region;
    `pre` and `post` may be compiled functions.
    """

    pre: Pre | None
    post: Post
    params: Iterable[Tensor] = ()
    kind: str | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    project: Projection | None = None

    def __post_init__(self) -> None:
        if (self.pre is None) == (self.project is None):
            raise ConfigError(
                "pre", self.pre, "must be the only one of pre and project", "pass one of the two"
            )
        object.__setattr__(self, "params", tuple(self.params))  # may be a generator

    def __call__(
        self, hidden_a: Tensor, hidden_b: Tensor, handle_a: PlanHandle, handle_b: PlanHandle
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = ping_pong((self,), hidden_a, hidden_b, handle_a, handle_b)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ping_pong(
    layers: Iterable[PingPongLayer],
    hidden_a: Tensor,
    hidden_b: Tensor,
    handle_a: PlanHandle,
    handle_b: PlanHandle,
) -> tuple[Tensor, Tensor]:
    """Runs both halves through the layers; every rank calls it, even without tokens.

    hidden_a, hidden_b [rows of that half, E], each in its plan's home layout, with its padding. Returns their hidden
    states after the last layer. Differentiable once in both, and in the layers' params and sinks: one autograd
    function, whose backward frees the tensors that forward saved. It holds the gradients of all params until its end;
    if that is too much, or layers are checkpointed, call it for a few layers at a time. With data parallel wrappers
    (DDP, FSDP2) wrap the module that makes this call.

    Raises ExecutionError for wrong shapes or dtypes and for halves on other ranks, ConfigError for a parameter that is
    not listed and for plans that project heads if a layer has no `project`, UnknownNameError for a kind that a plan
    does not have.
    """
    handles = _same_ranks(handle_a, handle_b)
    for name, hidden, handle in (("hidden_a", hidden_a, handle_a), ("hidden_b", hidden_b, handle_b)):
        check_shape(name, hidden, (handle.padded_rows, *hidden.shape[1:]))
    pieces = [piece_of(layer, handles, hidden_a.device) for layer in layers]
    return backend.run_pair(handles, (pieces, pieces), hidden_a, hidden_b) if pieces else (hidden_a, hidden_b)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ping_pong_attention(
    a: QKV,
    b: QKV,
    handle_a: PlanHandle,
    handle_b: PlanHandle,
    kind: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`planned_attention` of both halves in one autograd function: each computes while the other communicates.

    a, b: q, k and v of each half's rows. Returns their out [rows, Hq, Dv]. Raises the errors of `ping_pong`.
    """
    handles = _same_ranks(handle_a, handle_b)
    name, score = _kind(handles, kind), score_of(a[0].shape[-1], scale, softcap)

    def piece(qkv: QKV) -> backend.Piece:
        return backend.Piece(lambda x, positions: qkv, lambda x, out: out, qkv, name, score, sinks)

    ping, pong = (q.new_empty(len(q), 0) for q, _, _ in (a, b))
    return backend.run_pair(handles, ([piece(a)], [piece(b)]), ping, pong)


def piece_of(layer: PingPongLayer, handles: Sequence[PlanHandle], device: torch.device) -> backend.Piece:
    """The backend's piece of a layer, for plans that have its kind."""
    kind, header = _kind(handles, layer.kind), handles[0].slice.header
    if layer.project is None and any(handle.projects(kind) for handle in handles):
        rule = "the plan of a half projects a few heads at a time, which `pre` cannot do"
        raise ConfigError("pre", layer.pre, rule, "pass `project` instead, as in planned_attention_block")
    score, pre = score_of(header.head_dim, layer.scale, layer.softcap), _pre(layer, header)
    project = layer.project and with_current_autocast(layer.project, device.type)
    return backend.Piece(pre, layer.post, tuple(layer.params), kind, score, layer.sinks, project)


def _pre(layer: PingPongLayer, header: Header) -> Pre:
    """`pre` for plans that do not project: the layer's own, or the projection of all heads at once."""
    if layer.project is None:
        return cast("Pre", layer.pre)
    heads = tuple(range(header.q_heads)), tuple(range(header.kv_heads))
    project = layer.project
    return lambda hidden, position_ids: project(hidden, position_ids, *heads)


def _kind(handles: Sequence[PlanHandle], name: str | None) -> str:
    first, second = (handle.kind(name) for handle in (handles[0], handles[-1]))
    if first != second:
        rule = f"is {first!r} of one half and {second!r} of the other"
        raise ConfigError("kind", name, rule, "plan both with the same kinds")
    return first


def _same_ranks(a: PlanHandle, b: PlanHandle) -> tuple[PlanHandle, PlanHandle]:
    positions = [(handle.communicator.rank, handle.communicator.ranks) for handle in (a, b)]
    if positions[0] != positions[1]:
        first, second = (f"rank {rank} of {ranks}" for rank, ranks in positions)
        rule = "both halves run on the same ranks"
        raise ExecutionError(f"one half's handle is of {first}, the other's of {second}: {rule}")
    return a, b
