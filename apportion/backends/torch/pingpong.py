"""Two halves of a microbatch that take turns on every rank: one computes while the other's rounds are under way.

    ping   pre · dispatch                compute             collect · post · pre' · dispatch'
    pong                 pre · dispatch            compute                                    collect · post · …

(DistCA, section 4.1, figure 7: `post` and the next layer's `pre` are one piece of work without communication.) A half
is a generator that yields at the segment boundaries of its programs; `take_turns` walks both, in forward and, with the
layers in reverse, in backward. Every rank takes the same turns and cuts its programs at the same rounds, so the rounds
of both halves are launched in one order everywhere: two programs may share process groups, and nothing can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from apportion.backends.torch.autograd import (
    Home,
    backward_home,
    check_qkv,
    or_zeros,
    prepare,
    sink_gradient,
)
from apportion.backends.torch.calls import Attending
from apportion.backends.torch.executor import Layer, Projection
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.memory.arenas import Parts
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.tensors import PHASES, Tensor as Name

#: (hidden [n, E], position_ids [n]) -> q [n, Hq, D], k [n, Hk, D], v [n, Hk, Dv]
Pre = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
#: (the layer's hidden [n, E], out [n, Hq, Dv]) -> hidden [n, E]
Post = Callable[[Tensor, Tensor], Tensor]
#: of a layer: kind, score, sinks
Rule = tuple[str, Score, Tensor | None]


class HalfCall:
    """One execution of one program, in segments."""

    def __init__(self, handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer) -> None:
        self._layer = layer
        self._segments = handle.segments(kind, phase)
        self._machine = prepare(handle, kind, phase, home, layer)
        self.memory = self._machine.memory

    def dispatch(self) -> None:
        self._machine.execute(self._segments.dispatch)

    def compute(self) -> None:
        self._machine.execute(self._segments.compute)

    def collect(self) -> None:
        self._machine.execute(self._segments.collect)
        self._machine.close()

    def output(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out and lse of a forward call that has collected."""
        return self._machine.output(dtype)

    def input_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of a backward call that has collected."""
        return self._machine.input_gradients(dtype)

    def turns(self) -> Iterator[None]:
        """All three, with the other half's turn after each of the first two."""
        self.dispatch()
        yield
        self.compute()
        yield
        self.collect()

    @property
    def sink_gradient(self) -> Tensor | None:
        return sink_gradient(self._layer, self._machine.gradients)

    @property
    def param_gradients(self) -> list[Tensor]:
        """Of the params of the layer's projection, in their order."""
        return self._machine.gradients.params


def take_turns(halves: Iterable[Iterator[None]]) -> None:
    """Runs every half up to its next yield, one after the other, until all are done."""
    for _ in zip_longest(*halves):
        pass


def paired(handles: Sequence[PlanHandle], phase: str, rules: Iterable[Rule]) -> AbstractContextManager[None]:
    """The call of both halves on all ranks, of a layer or several."""
    plans = " and ".join(handle.name for handle in handles)
    layers = (
        Attending(plans, kind, f"ping-pong {phase}", score.scale, score.softcap, sinks is not None)
        for kind, score, sinks in rules
    )
    return handles[0].call(", then ".join(map(str, layers)))


def agree(handles: Iterable[PlanHandle], kind: str) -> None:
    """All collectives that a handle's first use takes, before any turn. Raises ExecutionError where ranks differ."""
    for handle in handles:
        handle.agree()
        handle.segments(kind, PHASES[0])


# --- attention alone


