"""Ranks of one process: programs executed in turns, on numpy memory, with rounds as mail.

Ranks are generators. A launch copies what it sends; a wait yields until every peer of the round has launched
it too. When no rank can move, the error shows where each one stands. Rows that nobody wrote hold NaN, and so
do rows in flight and partials that were used up: a plan that reads them fails there and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from apportion.backends import numpy_kernels as kernels
from apportion.backends.interp import Machine, Operand, Program, Step, components
from apportion.backends.local_network import Array, Arrays, Flight, LocalView, Network, Tile, nothing
from apportion.backends.numpy_kernels import Band, Partial, Scores
from apportion.ir.arrays import Floats
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import ALL_TO_ALL, Op
from apportion.ir.tensors import HEADLESS, Space, Tensor


class Projection(Protocol):
    """A layer's projection, as `project` and `project_grad` call it. The executor holds no weights."""

    def project(
        self, hidden: Floats, position_ids: Array, q_heads: tuple[int, ...], kv_heads: tuple[int, ...]
    ) -> tuple[Floats, Floats, Floats]:
        """q [n, len(q_heads), D], k [n, len(kv_heads), D], v [n, len(kv_heads), Dv] of hidden [n, E]."""

    def gradient(
        self,
        hidden: Floats,
        position_ids: Array,
        q_heads: tuple[int, ...],
        kv_heads: tuple[int, ...],
        grads: tuple[Floats, Floats, Floats],
    ) -> Floats:
        """The gradient [n, E] of hidden from those of q, k and v; weights' gradients stay in the object."""


class Kernels(NamedTuple):
    """What computes one task."""

    forward: Callable[..., Partial] = kernels.forward
    backward: Callable[..., kernels.Gradients] = kernels.backward


@dataclass(frozen=True)
class LocalLayer:
    """What one attention call knows beside the plan."""

    scores: Scores
    dtype: np.dtype[Any]
    sinks: Floats | None = None
    project: Projection | None = None
    hidden: int = 0
    kernels: Kernels = field(default_factory=Kernels)


