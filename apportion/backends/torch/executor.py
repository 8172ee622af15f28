"""Executes one rank's program on torch tensors: one handler per op, in program order; makes no decisions.

    home rows (q, k, v | hidden) ──forward──► O home rows  ──backward with dO──► dQ, dKV home rows | dX

A machine is one call with its own arenas and rounds in flight, so any number of microbatches may have
run forward and not yet backward. Partials merge in program order, never in order of arrival: the same plan gives
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from apportion.backends.interp import GradTask, Machine, Operand, Program, RowOp, Step
from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.backends.torch.kernels.attention import (
    NEG_INF,
    PLAIN,
    Band,
    Kernel,
    Score,
    attend,
    attend_grad,
    merge,
)
from apportion.backends.torch.memory.arenas import Arenas, Memory, Parts, View
from apportion.backends.torch.memory.arrays import DTYPES, accumulator_dtype
from apportion.backends.torch.memory.head_columns import index_of, pick
from apportion.backends.torch.memory.latent_rows import LatentRun, T, latent_runs
from apportion.backends.torch.memory.rounds import Message, Round, Rounds, aligned
from apportion.backends.torch.transport import Flight, Sizes, Transport
from apportion.ir.errors import ExecutionError
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Tensor as Name

#: rows per step of backward through a projection
_TILE_ROWS = 4096
#: (hidden [n, E], position_ids [n], query heads, KV heads) -> q [n, Hq', D], k [n, Hk', D], v [n, Hk', Dv]
Projection = Callable[[Tensor, Tensor, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor, Tensor]]

#: (latent rows: compressed [n, rank], rotated [n, rope], query heads) -> k [n, Hq', D], v [n, Hq', Dv]
Expansion = Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]
ALL_HEADS = slice(None)


@dataclass(frozen=True)
class Layer:
    """Inputs of a call, apart from the plan. `params` are the tensors whose gradients `project` or `expand` yields."""

    score: Score
    sinks: Tensor | None = None  # [Hq] learned logits
    project: Projection | None = None
    expand: Expansion | None = None
    params: tuple[Tensor, ...] = ()
    dlse: Tensor | None = None  # [rows, Hq] gradient of the LSE of home rows, for backward


@dataclass
class Gradients:
    """Gradients summed over home rows: `sinks` [Hq], None if there are no rows, and those of the layer's `params`."""

    sinks: Tensor | None = None
    params: list[Tensor] = field(default_factory=list)


class Keys(NamedTuple, Generic[T]):
    """Keys and values of a task for some of its query heads: k [n, Hk, D], v [n, Hk, Dv], the KV column of each query
    head, and the gradient accumulators; dk and dv are unused in forward."""

    task: T
    heads: slice
    kv_of: tuple[int, ...]
    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


class LoadRequest(NamedTuple):
    """One rank's program for a device. rows: home rows; hidden: width of X; envelope: sizes to pad to."""

    columns: ProgramSet
    program: Program
    device: torch.device
    rows: int
    hidden: int = 0
    envelope: Envelope = UNPADDED


@dataclass(frozen=True)
class Executable:
    """A rank's program, ready for any number of calls on one device."""

    program: Program
    rounds: Rounds
    arenas: Arenas

    @property
    def table_numbers(self) -> int:
        """The number of integers in the tables on the device; 0 if there are none."""
        return 0


