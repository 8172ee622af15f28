"""A training step of a pipeline whose stages compute the attention of every tick together (DistCA, section 4.1).

    table = ap.tick_table(stages=2, microbatches=4)
    loader = ap.PlannedLoader(dataset, cluster, model, tokens_per_rank, ticks=table)
    pipeline = ap.TickPipeline(table, chunks, row=(hidden,), embed=embed, loss=loss)     of this rank's stage
    for ticks in loader.iterations():
        share = pipeline.step(ticks)

    stage 0   F0 ──hidden──┐  F1      .        B0     …       ranks of all stages run the programs of a tick, layer by
    stage 1   .            └► F0      B0 ──dx──┘              layer; those of idle stages compute for the others

Rank r of the plans is replica r % replicas of stage r // replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apportion.backends.torch import pingpong as backend
from apportion.backends.torch.exchange import Exchange
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.planner.iteration.ticks import BACKWARD, FORWARD, IDLE, TickTable
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.step import wiring
from apportion.trainer.step.pingpong import PingPongLayer, piece_of


class _Left(NamedTuple):
    """What a forward tick leaves for the backward tick of its microbatch and chunk."""

    x: Tensor  # with the embedding's graph on the first virtual stage
    kept: list[backend.Kept]
    y: Tensor


@dataclass(frozen=True, eq=False)
class TickPipeline:
    """The stage of this rank.

    chunks: the layers of each of its chunks, equally many on all stages. row: shape of a row of hidden states; dtype:
    theirs, by default the plan's. embed: of the first stage, hidden states [rows, *row] of a microbatch. loss: of the
    last stage, this rank's share of the loss, of hidden states and their microbatch, such as `normalised_loss`. Raises
    ConfigError.
    """

    table: TickTable
    chunks: Sequence[Sequence[PingPongLayer]]
    row: Sequence[int]
    embed: Callable[[PlannedBatch], Tensor] | None = None
    loss: Callable[[Tensor, PlannedBatch], Tensor] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        sizes = sorted({len(chunk) for chunk in self.chunks})
        if len(self.chunks) != self.table.virtual or len(sizes) != 1:
            rule = f"must be {self.table.virtual} lists, as the table has chunks on a stage, equally long"
            raise ConfigError(
                "chunks", [len(chunk) for chunk in self.chunks], rule, "share the layers out so"
            )

    def step(self, ticks: Sequence[PlannedBatch], train: bool = True) -> Tensor:
        """One iteration of a loader with the same table; every rank calls it. Gradients of what the layers, `embed` and
        `loss` use are added to `.grad`, as by a backward. train: False runs the forward ticks alone. Returns what this
        rank's losses add up to, [], detached. Raises ExecutionError, ConfigError."""
        with torch.set_grad_enabled(train):
            return _Step(self, ticks, train).run()


