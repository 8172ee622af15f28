"""Ping-pong of two halves of a microbatch on every rank: one computes while the other's rounds are in flight.

    ping   pre · dispatch                compute             collect · post · pre' · dispatch'
    pong                 pre · dispatch            compute                                    collect · post · …

(DistCA, section 4.1, figure 7: `post` and the next layer's `pre` are one piece of work without communication.) A half
is a generator that yields at the segment boundaries of its programs; `take_turns` walks both, in forward and, with the
layers in reverse, in backward. Every rank takes the same turns and cuts its programs at the same rounds, so all ranks
launch the rounds of both halves in the same order: two programs may share process groups, and nothing can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from apportion.backends.torch.autograd import (
    Home,
    attention_call,
    backward_home,
    inputs_of,
    or_zeros,
    prepare,
    qkv_home,
    run,
    sink_gradient,
)
from apportion.backends.torch.executor import Layer, Projection, TorchMachine, without_hooks
from apportion.backends.torch.graphs import nodes
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.memory.arenas import Parts
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.tensors import PHASES, Tensor as Name

#: (hidden [n, E], position_ids [n]) -> q [n, Hq, D], k [n, Hk, D], v [n, Hk, Dv]
Pre = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
#: (the layer's hidden [n, E], out [n, Hq, Dv]) -> hidden [n, E]
Post = Callable[[Tensor, Tensor], Tensor]
#: function that executes one program once, like `_turns`
Execute = Callable[[PlanHandle, str, str, Home, Layer], Generator[None, None, TorchMachine]]


def _turns(
    handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer
) -> Generator[None, None, TorchMachine]:
    """Executes one program once; yields to the other half after each of its first two segments."""
    segments, machine = handle.segments(kind, phase), prepare(handle, kind, phase, home, layer)
    machine.execute(segments.dispatch)
    yield
    machine.execute(segments.compute)
    yield
    machine.execute(segments.collect)
    machine.close()
    return machine


def _run_whole(
    handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer
) -> Generator[None, None, TorchMachine]:
    """Like `_turns`, without yielding."""
    yield from ()
    return run(handle, kind, phase, home, layer)


def take_turns(halves: Iterable[Iterator[None]]) -> None:
    """Runs every half up to its next yield, one after the other, until all are done."""
    for _ in zip_longest(*halves):
        pass


def pair_scope(
    handles: Sequence[PlanHandle], phase: str, pieces: Iterable[Piece]
) -> AbstractContextManager[None]:
    """Opens the call of both halves on all ranks, for one or more layers."""
    plans = " and ".join(handle.name for handle in handles)
    calls = (
        attention_call(plans, piece.kind, f"ping-pong {phase}", piece.score, piece.sinks is not None)
        for piece in pieces
    )
    return handles[0].call(", then ".join(calls))


def _total(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of the tensors that are not None; None if all are."""
    present = [part for part in parts if part is not None]
    return reduce(torch.add, present) if present else None


# --- layers


@dataclass(frozen=True)
class Piece:
    """A layer in three parts: work before and after attention, and `params`, whose gradients backward yields.

    project: the projection for plans that call it themselves, head group by head group; other plans use `pre`. kind:
    an attention kind of both plans.
    """

    pre: Pre
    post: Post
    params: tuple[Tensor, ...]
    kind: str
    score: Score
    sinks: Tensor | None = None
    project: Projection | None = None

    @property
    def trainable(self) -> tuple[Tensor, ...]:
        """The params that require a gradient."""
        return tuple(param for param in self.params if param.requires_grad)

    def layer(self, projects: bool) -> Layer:
        """The `Layer` of this layer's attention calls. projects: whether the plans call `project`."""
        return Layer(self.score, self.sinks, *((self.project, self.trainable) if projects else ()))


class Tape(NamedTuple):
    """State of a half's layer between forward and backward: the leaves x and `out`, the graphs of `pre` from x to `qkv`
    (empty if the plan projects) and of `post` from (x, out) to y, and the forward program's inputs and results."""

    x: Tensor
    qkv: tuple[Tensor, ...]
    inputs: dict[Name, Parts]
    out: Tensor
    lse: Tensor
    y: Tensor


