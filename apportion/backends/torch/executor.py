"""One rank's program on torch tensors: one handler per op, in program order, no decisions.

    home rows (q, k, v | hidden) ──forward──► O home rows  ──backward with dO──► dQ, dKV home rows | dX

A machine is one call: its arenas and rounds in flight are its own, so any number of microbatches may be
between forward and backward. Partials merge in program order, never in order of arrival: the same plan gives
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apportion.backends.interp import Machine, Operand, Program, RowOp, Step
from apportion.backends.torch.columns import pick
from apportion.backends.torch.kernels import (
    NEG_INF,
    Band,
    Score,
    accumulator_dtype,
    attend,
    attend_grad,
    merge,
)
from apportion.backends.torch.memory import Memory, Parts, View
from apportion.backends.torch.transport import Communicator, Flight, Tile
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import Tensor as Name

#: (hidden [n, E], position_ids [n], query heads, KV heads) -> q [n, Hq', D], k [n, Hk', D], v [n, Hk', Dv]
Projection = Callable[[Tensor, Tensor, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor, Tensor]]

#: where a tile arrives: its rows, and their memory or, where heads are not evenly spaced, what is copied into it
Arrival = tuple[View, Parts]


@dataclass(frozen=True)
class Layer:
    """What a call knows beside the plan. `params` are the tensors whose gradients `project` yields."""

    score: Score
    sinks: Tensor | None = None  # [Hq] learned logits
    project: Projection | None = None
    params: tuple[Tensor, ...] = ()
    dlse: Tensor | None = None  # [rows, Hq] gradient of the LSE of home rows, for backward


@dataclass
class Gradients:
    """Sums over home rows: of the sinks [Hq], and of the parameters of `project`."""

    sinks: Tensor | None = None
    params: list[Tensor] = field(default_factory=list)


class TorchMachine(Machine[View]):
    """One execution of one program on this rank."""

    def __init__(self, program: Program, memory: Memory, layer: Layer, comm: Communicator) -> None:
        super().__init__(program)
        self.memory, self._layer, self._comm = memory, layer, comm
        self._flights: dict[int, tuple[Flight, list[Arrival]]] = {}
        sinks = layer.sinks
        self.gradients = Gradients(
            None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float64, device=sinks.device),
            [torch.zeros_like(param, dtype=accumulator_dtype(param.dtype)) for param in layer.params],
        )
        self.bind()

    def view(self, operand: Operand) -> View:
        return self.memory.view(operand)

    def _read(self, *operands: int) -> Iterator[Parts]:
        return (self.views[i].read() for i in operands)

    # --- rounds

    def launch(self, step: Step) -> None:
        views = [self.views[t.operand] for t in step.transfers]
        tiles = [Tile(t.send, t.peer, v.read(), v.wire) for t, v in zip(step.transfers, views, strict=True)]
        flight = self._comm.launch(step.channel, step.mode, tiles, self.memory.device)
        arriving = [(view, tile.parts) for view, tile in zip(views, tiles, strict=True) if not tile.send]
        self._flights[step.round] = flight, arriving

    def wait(self, step: Step) -> None:
        flight, arriving = self._flights.pop(step.round)
        flight.wait()
        for view, parts in arriving:
            view.write(parts)

    # --- attention

    def attend(self, step: Step) -> None:
        for task in step.tasks:
            (q,), (k, v), (o, lse) = self._read(task.q, task.kv, task.o)
            if task.first:
                _clear_output(o, lse)
            attend(q, k, v, o, lse, Band(task.dmin, task.dmax, task.kv_of), self._layer.score)
            self.views[task.o].write((o, lse))

    def attend_grad(self, step: Step) -> None:
        for task in step.grads:
            (q,), (k, v), (do,), (lse, delta) = self._read(task.q, task.kv, task.do, task.delta)
            (dq,), (dk, dv) = self._read(task.dq, task.dkv)
            _clear(((dq,) if task.first_dq else ()) + ((dk, dv) if task.first_dkv else ()))
            band = Band(task.dmin, task.dmax, task.kv_of)
            attend_grad(q, k, v, do, lse, delta, dq, dk, dv, band, self._layer.score)
            self.views[task.dq].write((dq,))
            self.views[task.dkv].write((dk, dv))

    # --- rows

    def delta(self, step: Step) -> None:
        for row in step.rowops:
            (do,), (o, lse) = self._read(row.a, row.b)
            wide = accumulator_dtype(o.dtype)
            delta = (do.to(wide) * o.to(wide)).sum(-1)
            if self._layer.dlse is not None:
                delta -= _lse_gradient(self._layer.dlse, self.views[row.b].operand, lse)
            self.views[row.c].fill((lse, delta))
            self._add_sink_gradients(self.views[row.c].operand.heads, lse, delta)

    def _add_sink_gradients(self, heads: tuple[int, ...], lse: Tensor, delta: Tensor) -> None:
        if self._layer.sinks is None or self.gradients.sinks is None:
            return
        index = torch.tensor(heads, device=lse.device)
        sinks = self._layer.sinks.to(lse.dtype)[index]
        share = (sinks - lse).exp().masked_fill(lse == NEG_INF, 0.0)
        self.gradients.sinks[index] -= (share * delta).sum(0, dtype=torch.float64)

    def merge(self, step: Step) -> None:
        for row in step.rowops:
            part, whole = self._read(row.a, row.c)
            if row.first:
                _copy(part, whole)
            else:
                merge(*whole, *part)
            self.views[row.c].write(whole)

    def add(self, step: Step) -> None:
        for row in step.rowops:
            self._accumulate(row.c, self.views[row.a].read(), row.first)

    def _accumulate(self, index: int, parts: Sequence[Tensor], first: bool) -> None:
        whole = self.views[index].read()
        for old, new in zip(whole, parts, strict=True):
            old.copy_(new) if first else old.add_(new)
        self.views[index].write(whole)

    def copy(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].fill(self.views[row.a].read())

    def clear(self, step: Step) -> None:
        for row in step.rowops:
            whole = self.views[row.c].read()
            _clear(whole)
            if self.views[row.c].operand.tensor == Name.O:
                _clear_output(*whole)
            self.views[row.c].write(whole)

    def finish(self, step: Step) -> None:
        if self._layer.sinks is None:
            return
        for row in step.rowops:
            o, lse = self.views[row.c].read()
            index = torch.tensor(self.views[row.c].operand.heads, device=o.device)
            sinks = self._layer.sinks.detach().to(lse.dtype)[index].expand_as(lse)
            merge(o, lse, torch.zeros_like(o), sinks)
            self.views[row.c].write((o, lse))

    # --- projection

    def project(self, step: Step) -> None:
        for row in step.rowops:
            hidden, positions = self.views[row.a].read()
            with torch.no_grad():
                q, k, v = self._projected(hidden, positions, row)
            if row.b:
                self.views[row.b].fill((q,))
            if row.c:
                self.views[row.c].fill((k, v))

    def project_grad(self, step: Step) -> None:
        for row in step.rowops:
            hidden, positions = self.views[row.a].read()
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                q, k, v = self._projected(leaf, positions, row)
                outputs = [*((q,) if row.b else ()), *((k, v) if row.c else ())]
                grads = [part for i in (row.b, row.c) if i for part in self.views[i].read()]
                self._push_back(row, leaf, outputs, grads)

    def _push_back(self, row: RowOp, leaf: Tensor, outputs: list[Tensor], grads: list[Tensor]) -> None:
        cast = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
        inputs = (leaf, *self._layer.params)
        dx, *dparams = torch.autograd.grad(outputs, inputs, cast, allow_unused=True)
        self._accumulate(row.d, (torch.zeros_like(leaf) if dx is None else dx,), row.first)
        for total, grad in zip(self.gradients.params, dparams, strict=True):
            if grad is not None:
                total += grad

    def _projected(self, hidden: Tensor, positions: Tensor, row: RowOp) -> tuple[Tensor, Tensor, Tensor]:
        if self._layer.project is None:
            raise ExecutionError("the plan projects hidden states itself: call planned_attention_block")
        q_heads, kv_heads = (self.views[i].operand.heads if i else () for i in (row.b, row.c))
        return self._layer.project(hidden, positions, q_heads, kv_heads)


def _lse_gradient(dlse: Tensor, operand: Operand, lse: Tensor) -> Tensor:
    """The operand's part of dlse [rows, Hq]: dS = P * (dP - (delta - dLSE)). A row without keys has none."""
    if not operand.is_home:
        raise ExecutionError(
            f"delta of {operand}: the gradient of LSE is at home, and so must this operand be"
        )
    part = pick(dlse.narrow(0, operand.row, operand.rows), operand.columns)
    return part.masked_fill(lse == NEG_INF, 0.0)


def _clear(parts: Parts) -> None:
    for part in parts:
        part.zero_()


def _clear_output(o: Tensor, lse: Tensor) -> None:
    """The identity of merging."""
    o.zero_()
    lse.fill_(NEG_INF)


def _copy(source: Parts, target: Parts) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)