@dataclass(eq=False)
class _Step:
    """One iteration on this rank. here: hidden states and gradients on their way to this stage, by (phase, microbatch,
    virtual stage); left: by (microbatch, chunk)."""

    own: TickPipeline
    ticks: Sequence[PlannedBatch]
    train: bool
    here: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    left: dict[tuple[int, int], _Left] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table, transport = self.own.table, self.ticks[0].handle.communicator
        if len(self.ticks) != table.ticks:
            rule = f"the table has {table.ticks} ticks"
            raise ExecutionError(f"{len(self.ticks)} ticks, and {rule}: make the loader with the same ticks=")
        self.transport, self.replicas = transport, transport.ranks // table.stages
        self.stage = transport.rank // self.replicas
        self.last = table.stages * table.virtual - 1
        first = (self.ticks[0].handle,)
        self.pieces = [[piece_of(layer, first) for layer in chunk] for chunk in self.own.chunks]
        self.batches = self._microbatches()
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.ticks[0].tokens.device

    def _microbatches(self) -> dict[int, PlannedBatch]:
        """This rank's rows of each. Raises ExecutionError where they differ from tick to tick."""
        table, found = self.own.table, dict[int, PlannedBatch]()
        for tick, batch in enumerate(self.ticks):
            number = int(table.microbatch[tick, self.stage])
            if number == IDLE:
                continue
            known = found.setdefault(number, batch)
            if not (
                torch.equal(known.sample_ids, batch.sample_ids)
                and torch.equal(known.local_to_sample, batch.local_to_sample)
            ):
                rule = f"microbatch {number} has other rows on rank {self.transport.rank} in tick {tick}"
                raise ExecutionError(f"{rule}: take a recipe whose homes do not depend on the other stages")
        return found

    def run(self) -> Tensor:
        table = self.own.table
        for tick, batch in enumerate(self.ticks):
            phase, number = int(table.phase[tick]), int(table.microbatch[tick, self.stage])
            if phase == BACKWARD and not self.train:
                continue
            chunk = int(table.chunk[tick, self.stage])
            work = self._forward if phase == FORWARD else self._backward
            sent = None
            if number == IDLE:
                name = "forward" if phase == FORWARD else "backward"
                backend.serve(batch.handle, name, self.pieces[0], self.device)
            else:
                sent = work(batch, number, chunk)
            self._pass_on(tick, phase, sent)
        return self.total

    def _virtual(self, chunk: int) -> int:
        return chunk * self.own.table.stages + self.stage

    def _forward(self, batch: PlannedBatch, number: int, chunk: int) -> Tensor:
        virtual = self._virtual(chunk)
        if virtual:
            x = self.here.pop((FORWARD, number, virtual))
        else:
            x = _require("embed", self.own.embed)(self.batches[number])
        kept: list[backend.Kept] | None = [] if self.train else None
        y = backend.forward_alone(batch.handle, self.pieces[chunk], x, kept)
        if kept is not None:
            self.left[number, chunk] = _Left(x, kept, y)
        elif virtual == self.last:
            self.total += self._loss(number, y)
        return y

    def _backward(self, batch: PlannedBatch, number: int, chunk: int) -> Tensor:
        x, kept, y = self.left.pop((number, chunk))
        virtual = self._virtual(chunk)
        if virtual == self.last:
            y.requires_grad_()
            loss = self._loss(number, y)
            torch.autograd.backward(loss)
            self.total += loss.detach()
            dy = torch.zeros_like(y) if y.grad is None else y.grad
        else:
            dy = self.here.pop((BACKWARD, number, virtual))
        dx, grads = backend.backward_alone(batch.handle, self.pieces[chunk], kept, dy)
        if grads:
            # accumulates, with the hooks of data-parallel wrappers
            torch.autograd.backward(list(grads), list(grads.values()))
        if virtual == 0 and x.requires_grad:
            torch.autograd.backward(x, dx)
        return dx

    def _loss(self, number: int, y: Tensor) -> Tensor:
        """It is told that of the last microbatch the iteration ends: optimizers step behind it."""
        is_last = number == self.own.table.microbatches - 1
        batch = replace(self.batches[number], microbatch=number, is_last=is_last)
        wiring.watch.batches.add(batch)
        found: Tensor = _require("loss", self.own.loss)(y, batch)
        return found

    def _pass_on(self, tick: int, phase: int, sent: Tensor | None) -> None:
        """What the stage has made goes to the one that wants it, and what another has made for it comes."""
        table, step = self.own.table, 1 if phase == FORWARD else -1
        source, target = ((self.stage - step) % table.stages, (self.stage + step) % table.stages)
        key = self._coming(tick, phase, source, step)
        goes = sent is not None and 0 <= self._virtual(int(table.chunk[tick, self.stage])) + step <= self.last
        rows = sent if sent is not None and goes else self._empty()
        coming = 0 if key is None else len(self.batches[key[1]].tokens)
        counts = [[0] * self.transport.ranks for _ in range(2)]
        place = self.transport.rank % self.replicas
        counts[0][target * self.replicas + place] = len(rows)
        counts[1][source * self.replicas + place] = coming
        take, into = torch.arange(len(rows)), torch.arange(coming)
        with torch.no_grad():
            found = Exchange(self.transport, f"tick {tick}", take, counts[0], into, counts[1], coming)(
                rows.detach()
            )
        if key is not None:
            self.here[key] = found

    def _coming(self, tick: int, phase: int, source: int, step: int) -> tuple[int, int, int] | None:
        """(phase, microbatch, virtual stage) of what a stage makes for this one in a tick."""
        table = self.own.table
        number, virtual = (
            int(table.microbatch[tick, source]),
            int(table.chunk[tick, source]) * table.stages + source,
        )
        there = number != IDLE and 0 <= virtual + step <= self.last
        return (phase, number, virtual + step) if there else None

    def _empty(self) -> Tensor:
        dtype = self.own.dtype or self.ticks[0].handle.dtype
        return torch.empty(0, *self.own.row, dtype=dtype, device=self.device)


def _require(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        where = "first" if name == "embed" else "last"
        raise ConfigError(name, None, f"the {where} stage needs it", "give it there")
    return function