class Rank(Machine[LocalView]):
    """One rank's machine."""

    def __init__(
        self,
        rank: int,
        program: Program,
        phase: str,
        layer: LocalLayer,
        network: Network,
        rows: int,
        given: dict[Tensor, Arrays],
    ) -> None:
        super().__init__(program)
        self.rank, self.at, self._layer, self._network = rank, 0, layer, network
        self._partials = {Tensor.O} if phase == "forward" else {Tensor.DQ, Tensor.DKV, Tensor.DX}
        heads_of = program.header.heads_of
        self.home = {t: given.get(t) or self._empty(t, rows, heads_of(t)) for t in self._tensors()}
        self._work = {a.tensor: self._empty(a.tensor, a.rows, a.heads) for a in program.arenas}
        self.dsinks = np.zeros(program.header.q_heads)
        self._flights: dict[int, Flight] = {}
        self.bind()

    def _tensors(self) -> tuple[Tensor, ...]:
        """The tensors that this call has: no hidden states unless the caller gave them."""
        return tuple(t for t in Tensor if t and (self._layer.hidden or t not in HEADLESS))

    def _empty(self, tensor: Tensor, rows: int, heads: int) -> Arrays:
        shape = (rows,) if tensor in HEADLESS else (rows, heads)
        parts = components(tensor, self.program.header, self._layer.hidden)
        dtypes = [np.dtype(np.int64) if part.integer else self._layer.dtype for part in parts]
        return tuple(
            np.full(shape + ((part.width,) if part.width else ()), nothing(dtype), dtype)
            for part, dtype in zip(parts, dtypes, strict=True)
        )

    def view(self, operand: Operand) -> LocalView:
        memory = self.home if operand.space == Space.HOME else self._work
        if operand.tensor not in memory:
            raise ExecutionError(f"rank {self.rank}: nothing holds {operand}")
        rows = len(memory[operand.tensor][0])
        if operand.row + operand.rows > rows:
            raise ExecutionError(f"rank {self.rank}: {operand} leaves the {rows} rows there")
        return LocalView(operand, memory[operand.tensor])

    # running

    def advance(self) -> Iterator[None]:
        """Executes; yields where the rank must wait for others."""
        for step in self.program.steps:
            self.at = step.index
            while self._missing():
                yield
            self.handlers[step.op](step)
        self.at = len(self.program.steps)
        if self._flights:
            raise ExecutionError(f"the program ends without a wait for rounds {sorted(self._flights)}")

    def _missing(self) -> set[int]:
        """The ranks that the current instruction has to wait for."""
        step = self.program.steps[self.at] if self.at < len(self.program.steps) else None
        flight = self._flights.get(step.round) if step is not None and step.op == Op.WAIT else None
        if flight is None:
            return set()
        everyone = flight.step.mode & ALL_TO_ALL
        peers = set(range(self._network.ranks)) if everyone else {t.peer for t in flight.step.transfers}
        return self._network.missing(flight.step.round, peers)

    def place(self) -> str:
        return f"rank {self.rank}, instruction {self.at} of {len(self.program.steps)}"

    def waits_for(self) -> str:
        missing = sorted(self._missing())
        return f": waits for ranks {missing} to launch" if missing else ": done"

    def around(self) -> str:
        """The instructions around the current one, with an arrow."""
        lo, hi = max(0, self.at - 2), self.at + 2
        return "\n".join(
            f"  {'→' if s.index == self.at else ' '} {s.index}: {s}" for s in self.program.steps[lo:hi]
        )

    # memory

    def _take(self, index: int) -> Arrays:
        """The values of an operand; a partial is used up by this."""
        view = self.views[index]
        values = view.read()
        if view.operand.tensor in self._partials:
            view.poison()
        return values

    def _accumulate(self, index: int, values: Sequence[Array], first: bool) -> None:
        view = self.views[index]
        old = () if first else view.read()
        view.write(values if first else [a + b for a, b in zip(old, values, strict=True)])

    # the ops

    def launch(self, step: Step) -> None:
        for transfer in step.transfers:
            if transfer.send:
                operand, values = self.program.operands[transfer.operand], self._take(transfer.operand)
                if self.program.header.narrows(operand.tensor):
                    values = tuple(kernels.rounded(value, self.program.header.dtype) for value in values)
                self._network.send(step.round, self.rank, transfer.peer, Tile(operand, values))
            else:
                self.views[transfer.operand].poison()
        views = [self.views[transfer.operand] for transfer in step.transfers]
        self._flights[step.round] = Flight(step, tuple((view, view.peek()) for view in views))
        self._network.launch(step.round, self.rank)

    def wait(self, step: Step) -> None:
        if step.round not in self._flights:
            raise ExecutionError(f"waits for round {step.round}, which it did not launch")
        flight = self._flights.pop(step.round)
        for view, held in flight.held:
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(view.peek(), held, strict=True)):
                raise ExecutionError(f"{view.operand} was overwritten while round {step.round} was in flight")
        for transfer in flight.step.transfers:
            if not transfer.send:
                view = self.views[transfer.operand]
                view.write(self._network.receive(step.round, transfer.peer, self.rank, view.operand).values)

    def attend(self, step: Step) -> None:
        for task in step.tasks:
            (q,), (k, v) = self.views[task.q].read(), self.views[task.kv].read()
            band, scores = Band(task.dmin, task.dmax), self._layer.scores
            part = self._layer.kernels.forward(q, k[:, task.kv_of], v[:, task.kv_of], band, scores)
            self._merge(task.o, part, task.first)

    def _merge(self, index: int, part: Partial, first: bool) -> None:
        view = self.views[index]
        view.write(part if first else kernels.merge(Partial(*view.read()), part))

    def attend_grad(self, step: Step) -> None:
        for task in step.grads:
            (q,), (k, v) = self.views[task.q].read(), self.views[task.kv].read()
            (do,), (lse, delta) = self.views[task.do].read(), self.views[task.delta].read()
            band, scores = Band(task.dmin, task.dmax), self._layer.scores
            kv_of, heads = task.kv_of, k.shape[1]
            grads = self._layer.kernels.backward(q, k[:, kv_of], v[:, kv_of], do, lse, delta, band, scores)
            self._accumulate(task.dq, [grads.dq], task.first_dq)
            dkv = [kernels.sum_heads(grad, kv_of, heads) for grad in (grads.dk, grads.dv)]
            self._accumulate(task.dkv, dkv, task.first_dkv)

    def delta(self, step: Step) -> None:
        for row in step.rowops:
            (do,), (o, lse) = self.views[row.a].read(), self.views[row.b].read()
            delta = (do * o).sum(axis=-1)
            self.views[row.c].write([lse, delta])
            self._add_dsinks(self.views[row.c].operand.heads, lse, delta)

    def _add_dsinks(self, heads: tuple[int, ...], lse: Floats, delta: Floats) -> None:
        if self._layer.sinks is None:
            return
        seen = lse > -np.inf
        share = np.exp(self._layer.sinks[list(heads)] - np.where(seen, lse, np.inf))
        self.dsinks[list(heads)] -= (share * delta).sum(axis=0, dtype=np.float64)

    def merge(self, step: Step) -> None:
        for row in step.rowops:
            self._merge(row.c, Partial(*self._take(row.a)), row.first)

    def add(self, step: Step) -> None:
        for row in step.rowops:
            self._accumulate(row.c, self._take(row.a), row.first)

    def copy(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].write(self._take(row.a))

    deliver = copy

    def clear(self, step: Step) -> None:
        for row in step.rowops:
            view = self.views[row.c]
            lowest = -np.inf if view.operand.tensor == Tensor.O else 0.0
            view.write([np.asarray(0.0), np.asarray(lowest)][: len(view.arrays)])

    def project(self, step: Step) -> None:
        for row in step.rowops:
            hidden, positions = self.views[row.a].read()
            q, k, v = self._projection().project(hidden, positions, self._heads(row.b), self._heads(row.c))
            if row.b:
                self.views[row.b].write([q])
            if row.c:
                self.views[row.c].write([k, v])

    def project_grad(self, step: Step) -> None:
        for row in step.rowops:
            hidden, positions = self.views[row.a].read()
            grads = (*self._grads(row.b, row.a, Tensor.Q), *self._grads(row.c, row.a, Tensor.KV))
            dx = self._projection().gradient(
                hidden, positions, self._heads(row.b), self._heads(row.c), (grads[0], grads[1], grads[2])
            )
            self._accumulate(row.d, [dx], row.first)

    def _grads(self, index: int, like: int, tensor: Tensor) -> Arrays:
        """The gradients of an operand, used up; without an operand, gradients of no heads."""
        if index:
            return self._take(index)
        rows = self.program.operands[like].rows
        parts = components(tensor, self.program.header)
        return tuple(np.zeros((rows, 0, part.width), self._layer.dtype) for part in parts)

    def _heads(self, index: int) -> tuple[int, ...]:
        return self.program.operands[index].heads if index else ()

    def _projection(self) -> Projection:
        if self._layer.project is None:
            raise ExecutionError("the program calls the layer's projection: run it with `run_block_forward`")
        return self._layer.project

    def finish(self, step: Step) -> None:
        for row in step.rowops:
            view = self.views[row.c]
            part = Partial(*view.read())
            if self._layer.sinks is not None:
                view.write(kernels.add_sinks(part, self._layer.sinks[list(view.operand.heads)]))


def take_turns(ranks: list[Rank], where: str) -> None:
    """Runs every rank as far as it goes, in turn, until all are done."""
    running = {rank: rank.advance() for rank in ranks}
    while running:
        before = [rank.at for rank in ranks]
        for rank, turn in list(running.items()):
            if _is_done(rank, turn, where):
                del running[rank]
        if running and before == [rank.at for rank in ranks]:
            raise ExecutionError(_standstill(ranks, where))


def _is_done(rank: Rank, turn: Iterator[None], where: str) -> bool:
    try:
        return next(turn, "done") == "done"
    except ExecutionError as error:
        raise ExecutionError(f"{where}: {rank.place()}: {error}\n{rank.around()}") from error


def _standstill(ranks: list[Rank], where: str) -> str:
    """rank × instruction: the steps around the one where each rank stands."""
    lines = [f"{where}: deadlock, no rank can go on"]
    for rank in ranks:
        lines += [rank.place() + rank.waits_for(), rank.around()]
    return "\n".join(lines)