class TorchMachine(Machine[View]):
    """One execution of one program on this rank; implements rounds and projections for all engines.

    An engine is a subclass with the other ops.
    """

    def __init__(self, executable: Executable, memory: Memory, layer: Layer, transport: Transport) -> None:
        super().__init__(executable.program)
        self.memory, self._layer, self._transport, self._rounds = memory, layer, transport, executable.rounds
        self._flights: dict[int, Flight] = {}
        sums = [torch.zeros_like(param, dtype=accumulator_dtype(param.dtype)) for param in layer.params]
        self.gradients = Gradients(params=sums)
        self.bind()

    def view(self, operand: Operand) -> View:
        return self.memory.view(operand)

    def output(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out [rows, Hq, Dv] in a dtype and lse [rows, Hq], after a forward program has run."""
        o, lse = self.memory.home_rows(Name.O)
        return o.to(dtype), lse

    def input_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in a dtype, after a backward program has run."""
        (dq,), (dk, dv) = self.memory.home_rows(Name.DQ), self.memory.home_rows(Name.DKV)
        # dk and dv are interleaved in dKV; results must not share memory
        dk, dv = (part.to(dtype, copy=True).contiguous() for part in (dk, dv))
        return dq.to(dtype), dk, dv

    def hidden_gradient(self, dtype: torch.dtype) -> Tensor:
        """dX in a dtype, after a backward program that projects has run."""
        (dx,) = self.memory.home_rows(Name.DX)
        return dx.to(dtype)

    def close(self) -> None:
        """Releases work rows and staging after all steps have run. Home rows stay."""
        self._transport.pool.give(self.memory.buffer)

    # --- rounds

    def launch(self, step: Step) -> None:
        round_ = self._rounds.of_step[step.index]
        self._pack(step, round_)
        if round_.is_dense:
            staging, sizes = self.memory.staging, dense_sizes(round_, self._transport.ranks)
            flight = self._transport.all_to_all(
                round_.channel, staging[round_.out], staging[round_.into], sizes
            )
        else:
            posts = self.memory.posts(step, round_, self.program.operands)
            flight = self._transport.batch(round_.channel, posts)
        self._flights[step.round] = flight

    def wait(self, step: Step) -> None:
        self._flights.pop(step.round).wait()
        self._unpack(step, self._rounds.of_step[step.index])

    def _pack(self, step: Step, round_: Round) -> None:
        """Packs staged tiles into their messages."""
        for view, parts in self._tiles(round_.sends):
            for row, part in zip(view.read(), parts, strict=True):
                part.copy_(row)

    def _unpack(self, step: Step, round_: Round) -> None:
        """Unpacks staged tiles from their messages."""
        for view, parts in self._tiles(round_.receives):
            view.fill(parts)

    def _tiles(self, messages: tuple[Message, ...]) -> Iterator[tuple[View, Parts]]:
        """The staged tiles, each with its view in memory and its parts in the message."""
        for message in messages:
            if message.is_staged:
                tile_parts = self.memory.tile_parts(message, self.program.operands)
                for (operand, _), parts in zip(message.tiles, tile_parts, strict=True):
                    yield self.views[operand], parts

    # --- projection

    def project(self, step: Step) -> None:
        for row in step.rowops:
            hidden, positions = self._view(row.a).read()
            with torch.no_grad():
                q, k, v = self._projected(hidden, positions, row)
            if row.b:
                self._view(row.b).fill((q,))
            if row.c:
                self._view(row.c).fill((k, v))

    def project_grad(self, step: Step) -> None:
        """Works on tiles of rows, so that recomputed projections stay small."""
        if step.index == self.program.steps[-1].index:
            self._free_attention_inputs()
        for row in step.rowops:
            grads = [part for index in (row.b, row.c) if index for part in self._gradients(index)]
            (sums,), rows = self._view(row.d).read(), self._view(row.a).read()
            for first in range(0, len(sums), _TILE_ROWS):
                tile = slice(first, first + _TILE_ROWS)
                with torch.enable_grad():
                    dx = self._project_backward(row, *(part[tile] for part in (*rows, *grads)))
                sums[tile].copy_(dx) if row.first else sums[tile].add_(dx)

    def _gradients(self, index: int) -> Parts:
        """The gradients of an operand of dQ or dKV; home rows in the dtype that the caller would get."""
        operand = self.program.operands[index]
        if not operand.is_home:
            return self._view(index).read()
        dq, *dkv = self.input_gradients(DTYPES[self.program.header.dtype])
        parts = (dq,) if operand.tensor == Name.DQ else tuple(dkv)
        return View(operand, parts).read()

    def _project_backward(self, row: RowOp, hidden: Tensor, positions: Tensor, *grads: Tensor) -> Tensor:
        """Backward of the projection: returns the gradient of hidden states and accumulates the parameters'."""
        leaf = hidden.detach().requires_grad_()
        q, k, v = self._projected(leaf, positions, row)
        outputs = [*((q,) if row.b else ()), *((k, v) if row.c else ())]
        (dx,) = self._layer_backward(outputs, grads, leaf)
        return dx

    def _layer_backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], *leaves: Tensor
    ) -> list[Tensor]:
        """Backward of a function of the layer: returns the inputs' gradients and accumulates the parameters'."""
        cast = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
        with without_hooks(self._layer.params):
            results = torch.autograd.grad(outputs, (*leaves, *self._layer.params), cast, allow_unused=True)
        for total, grad in zip(self.gradients.params, results[len(leaves) :], strict=True):
            if grad is not None:
                total += grad
        pairs = zip(results, leaves, strict=False)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]

    def _projected(self, hidden: Tensor, positions: Tensor, row: RowOp) -> tuple[Tensor, Tensor, Tensor]:
        if self._layer.project is None:
            raise ExecutionError("the plan projects hidden states itself: call planned_attention_block")
        q_heads, kv_heads = (self.program.operands[i].heads if i else () for i in (row.b, row.c))
        return self._layer.project(hidden, positions, q_heads, kv_heads)

    def _view(self, index: int) -> View:
        return self.view(self.program.operands[index])

    def _free_attention_inputs(self) -> None:
        """Frees the inputs that only attention reads, so that dX can reuse their memory."""
        self.memory.home.pop(Name.O, None)


