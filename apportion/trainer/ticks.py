"""Training step of a pipeline whose stages compute the attention of every tick together (DistCA, section 4.1).

    table = ap.tick_table(stages=2, microbatches=4)
    loader = ap.PlannedLoader(dataset, cluster, model, tokens_per_rank, ticks=table)
    pipeline = ap.TickPipeline(table, chunks, row=(hidden,), embed=embed, loss=loss)     of this rank's stage
    for ticks in loader.iterations():
        share = pipeline.step(ticks)

    stage 0   F0 ──hidden──┐  F1      .        B0     …       ranks of all stages run the programs of a tick, layer by
    stage 1   .            └► F0      B0 ──dx──┘              layer; idle stages compute for the others

Rank r of the plans is replica r % replicas of stage r // replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from apportion.backends.torch import pingpong as backend
from apportion.backends.torch.autograd import or_zeros
from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.handle import PlanHandle
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.tensors import PHASES
from apportion.planner.iteration.ticks import IDLE, TickTable
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.step import wiring
from apportion.trainer.step.pingpong import PingPongLayer, piece_of
from apportion.trainer.step.terms import SHARE, has_term


class _SavedTick(NamedTuple):
    """State that a forward tick saves for the backward tick of its microbatch and chunk."""

    x: Tensor  # with the embedding's graph on the first virtual stage
    kept: list[backend.Tape]
    y: Tensor


@dataclass(frozen=True, eq=False)
class TickPipeline:
    """Pipeline stage of this rank.

    chunks: the layers of each of its chunks, the same number on all stages. row: shape of a row of hidden states;
    dtype: of hidden states, by default the plan's. embed: on the first stage, a microbatch -> hidden states [rows,
    *row]. loss: on the last stage, (hidden states, their microbatch) -> this rank's share of the loss, like
    `normalised_loss`. done: called with a chunk's number after each of its backward ticks. Raises ConfigError.
    """

    table: TickTable
    chunks: Sequence[Sequence[PingPongLayer]]
    row: Sequence[int]
    embed: Callable[[PlannedBatch], Tensor] | None = None
    loss: Callable[[Tensor, PlannedBatch], Tensor] | None = None
    dtype: torch.dtype | None = None
    done: Callable[[int], None] = lambda _: None
    _steps: Iterator[int] = field(default_factory=count, init=False)  # numbers of training steps

    def __post_init__(self) -> None:
        sizes = sorted({len(chunk) for chunk in self.chunks})
        if len(self.chunks) != self.table.virtual or len(sizes) != 1:
            rule = f"must be {self.table.virtual} lists of equal length, one per chunk of a stage"
            layer_counts = [len(chunk) for chunk in self.chunks]
            raise ConfigError("chunks", layer_counts, rule, "distribute the layers evenly")

    def step(self, ticks: Sequence[PlannedBatch], train: bool = True) -> Tensor:
        """Runs one iteration of a loader with the same table; every rank calls it. Gradients of the parameters of
        layers, `embed` and `loss` are added to `.grad`, as by a backward. train: False runs only the forward ticks.
        Returns the sum of this rank's losses, a detached scalar. Raises ExecutionError, ConfigError."""
        with torch.set_grad_enabled(train):
            return _Iteration(self, ticks, train).run()