class PairedQkv(NamedTuple):
    """What forward leaves for backward, of one half."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def qkv_home(handle: PlanHandle, qkv: Sequence[Tensor]) -> dict[Name, Parts]:
    """What a forward program is given that does not project. Raises ExecutionError for wrong shapes and dtypes."""
    q, k, v = qkv
    check_qkv(handle, q, k, v)
    return {Name.Q: (q,), Name.KV: (k, v)}


class PairedAttention(torch.autograd.Function):
    """(q, k, v) of both halves -> out of both."""

    @staticmethod
    def forward(
        ctx: Any,
        handles: tuple[PlanHandle, PlanHandle],
        kind: str,
        score: Score,
        sinks: Tensor | None,
        *qkv: Tensor,
    ) -> tuple[Tensor, ...]:
        parts, layer = (qkv[:3], qkv[3:]), Layer(score, sinks)
        with paired(handles, "forward", [(kind, score, sinks)]):
            homes = [qkv_home(handle, part) for handle, part in zip(handles, parts, strict=True)]
            calls = [
                HalfCall(h, kind, "forward", home, layer) for h, home in zip(handles, homes, strict=True)
            ]
            take_turns(call.turns() for call in calls)
        results = [call.output(qkv[0].dtype) for call in calls]
        ctx.save_for_backward(sinks, *parts[0], *results[0], *parts[1], *results[1])
        ctx.handles, ctx.kind, ctx.score = handles, kind, score
        return tuple(out for out, _ in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dos: Tensor) -> tuple[Any, ...]:
        sinks, *saved = ctx.saved_tensors
        kept, layer = (PairedQkv(*saved[:5]), PairedQkv(*saved[5:])), Layer(ctx.score, sinks)
        homes = [
            backward_home(qkv_home(handle, half[:3]), half.out, half.lse, do)
            for handle, half, do in zip(ctx.handles, kept, dos, strict=True)
        ]
        with paired(ctx.handles, "backward", [(ctx.kind, ctx.score, sinks)]):
            calls = [
                HalfCall(h, ctx.kind, "backward", home, layer)
                for h, home in zip(ctx.handles, homes, strict=True)
            ]
            take_turns(call.turns() for call in calls)
        grads = [call.input_gradients(half.q.dtype) for call, half in zip(calls, kept, strict=True)]
        return None, None, None, _total(call.sink_gradient for call in calls), *grads[0], *grads[1]


def _total(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Their sum, of those that are there."""
    found = [part for part in parts if part is not None]
    return reduce(torch.add, found) if found else None


# --- layers


@dataclass(frozen=True)
class Piece:
    """A layer as the function below sees it: work before and after attention, and `params`, whose gradients it yields.

    project: the projection for plans that call it themselves, head group by head group; others call `pre`. kind: an
    attention kind of both plans.
    """

    pre: Pre
    post: Post
    params: tuple[Tensor, ...]
    kind: str
    score: Score
    sinks: Tensor | None = None
    project: Projection | None = None

    @property
    def rule(self) -> Rule:
        return self.kind, self.score, self.sinks

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The params that want a gradient."""
        return tuple(param for param in self.params if param.requires_grad)

    def layer(self, projects: bool) -> Layer:
        """What its calls know, of plans that project or do not."""
        return Layer(self.score, self.sinks, *((self.project, self.wanted) if projects else ()))


class Kept(NamedTuple):
    """A half's layer between forward and backward: the leaves x and `out`, the graphs of `pre` from x to `qkv` (empty
    where the plan projects) and of `post` from (x, out) to y, and what the forward program was given and left."""

    x: Tensor
    qkv: tuple[Tensor, ...]
    given: dict[Name, Parts]
    out: Tensor
    lse: Tensor
    y: Tensor


class BothGradients:
    """Sums over both halves, for the tensors that want one."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._wanted = {id(param): param for param in params if param.requires_grad}
        self._sums: dict[int, Tensor] = {}

    def add(self, params: Iterable[Tensor | None], grads: Iterable[Tensor | None]) -> None:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and id(param) in self._wanted:
                old = self._sums.get(id(param))
                self._sums[id(param)] = grad if old is None else old + grad

    def of(self, params: Iterable[Tensor]) -> list[Tensor | None]:
        return [self._sums.get(id(param)) for param in params]


def forward_turns(
    handle: PlanHandle, pieces: Sequence[Piece], hidden: list[Tensor], kept: list[Kept] | None
) -> Iterator[None]:
    """One half's forward. hidden: one tensor, replaced layer by layer; kept: filled, unless there is no backward."""
    positions = handle.position_ids.to(hidden[0].device)
    keep = kept is not None
    for piece in pieces:
        x, projects = hidden[0].detach().requires_grad_(keep), handle.projects(piece.kind)
        qkv = () if projects else _before(piece, x, positions, keep)
        given: dict[Name, Parts] = {Name.X: (x, positions)} if projects else qkv_home(handle, qkv)
        call = HalfCall(handle, piece.kind, "forward", given, piece.layer(projects))
        yield from call.turns()
        out, lse = call.output(x.dtype if projects else qkv[0].dtype)
        y = _after(piece, x, out.requires_grad_(keep), keep)
        hidden[0] = y.detach()
        if kept is not None:
            # a plan that projects may keep projected rows at home
            rows = dict(call.memory.home)
            del rows[Name.O]
            kept.append(Kept(x, qkv, {**rows, **given}, out, lse, y))


def _before(piece: Piece, x: Tensor, positions: Tensor, keep: bool) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(keep):
        qkv = piece.pre(x, positions)
    require_listed(qkv, (x, *piece.params))
    return qkv


def _after(piece: Piece, x: Tensor, out: Tensor, keep: bool) -> Tensor:
    with torch.set_grad_enabled(keep):
        y = piece.post(x, out)
    require_listed((y,), (x, out, *piece.params))
    return y