class TaskMachine(TorchMachine):
    """Computes task by task: a few kernel calls each, and torch's own ops for rows. For CPUs and comparison."""

    kernel: Kernel | None = None  # None: the device's flash kernel if it takes the dtype, else plain strips

    def _read(self, *operands: int) -> Iterator[Parts]:
        return (self.views[i].read() for i in operands)

    # --- attention

    def attend(self, step: Step) -> None:
        self._clear_first_rows([task.o for task in step.tasks if task.first])
        for task, heads, kv_of, k, v, *_ in self._keys(step.tasks):
            (q,), (o, lse) = self._read(task.q, task.o)
            rows = q[:, heads], k, v, o[:, heads], lse[:, heads]
            attend(*rows, Band(task.dmin, task.dmax, kv_of), self._layer.score, self.kernel)
            self.views[task.o].write((o, lse))

    def attend_grad(self, step: Step) -> None:
        self._clear_first_rows([task.dq for task in step.grads if task.first_dq])
        self._clear_first_rows([task.dkv for task in step.grads if task.first_dkv])
        for task, heads, kv_of, k, v, dk, dv in self._keys(step.grads):
            (q,), (do,), (lse, delta), (dq,) = self._read(task.q, task.do, task.delta, task.dq)
            rows = q[:, heads], k, v, do[:, heads], lse[:, heads], delta[:, heads], dq[:, heads], dk, dv
            attend_grad(*rows, Band(task.dmin, task.dmax, kv_of), self._layer.score, self.kernel)
            self.views[task.dq].write((dq,))

    def _clear_first_rows(self, sums: Sequence[int]) -> None:
        """Writes the identity of accumulation to rows on which a task is the first."""
        for index in sums:
            parts = self.views[index].read()
            for part in parts:
                part.zero_()
            if self.views[index].operand.tensor == Name.O:
                parts[1].fill_(NEG_INF)
            self.views[index].write(parts)

    def _keys(self, tasks: Sequence[T]) -> Iterator[Keys[T]]:
        """Each task with its keys and values and their gradient accumulators."""
        if self._layer.expand is not None:
            for run in latent_runs(self.program.operands, tasks):
                yield from self._expanded_keys(run, self._layer.expand)
            return
        for task in tasks:
            sums = self.views[task.dkv if isinstance(task, GradTask) else task.kv]
            parts = sums.read()
            yield Keys(task, ALL_HEADS, task.kv_of, *self.views[task.kv].read(), *parts)
            if isinstance(task, GradTask):
                sums.write(parts)

    def _expanded_keys(self, run: LatentRun[T], expand: Expansion) -> Iterator[Keys[T]]:
        """Like `_keys`, for a run of latent rows, expanded here: a few heads at a time if there are many rows."""
        # copied, because other rows of the buffer are written before autograd reads these again
        rotated, compressed = (part.squeeze(1).clone() for part in self.memory.view(run.kv).read())
        header = self.program.header
        for heads in run.slices(header.head_dim + header.v_head_dim):
            names = run.heads[heads]
            with torch.set_grad_enabled(run.dkv is not None):
                leaves = tuple(part.requires_grad_(run.dkv is not None) for part in (compressed, rotated))
                expanded = expand(leaves[0], leaves[1], names)
            k, v = (part.detach() for part in expanded)
            dtype = accumulator_dtype(k.dtype)
            dk, dv = (k, v) if run.dkv is None else (torch.zeros_like(part, dtype=dtype) for part in (k, v))
            for task in run.tasks:
                rows = run.rows_of(self.program.operands[task.kv])
                yield Keys(task, heads, tuple(range(len(names))), k[rows], v[rows], dk[rows], dv[rows])
            if run.dkv is not None:
                with torch.enable_grad():
                    first, second = self._layer_backward(expanded, (dk, dv), *leaves)
                _accumulate(self.memory.view(run.dkv), (second[:, None], first[:, None]), False)

    # --- rows

    def delta(self, step: Step) -> None:
        for row in step.rowops:
            (do,), (o, lse) = self._read(row.a, row.b)
            dtype = accumulator_dtype(o.dtype)
            delta = (do.to(dtype) * o.to(dtype)).sum(-1)
            if self._layer.dlse is not None:
                delta -= _lse_gradient(self._layer.dlse, self.views[row.b].operand, lse)
            self.views[row.c].fill((lse, delta))
            self._add_sink_gradients(self.views[row.c].operand.heads, lse, delta)

    def _add_sink_gradients(self, heads: tuple[int, ...], lse: Tensor, delta: Tensor) -> None:
        if self._layer.sinks is None:
            return
        if self.gradients.sinks is None:
            self.gradients.sinks = torch.zeros(len(self._layer.sinks), dtype=torch.float64, device=lse.device)
        index = index_of(heads, lse.device)
        sinks = self._layer.sinks.to(lse.dtype)[index]
        share = (sinks - lse).exp().masked_fill(lse == NEG_INF, 0.0)
        self.gradients.sinks[index] -= (share * delta).sum(0, dtype=torch.float64)

    def merge(self, step: Step) -> None:
        for row in step.rowops:
            part, total = self._read(row.a, row.c)
            if row.first:
                self.views[row.c].fill(part)
            else:
                merge(*total, *part)
                self.views[row.c].write(total)

    def add(self, step: Step) -> None:
        for row in step.rowops:
            _accumulate(self.views[row.c], self.views[row.a].read(), row.first)

    def copy(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].fill(self.views[row.a].read())

    deliver = copy

    def clear(self, step: Step) -> None:
        self._clear_first_rows([row.c for row in step.rowops])

    def finish(self, step: Step) -> None:
        if self._layer.sinks is None:
            return
        for row in step.rowops:
            o, lse = self.views[row.c].read()
            index = index_of(self.views[row.c].operand.heads, o.device)
            sinks = self._layer.sinks.detach().to(lse.dtype)[index].expand_as(lse)
            merge(o, lse, torch.zeros_like(o), sinks)
            self.views[row.c].write((o, lse))