class GradientSums(dict[Tensor, Tensor]):
    """Sums of gradients, of one batch or over both halves, by the tensors that require them."""

    def add(self, params: Iterable[Tensor | None], grads: Iterable[Tensor | None]) -> None:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and param is not None and param.requires_grad:
                self[param] = self[param] + grad if param in self else grad


def forward_turns(
    handle: PlanHandle,
    pieces: Sequence[Piece],
    hidden: list[Tensor],
    tapes: list[Tape] | None,
    execute: Execute = _turns,
) -> Iterator[None]:
    """Runs one half's forward. hidden: one tensor, replaced layer by layer; tapes: filled for backward, or None."""
    positions = pad(handle.position_ids, (0, handle.padding)).to(hidden[0].device)
    keep = tapes is not None
    for piece in pieces:
        x, projects = hidden[0].detach().requires_grad_(keep), handle.projects(piece.kind)
        qkv: tuple[Tensor, ...] = (
            () if projects else _run_traced(piece.pre, (x, positions), piece.params, keep)
        )
        home: dict[Name, Parts] = {Name.X: (x, positions)} if projects else qkv_home(handle, *qkv)
        machine = yield from execute(handle, piece.kind, "forward", home, piece.layer(projects))
        out, lse = machine.output(x.dtype if projects else qkv[0].dtype)
        y = _run_traced(piece.post, (x, out.requires_grad_(keep)), piece.params, keep)
        hidden[0] = y.detach()
        if tapes is not None:
            tapes.append(Tape(x, qkv, inputs_of(machine, home), out, lse, y))


def _run_traced(
    work: Callable[..., Any], inputs: Sequence[Tensor], params: Sequence[Tensor], keep: bool
) -> Any:
    """Runs `pre` or `post` on its arguments, with a graph if `keep`."""
    with torch.set_grad_enabled(keep):
        outputs = work(*inputs)
    require_listed([outputs] if isinstance(outputs, Tensor) else outputs, (*inputs, *params))
    return outputs


def backward_turns(
    handle: PlanHandle,
    pieces: Sequence[Piece],
    tapes: list[Tape],
    dhidden: list[Tensor],
    sums: GradientSums,
    execute: Execute = _turns,
) -> Iterator[None]:
    """Runs one half's backward. dhidden: one tensor, replaced layer by layer, last layer first; tapes: emptied."""
    for piece in reversed(pieces):
        half, params = tapes.pop(), piece.trainable
        dx, do, *grads = _gradients((half.y,), (dhidden[0],), (half.x, half.out, *params))
        sums.add(params, grads)
        home = backward_home(half.inputs, half.out, half.lse, or_zeros(do, half.out))
        layer = piece.layer(projects=not half.qkv)
        machine = yield from execute(handle, piece.kind, "backward", home, layer)
        dx_before, *grads = _pre_gradients(machine, half, params)
        sums.add(params, grads)
        sums.add((piece.sinks,), (sink_gradient(layer, machine.gradients),))
        dhidden[0] = or_zeros(_total((dx, dx_before)), half.x)


