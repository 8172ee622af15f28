"""Rank pool jobs with halves that take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apportion import Model, PingPongLayer, ping_pong, ping_pong_attention, sum_gradients
from apportion.backends.interp import Step
from apportion.backends.torch.executor import TaskMachine, TorchMachine
from apportion.backends.torch.handle import PlanHandle
from apportion.demo.decoder import Layer
from apportion.trainer.step.attention import Communicator, planned_attention, planned_attention_block
from tests.ranks.jobs import Shard, attention, handle_of, inputs_of, leaf, to_arrays

Halves = tuple[tuple[bytes, NDArray[Any]], tuple[bytes, NDArray[Any]]]


def attention_pair(
    comm: Communicator, kind: Any, sinks: NDArray[Any] | None, options: dict[str, Any], shards: Any
) -> tuple[list[list[Any]], list[list[Any]]]:
    """out, dq, dk, dv, dsinks of each half: run together, and one after the other. Each half's own dsinks need two
    runs together, with backward only from that half."""
    halves = []
    for which_half in (0, 1):
        handles, leaves = zip(*(inputs_of(comm, shard) for shard in shards), strict=True)
        logits = None if sinks is None else leaf(sinks, handles[0].dtype)
        outs = ping_pong_attention(*leaves, *handles, kind, sinks=logits, **options)
        outs[which_half].backward(torch.from_numpy(shards[which_half].do).to(handles[which_half].dtype))
        grads = [None if x is None else x.grad for x in (*leaves[which_half], logits)]
        halves.append(to_arrays([outs[which_half], *grads]))
    return halves, [attention(comm, kind, sinks, options, shard) for shard in shards]


class Stack(nn.Module):
    """Decoder layers, equal on all ranks, with learned sinks as parameters outside of the layers."""

    def __init__(self, model: Model, kinds: tuple[str | None, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(model, kind) for kind in kinds)
        self.sinks = nn.ParameterList(nn.Parameter(torch.randn(model.q_heads)) for _ in kinds)
        self.double()

    def forward(
        self,
        ping: Tensor,
        pong: Tensor,
        *handles: Any,
        turns: bool = True,
        at_a_time: int = 0,
        project: bool = False,
    ) -> Any:
        make = self._projecting if project else self._piece
        pieces = [make(layer, sinks) for layer, sinks in zip(self.layers, self.sinks, strict=True)]
        if not turns:
            return [one_half(pieces, x, handle) for x, handle in zip((ping, pong), handles, strict=True)]
        for first in range(0, len(pieces), at_a_time or len(pieces)):
            ping, pong = ping_pong(pieces[first : first + (at_a_time or len(pieces))], ping, pong, *handles)
        return ping, pong

    def _piece(self, layer: Layer, sinks: Tensor) -> PingPongLayer:
        return PingPongLayer(layer.pre, layer.post, layer.parameters(), layer.kind, softcap=3.0, sinks=sinks)

    def _projecting(self, layer: Layer, sinks: Tensor) -> PingPongLayer:
        return replace(self._piece(layer, sinks), pre=None, project=Project(layer))


class Project:
    def __init__(self, layer: Layer) -> None:
        self.all = layer.pre

    def __call__(
        self, hidden: Tensor, position_ids: Tensor, q_heads: tuple[int, ...], kv_heads: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        q, k, v = self.all(hidden, position_ids)
        return q[:, list(q_heads)], k[:, list(kv_heads)], v[:, list(kv_heads)]


def one_half(pieces: list[PingPongLayer], hidden: Tensor, handle: PlanHandle) -> Tensor:
    for piece in pieces:
        options = {"kind": piece.kind, "softcap": piece.softcap, "sinks": piece.sinks}
        if piece.project is None:
            out = planned_attention(*piece.pre(hidden, handle.position_ids), handle, **options)
        else:
            given = (hidden, handle.position_ids, handle, piece.project, piece.params)
            out = planned_attention_block(*given, **options)
        hidden = piece.post(hidden, out)
    return hidden


def stack_pair(
    comm: Communicator, model: Model, kinds: tuple[str | None, ...], mode: str, halves: Halves
) -> list[list[NDArray[Any]]]:
    """Outputs, input gradients and weight gradients of both halves: taking turns, and one half after the other."""
    results = []
    for turns in (True, False):
        stack, handles = Stack(model, kinds), [handle_of(comm, piece) for piece, _ in halves]
        inputs = [leaf(hidden, torch.float64) for _, hidden in halves]
        if turns:
            outs = _outputs(stack, inputs, handles, mode)
        else:
            outs = stack(*inputs, *handles, turns=False, project=mode == "project")
        sum((out.square() * (1 + half)).sum() for half, out in enumerate(outs)).backward()
        tensors = [*outs, *(x.grad for x in inputs), *(w.grad for w in stack.parameters())]
        results.append([t.detach().numpy() for t in tensors])
    return results


def _outputs(stack: Stack, inputs: list[Tensor], handles: list[Any], mode: str) -> Any:
    if mode in ("checkpoint", "reentrant"):
        return checkpoint(stack, *inputs, *handles, use_reentrant=mode == "reentrant")
    return stack(*inputs, *handles, at_a_time=int(mode == "single"), project=mode == "project")


def without_gradients(comm: Communicator, model: Model, halves: Halves) -> bool:
    """Whether taking turns without gradients gives the same hidden states and saves nothing for backward."""
    stack, handles = Stack(model, (None,)), [handle_of(comm, piece) for piece, _ in halves]
    inputs = [torch.from_numpy(hidden) for _, hidden in halves]
    expected = [out.detach() for out in stack(*inputs, *handles)]
    with torch.no_grad():
        found = stack(*inputs, *handles)
    return all(torch.equal(a, b) and not b.requires_grad for a, b in zip(expected, found, strict=True))


def pair_on_channels(comm: Communicator, shards: tuple[Shard, Shard]) -> list[list[bytes]]:
    """The bytes of the results if both halves share a process group, if each has its own, and if they share two."""
    ping, own = Communicator(dist.group.WORLD), Communicator(dist.new_group())
    two = Communicator.shared()
    found = []
    for comms in ((ping, ping), (ping, own), (two, two)):
        handles, halves = zip(*map(inputs_of, comms, shards), strict=True)
        outs = ping_pong_attention(*halves, *handles)
        torch.autograd.backward(list(outs), [torch.from_numpy(shard.do) for shard in shards])
        tensors = *outs, *(x.grad for half in halves for x in half)
        found.append([x.detach().numpy().tobytes() for x in tensors])
    return found


def wrong_pair(comm: Communicator, case: str, model: Model, halves: Halves) -> None:
    handles = [handle_of(comm, piece) for piece, _ in halves]
    inputs = [leaf(hidden, torch.float64) for _, hidden in halves]
    layer = Stack(model, (None,)).layers[0]
    params = list(layer.parameters())
    pieces = [PingPongLayer(layer.pre, layer.post, params[:-1] if case == "unlisted" else params)]
    order = 1 if comm.rank or case != "swapped" else -1
    inputs[0] = inputs[0][:-1] if case == "shape" else inputs[0]
    outs = ping_pong(pieces, *inputs[::order], *handles[::order])
    for _ in range(2):
        outs[0].sum().backward(retain_graph=True)


def frozen(comm: Communicator, model: Model, halves: Halves) -> tuple[list[bool], list[bool], float]:
    """With some weights frozen, hidden states without gradients, and one half unused: which weights have gradients when
    taking turns and when not, and their largest difference."""
    grads = []
    for turns in (True, False):
        stack, handles = Stack(model, (None, None)), [handle_of(comm, piece) for piece, _ in halves]
        stack.layers[0].requires_grad_(False)
        inputs = [torch.from_numpy(hidden) for _, hidden in halves]
        stack(*inputs, *handles, turns=turns)[1].square().sum().backward()
        grads.append([w.grad for w in stack.parameters()])
    present = [[g is not None for g in half] for half in grads]
    pairs = [pair for pair in zip(*grads, strict=True) if None not in pair]
    return present[0], present[1], max(float((a - b).abs().max()) for a, b in pairs)


def wrapped(comm: Communicator, wrapper: str | None, model: Model, halves: Halves) -> list[NDArray[Any]]:
    """The gradients of all weights of a stack under a wrapper."""
    stack, handles = Stack(model, (None, None)), [handle_of(comm, piece) for piece, _ in halves]
    called = stack
    if wrapper == "fsdp2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        called = fully_shard(stack, mesh=DeviceMesh.from_group(comm._groups[0], "cpu"))
    elif wrapper is not None:
        called = nn.parallel.DistributedDataParallel(stack, process_group=comm._groups[0])
        called = sum_gradients(called) if wrapper == "summed ddp" else called
    ping, pong = called(*(torch.from_numpy(hidden) for _, hidden in halves), *handles)
    (ping.square().sum() + 2 * pong.square().sum()).backward()
    grads = [weight.grad for weight in stack.parameters()]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for g in grads]


def launches(comm: Communicator, model: Model, halves: Halves) -> list[tuple[str, int, int]]:
    """(phase, half, round) of every launch of two layers on this rank, forward and backward, in order."""
    stack, handles = Stack(model, (None, None)), [handle_of(comm, piece) for piece, _ in halves]
    programs = {
        id(handle.program("default", phase)): (phase, half)
        for half, handle in enumerate(handles)
        for phase in ("forward", "backward")
    }
    found, launch = [], TorchMachine.launch

    def recorded(machine: TaskMachine, step: Step) -> None:
        found.append((*programs[id(machine.program)], step.round))
        launch(machine, step)

    with mock.patch.object(TorchMachine, "launch", recorded):
        outs = stack(*(leaf(hidden, torch.float64) for _, hidden in halves), *handles)
        torch.autograd.backward([out.sum() for out in outs])
    return found