class PlainMachine(TaskMachine):
    """A TaskMachine that computes in plain strips: any device, dtype and width."""

    kernel = PLAIN


@contextmanager
def without_hooks(params: Sequence[Tensor]) -> Iterator[None]:
    """Disables the parameters' hooks (`register_hook`, which `sum_gradients` uses on DDP) while a call sums partial
    gradients: autograd runs them once, on the whole gradient."""
    hooks = [param._backward_hooks for param in params if param._backward_hooks]
    copies = [dict(registry) for registry in hooks]
    for registry in hooks:
        registry.clear()
    try:
        yield
    finally:
        for registry, saved in zip(hooks, copies, strict=True):
            registry.update(saved)


def dense_sizes(round_: Round, ranks: int) -> Sizes:
    """The bytes that a dense round sends to each rank and receives from it."""
    sizes: Sizes = ([0] * ranks, [0] * ranks)
    for side, messages in zip(sizes, (round_.sends, round_.receives), strict=True):
        for message in messages:
            side[message.peer] = aligned(message.size)
    return sizes


def _lse_gradient(dlse: Tensor, operand: Operand, lse: Tensor) -> Tensor:
    """The operand's part of dlse [rows, Hq], 0 for rows without keys: dS = P * (dP - (delta - dLSE))."""
    if not operand.is_home:
        raise ExecutionError(
            f"delta of {operand}: only home rows have a gradient of LSE, so this operand must be at home"
        )
    part = pick(dlse.narrow(0, operand.row, operand.rows), operand.columns)
    return part.masked_fill(lse == NEG_INF, 0.0)


def _accumulate(view: View, parts: Sequence[Tensor], first: bool) -> None:
    sums = view.read()
    for old, new in zip(sums, parts, strict=True):
        old.copy_(new) if first else old.add_(new)
    view.write(sums)