def backward_turns(
    handle: PlanHandle, pieces: Sequence[Piece], kept: list[Kept], dhidden: list[Tensor], sums: BothGradients
) -> Iterator[None]:
    """One half's backward. dhidden: one tensor, replaced layer by layer, last layer first; kept: emptied."""
    for piece in reversed(pieces):
        half, wanted = kept.pop(), piece.wanted
        dx, do, *grads = _pull((half.y,), (dhidden[0],), (half.x, half.out, *wanted))
        sums.add(wanted, grads)
        home = backward_home(half.given, half.out, half.lse, or_zeros(do, half.out))
        call = HalfCall(handle, piece.kind, "backward", home, piece.layer(projects=not half.qkv))
        yield from call.turns()
        dx_before, *grads = _pull_before(call, half, wanted)
        sums.add(wanted, grads)
        sums.add((piece.sinks,), (call.sink_gradient,))
        dhidden[0] = or_zeros(_total((dx, dx_before)), half.x)


def _pull_before(call: HalfCall, half: Kept, wanted: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of x and of the params, of what came before attention."""
    if half.qkv:
        return _pull(half.qkv, call.input_gradients(half.qkv[0].dtype), (half.x, *wanted))
    (dx,) = call.memory.home_rows(Name.DX)
    grads = zip(call.param_gradients, wanted, strict=True)
    return dx.to(half.x.dtype), *(grad.to(param.dtype) for grad, param in grads)


def _pull(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs of a saved graph, whose buffers are freed."""
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    ys, dys = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, inputs, dys, allow_unused=True)


def require_listed(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
    """Raises ConfigError where the graph of the outputs begins at a tensor that is not known: its gradient, or that of
    what it was made from, would be lost without a word."""
    listed = list(known)
    leaves, seen = {id(tensor) for tensor in listed}, {tensor.grad_fn for tensor in listed}
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise ConfigError(
                "params",
                f"{len(listed)} tensors",
                f"pre or post uses one of shape {tuple(leaf.shape)} that wants a gradient and is not among them",
                "list the parameters of all that pre and post call",
            )
        nodes += [before for before, _ in node.next_functions]


class PairedLayers(torch.autograd.Function):
    """Hidden states of both halves -> those after some layers. keep: whether backward may come."""

    @staticmethod
    def forward(
        ctx: Any,
        handles: tuple[PlanHandle, PlanHandle],
        pieces: Sequence[Piece],
        keep: bool,
        ping: Tensor,
        pong: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden: list[list[Tensor]] = [[ping], [pong]]
        kept: list[list[Kept] | None] = [[] if keep else None for _ in handles]
        halves = zip(handles, hidden, kept, strict=True)
        with paired(handles, "forward", [piece.rule for piece in pieces]):
            take_turns(forward_turns(handle, pieces, mine, own) for handle, mine, own in halves)
        ctx.handles, ctx.pieces, ctx.kept, ctx.params = handles, pieces, kept, params
        return tuple(half[0] for half in hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dhidden: Tensor) -> tuple[Any, ...]:
        if not all(ctx.kept):
            raise ExecutionError(
                "backward of ping-pong layers has run: what it needs is freed, run forward again"
            )
        sums, grads = BothGradients(ctx.params), [[grad] for grad in dhidden]
        halves = zip(ctx.handles, ctx.kept, grads, strict=True)
        with paired(ctx.handles, "backward", [piece.rule for piece in ctx.pieces]):
            take_turns(backward_turns(handle, ctx.pieces, own, mine, sums) for handle, own, mine in halves)
        return None, None, None, grads[0][0], grads[1][0], *sums.of(ctx.params)


def attend_pair(
    handles: tuple[PlanHandle, PlanHandle],
    kind: str,
    qkv: Sequence[Tensor],
    sinks: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor]:
    """Planned attention of both halves, differentiable in their q, k, v and in sinks."""
    agree(handles, kind)
    return PairedAttention.apply(handles, kind, score, sinks, *qkv)  # type: ignore[no-untyped-call,no-any-return]


def run_pair(
    handles: tuple[PlanHandle, PlanHandle], pieces: Sequence[Piece], ping: Tensor, pong: Tensor
) -> tuple[Tensor, Tensor]:
    """Both halves through the layers, differentiable in both hidden states, the layers' params and their sinks."""
    agree(handles, pieces[0].kind)
    tensors = [tensor for piece in pieces for tensor in (*piece.params, piece.sinks) if tensor is not None]
    params = tuple({id(tensor): tensor for tensor in tensors}.values())
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (ping, pong, *params))
    inputs = (handles, tuple(pieces), keep, ping, pong, *params)
    return PairedLayers.apply(*inputs)  # type: ignore[no-untyped-call,no-any-return]