@dataclass(eq=False)
class _Iteration:
    """One iteration on this rank. inputs: hidden states and gradients that wait for their tick; saved: states of
    forward ticks; both by microbatch and virtual stage."""

    pipe: TickPipeline
    ticks: Sequence[PlannedBatch]
    train: bool
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], _SavedTick] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table, first = self.pipe.table, self.ticks[0].handle
        if len(self.ticks) != table.ticks:
            rule = f"the table has {table.ticks} ticks: make the loader with the same ticks="
            raise ExecutionError(f"an iteration has {len(self.ticks)} ticks, and {rule}")
        self.transport, self.device = first.communicator, self.ticks[0].tokens.device
        self.replicas = self.transport.ranks // table.stages
        self.stage, self.replica = divmod(self.transport.rank, self.replicas)
        self.last = table.stages * table.virtual - 1
        self.pieces = [
            [piece_of(layer, (first,), self.device) for layer in chunk] for chunk in self.pipe.chunks
        ]
        self.batches = self._microbatches()
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.train:
            first_rank, step = self.stage * self.replicas, next(self.pipe._steps)
            ranks = slice(first_rank, first_rank + self.replicas)
            layers = (param for chunk in self.pipe.chunks for layer in chunk for param in layer.params)
            compares = step > 0 and step & (step - 1) == 0  # at exponentially growing intervals
            wiring.check_stage(self.stage, layers, self.transport, ranks, compares)

    def _microbatches(self) -> dict[int, PlannedBatch]:
        """This rank's rows of each microbatch. Raises ExecutionError if they differ between ticks."""
        result = dict[int, PlannedBatch]()
        for tick, batch in enumerate(self.ticks):
            if (position := self._place(tick, self.stage)) is not None:
                first = result.setdefault(position[0], batch)
                if not all(torch.equal(a, b) for a, b in zip(_origin(first), _origin(batch), strict=True)):
                    rule = f"microbatch {position[0]} has different rows on rank {self.transport.rank} in tick {tick}"
                    remedy = "give the loader this table, and a recipe whose homes ignore other stages"
                    raise ExecutionError(f"{rule}: {remedy}")
        return result

    def _place(self, tick: int, stage: int, step: int = 0) -> tuple[int, int] | None:
        """(microbatch, virtual stage + step) of a stage in a tick; None if idle or beyond an end of the pipeline."""
        table, number = self.pipe.table, int(self.pipe.table.microbatch[tick, stage])
        virtual = int(table.chunk[tick, stage]) * table.stages + stage
        return (number, virtual + step) if number != IDLE and 0 <= virtual + step <= self.last else None

    def run(self) -> Tensor:
        for tick, batch in enumerate(self.ticks):
            phase = PHASES[self.pipe.table.phase[tick]]
            if phase == "backward" and not self.train:
                continue
            rows, position = self._empty(), self._place(tick, self.stage)
            if position is None:
                backend.serve(batch.handle, phase, self.pieces[0], self.device)
            else:
                rows = (self._forward if phase == "forward" else self._backward)(batch.handle, position)
            self._pass_on(tick, 1 if phase == "forward" else -1, rows.detach())
        return self.total

    def _forward(self, handle: PlanHandle, position: tuple[int, int]) -> Tensor:
        number, virtual = position
        x = self.inputs.pop(position) if virtual else _require("embed", self.pipe.embed)(self.batches[number])
        tapes: list[backend.Tape] | None = [] if self.train else None
        y = backend.forward_alone(handle, self.pieces[virtual // self.pipe.table.stages], x, tapes)
        if tapes is not None:
            self.saved[position] = _SavedTick(x, tapes, y)
        elif virtual == self.last:
            self.total += self._loss(number, y)
        return y

    def _backward(self, handle: PlanHandle, position: tuple[int, int]) -> Tensor:
        (x, tapes, y), (number, virtual) = self.saved.pop(position), position
        if virtual == self.last:
            loss = self._loss(number, y.requires_grad_())
            if not (wiring.watch.accounted or has_term(loss, SHARE)):
                warn(f"the loss cannot be checked: {wiring.UNKNOWN}", stacklevel=1)
            torch.autograd.backward(loss)
            self.total += loss.detach()
            dy = or_zeros(y.grad, y)
        else:
            dy = self.inputs.pop(position)
        dx, grads = backend.backward_alone(handle, self.pieces[virtual // self.pipe.table.stages], tapes, dy)
        if x.requires_grad and not virtual:
            grads[x] = dx
        if grads:  # accumulates, with the hooks of data-parallel wrappers
            torch.autograd.backward(list(grads), list(grads.values()))
        self.pipe.done(virtual // self.pipe.table.stages)
        return dx

    def _loss(self, number: int, y: Tensor) -> Tensor:
        """The loss of a microbatch; marks the last one as the iteration's end, after which optimizers step."""
        is_last = number == self.pipe.table.microbatches - 1
        batch = replace(self.batches[number], microbatch=number, is_last=is_last)
        wiring.watch.batches[batch] = None
        loss: Tensor = _require("loss", self.pipe.loss)(y, batch)
        return loss

    def _pass_on(self, tick: int, step: int, rows: Tensor) -> None:
        """Sends this stage's result to the stage that needs it, and receives an input for this stage from another."""
        stages, sent, received = self.pipe.table.stages, *([0] * self.transport.ranks for _ in range(2))
        source, target = (self.stage - step) % stages, (self.stage + step) % stages
        incoming = self._place(tick, source, step)
        rows = rows if self._place(tick, self.stage, step) is not None else self._empty()
        count = 0 if incoming is None else len(self.batches[incoming[0]].tokens)
        sent[target * self.replicas + self.replica] = len(rows)
        received[source * self.replicas + self.replica] = count
        sources, targets = torch.arange(len(rows)), torch.arange(count)
        result = Exchange(self.transport, f"tick {tick}", sources, sent, targets, received, count)(rows)
        if incoming is not None:
            self.inputs[incoming] = result

    def _empty(self) -> Tensor:
        dtype = self.pipe.dtype or self.ticks[0].handle.dtype
        return torch.empty(0, *self.pipe.row, dtype=dtype, device=self.device)


def _origin(batch: PlannedBatch) -> tuple[Tensor, Tensor]:
    return batch.sample_ids, batch.local_to_sample


def _require(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        stage = "first" if name == "embed" else "last"
        raise ConfigError(name, None, f"the {stage} stage needs it", "pass it there")
    return function