def _pre_gradients(
    machine: TorchMachine, half: Tape, params: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of x and of the params through the work before attention."""
    if half.qkv:
        return _gradients(half.qkv, machine.input_gradients(half.qkv[0].dtype), (half.x, *params))
    grads = zip(machine.gradients.params, params, strict=True)
    return machine.hidden_gradient(half.x.dtype), *(grad.to(param.dtype) for grad, param in grads)


def _gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs of a saved graph; frees the graph's buffers."""
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    ys, dys = zip(*pairs, strict=True)
    with without_hooks(inputs):
        return torch.autograd.grad(ys, inputs, dys, allow_unused=True)


def require_listed(outputs: Iterable[Tensor], allowed: Iterable[Tensor]) -> None:
    """Raises ConfigError if the outputs depend, other than through `allowed`, on a leaf that requires a gradient:
    this gradient would be lost silently."""
    tensors = list(allowed)
    leaves, seen = {id(tensor) for tensor in tensors}, {tensor.grad_fn for tensor in tensors}
    for node in nodes((output.grad_fn for output in outputs), seen.__contains__):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise ConfigError(
                "params",
                f"{len(tensors)} tensors",
                f"pre or post uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is not in params",
                "list the parameters of everything that pre and post call",
            )


def forward_alone(handle: PlanHandle, pieces: Sequence[Piece], x: Tensor, tapes: list[Tape] | None) -> Tensor:
    """Runs one batch through the layers; tapes: see `forward_turns`. `backward_alone` may use another plan of the same
    rows."""
    hidden = [x]
    with pair_scope((handle,), "forward", pieces):
        take_turns([forward_turns(handle, pieces, hidden, tapes, _run_whole)])
    return hidden[0]


def backward_alone(
    handle: PlanHandle, pieces: Sequence[Piece], tapes: list[Tape], dy: Tensor
) -> tuple[Tensor, dict[Tensor, Tensor]]:
    """The gradients of the layers' input and of params. tapes: the state that forward saved; this empties them."""
    sums, dhidden = GradientSums(), [dy]
    with pair_scope((handle,), "backward", pieces):
        take_turns([backward_turns(handle, pieces, tapes, dhidden, sums, _run_whole)])
    return dhidden[0], sums


def serve(handle: PlanHandle, phase: str, pieces: Sequence[Piece], device: torch.device) -> None:
    """Takes part in other ranks' `forward_alone` or `backward_alone`, on a rank without tokens. pieces: the layers;
    their `pre` and `post` are not called."""
    header, rows = handle.slice.header, handle.padded_rows

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=handle.dtype, device=device)

    q, k = zeros(header.q_heads, header.head_dim), zeros(header.kv_heads, header.head_dim)
    home: Home = {Name.Q: (q,), Name.KV: (k, zeros(header.kv_heads, header.v_head_dim))}
    if phase == "backward":
        out = zeros(header.q_heads, header.v_head_dim)
        home = backward_home(home, out, zeros(header.q_heads).double(), out)
    with pair_scope((handle,), phase, pieces):
        for piece in pieces if phase == "forward" else reversed(pieces):
            run(handle, piece.kind, phase, home, piece.layer(projects=False))


class PairedLayers(torch.autograd.Function):
    """Autograd function that runs both halves' hidden states through their layers. pieces: the layers of each half,
    with equal kinds and scores; keep: whether to save state for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        handles: tuple[PlanHandle, PlanHandle],
        pieces: tuple[Sequence[Piece], Sequence[Piece]],
        keep: bool,
        ping: Tensor,
        pong: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden: list[list[Tensor]] = [[ping], [pong]]
        tapes: list[list[Tape] | None] = [[] if keep else None for _ in handles]
        halves = zip(handles, pieces, hidden, tapes, strict=True)
        with pair_scope(handles, "forward", pieces[0]):
            take_turns(forward_turns(*half) for half in halves)
        ctx.handles, ctx.pieces, ctx.kept, ctx.params = handles, pieces, tapes, params
        return tuple(half[0] for half in hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dhidden: Tensor) -> tuple[Any, ...]:
        if not all(ctx.kept):
            raise ExecutionError(
                "backward of ping-pong layers has already run and freed its saved tensors: run forward again"
            )
        sums, grads = GradientSums(), [[grad] for grad in dhidden]
        halves = zip(ctx.handles, ctx.pieces, ctx.kept, grads, strict=True)
        with pair_scope(ctx.handles, "backward", ctx.pieces[0]):
            take_turns(backward_turns(*half, sums) for half in halves)
        return None, None, None, grads[0][0], grads[1][0], *map(sums.get, ctx.params)


def params_of(pieces: Iterable[Piece]) -> tuple[Tensor, ...]:
    """All params and sinks, without duplicates."""
    tensors = (tensor for piece in pieces for tensor in (*piece.params, piece.sinks))
    return tuple({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def run_pair(
    handles: tuple[PlanHandle, PlanHandle],
    pieces: tuple[Sequence[Piece], Sequence[Piece]],
    ping: Tensor,
    pong: Tensor,
) -> tuple[Tensor, Tensor]:
    """Runs both halves through their layers, differentiable in both hidden states, the layers' params and sinks."""
    for handle in handles:  # runs the collectives of its first use before any turn
        handle.agree()
        handle.segments(pieces[0][0].kind, PHASES[0])
    params = params_of([*pieces[0], *pieces[1]])
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (ping, pong, *params))
    return PairedLayers.apply(handles, pieces, keep, ping, pong, *params)  # type: ignore[no-untyped-call,no-any-return]
