"""Differentiable gather of the rows of all ranks that this rank's queries may see, for the caller's own kernel.

x [rows, ...] ──hops of the kind's forward program──► [visible, ...]     a row arrives once, and enters a node once
dx            ◄──the same hops, last to first───      their gradients    summed where rows were forwarded

A round starts as soon as the rows that it forwards have arrived, in program order on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from apportion.backends.torch.exchange import bytes_of
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.memory.arenas import Post
from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.transport import Flight, Transport
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.plan.visible import Arrangement, Fetch, obstacle
from apportion.ir.tensors import Tensor as Name


@dataclass(frozen=True)
class Visible:
    """Rows that queries of this rank may see, each once, in the order of the batch's tokens.

    rows: [visible, ...], one tensor per argument, a tuple for several. first, end: int64 [queries], the first visible
    row that each query sees and one past the last; both 0 if it sees none. spans: int64 [queries, most, 2], the
    ascending ranges [first, end) of visible rows that it sees, padded with (0, 0): with most = 1, `first` and `end` are
    the whole mask; sink windows, trees and similar masks have several. tokens, positions, sequences: int64 [visible],
    each visible row's token number in the batch, position id and sequence. Queries are the rows of x, including
    padding, which sees nothing.
    """

    rows: Any
    spans: Tensor
    tokens: Tensor
    positions: Tensor
    sequences: Tensor

    @property
    def first(self) -> Tensor:
        return self.spans[:, 0, 0]

    @property
    def end(self) -> Tensor:
        return self.spans[:, :, 1].amax(1)

    def mask(self) -> Tensor:
        """bool [queries, visible]: True for rows that a query sees; for small batches."""
        row = torch.arange(len(self.tokens), device=self.spans.device)
        low, high = self.spans[:, :, :1], self.spans[:, :, 1:]
        return ((low <= row) & (row < high)).any(1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather(handle: PlanHandle, kind: str, x: tuple[Tensor, ...]) -> Visible:
    """Implements `trainer.step.moves.gather_visible`, for several tensors."""
    handle.agree()
    with _call(handle, kind, "rows", x):
        gathering = handle.state(lambda: Gathering.of(handle, kind), "visible", kind)
        for tensor in x:
            if len(tensor) != handle.padded_rows:
                raise ExecutionError(f"this rank holds {handle.padded_rows} rows, got {len(tensor)}")
        rows: tuple[Tensor, ...] = _Gather.apply(gathering, handle, kind, *x)  # type: ignore[no-untyped-call]
    nodes: set[Any] = {part.grad_fn for part in rows} - {None}
    for node in nodes:
        node.metadata["handle"] = handle
    handle.calls += 1
    handle.called.setdefault(kind, 0)  # marks the kind as used; the number of calls is unknown
    handle.wrapper, handle.gathered = DistributedDataParallel._active_ddp_module, True
    return Visible(rows, *gathering.tables_on(x[0].device, len(x[0])))


#: rows of a tensor; a slice is contiguous and needs no copy
Index = slice | Tensor


class Leg(NamedTuple):
    """A hop, or its reverse, on a device. sources: earlier legs whose rows it forwards; out, into: peer, rows and
    their number."""

    channel: int
    sources: tuple[int, ...]
    out: list[tuple[int, Index, int]]
    into: list[tuple[int, Index, int]]


class Gathering:
    """A kind's gather under one plan. token_table: int64 [visible, 3], each visible row's token, position, sequence."""

    @staticmethod
    def of(handle: PlanHandle, kind: str) -> Gathering:
        """Builds the gather; a collective that exchanges the rows' tokens in the same way. Raises ConfigError."""
        program = handle.slice.programs[kind, "forward"]
        if reason := obstacle(program):
            remedy = f"plan with balance={{{kind!r}: …}} in the model, or use a recipe such as fcp or blend"
            raise ConfigError("kind", kind, f"has a plan that does not gather rows: {reason}", remedy)
        fetch, layout = Fetch.of(program, handle.rows), handle.slice.layout(handle.slice.header.home_layout)
        local = torch.from_numpy(np.stack([layout.tokens(0), layout.position_ids(0), layout.sequences(0)], 1))
        (gathered,) = Gathering(fetch, fetch.in_arrival_order, local).fetch(handle, (local,))
        arrangement = fetch.arrange(gathered[:, 0].numpy())
        table = torch.empty_like(gathered)
        table[torch.from_numpy(arrangement.place)] = gathered
        return Gathering(replace(fetch, tasks=()), arrangement, table[: arrangement.visible])

    def __init__(self, fetch: Fetch, arrangement: Arrangement, token_table: Tensor) -> None:
        self._fetch, self.arrangement, self.token_table = fetch, arrangement, token_table
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}
        self._legs: dict[tuple[torch.device, bool], list[Leg]] = {}

    def tables_on(self, device: torch.device, queries: int) -> tuple[Tensor, ...]:
        """The queries' spans, padded to `queries` rows; and the tokens, positions and sequences of visible rows."""
        if device not in self._tables:
            spans = torch.from_numpy(self.arrangement.spans)
            padded = spans.new_zeros(queries, *spans.shape[1:])
            padded[: len(spans)] = spans
            self._tables[device] = tuple(part.to(device) for part in (padded, *self.token_table.T))
        return self._tables[device]

    def fetch(self, handle: PlanHandle, x: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Visible rows [visible, ...] of each x [rows, ...]."""
        buffers = [part.new_empty(self._fetch.rows, *part.shape[1:]) for part in x]
        for memory, part in zip(buffers, x, strict=True):
            memory[self._home(part.device)] = part[: self._fetch.home]
        legs, wire = self.legs(x[0].device, back=False), [part.dtype for part in x]
        _transfer(handle.communicator, legs, buffers, wire)
        return tuple(memory[: self.arrangement.visible] for memory in buffers)

    def return_gradients(self, handle: PlanHandle, kind: str, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of home rows, [home, ...] each, from those of visible rows, [visible, ...], in their dtypes."""
        buffers, wire = [], []
        for grad in grads:
            dtype = accumulator_dtype(grad.dtype)
            sums = grad.new_zeros(self._fetch.rows, *grad.shape[1:], dtype=dtype)
            sums[: self.arrangement.visible] = grad
            buffers.append(sums)
            wire.append(grad.dtype if handle.slice.header.narrows(Name.DKV) else dtype)
        with _call(handle, kind, "gradients of rows", grads):
            _transfer(handle.communicator, self.legs(grads[0].device, back=True), buffers, wire, add=True)
        home = self._home(grads[0].device)
        return [sums[home].to(grad.dtype) for sums, grad in zip(buffers, grads, strict=True)]

    def _home(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.arrangement.place[: self._fetch.home]).to(device)

    def legs(self, device: torch.device, back: bool) -> list[Leg]:
        """The hops in order; back: reversed, the last hop first."""
        if (device, back) not in self._legs:
            hops = self._fetch.hops

            def side(rows: Mapping[int, Ints]) -> list[tuple[int, Index, int]]:
                return [
                    (peer, _index(self.arrangement.place[indexes], device), len(indexes))
                    for peer, indexes in rows.items()
                ]

            legs = [Leg(hop.channel, hop.sources, side(hop.sends), side(hop.receives)) for hop in hops]
            if back:
                last = len(legs) - 1
                following = [
                    tuple(last - j for j in range(last, i, -1) if i in hops[j].sources)
                    for i in range(len(hops))
                ]
                legs = [Leg(leg.channel, following[i], leg.into, leg.out) for i, leg in enumerate(legs)][::-1]
            self._legs[device, back] = legs
        return self._legs[device, back]


def _call(handle: PlanHandle, kind: str, action: str, x: Sequence[Tensor]) -> AbstractContextManager[None]:
    forms = ", ".join(f"{part.dtype} {list(part.shape[1:])}" for part in x)
    return handle.call(f"gather_visible of kind {kind}, plan {handle.name}: {action} of {forms}")


def _index(rows: Ints, device: torch.device) -> Index:
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _transfer(
    transport: Transport,
    legs: Sequence[Leg],
    memory: Sequence[Tensor],
    wire: Sequence[torch.dtype],
    add: bool = False,
) -> None:
    """Transfers rows of each of `memory`, [n, ...], in the dtypes `wire`; received rows replace rows or are added to
    them, leg by leg and peer by peer."""
    flights: dict[int, tuple[Flight, list[tuple[Index, list[Tensor]]]]] = {}

    def finish(leg: int) -> None:
        flight, incoming = flights.pop(leg)
        flight.wait()
        for index, parts in incoming:
            for buffer, part in zip(memory, parts, strict=True):
                if add:
                    _add(buffer, index, part)
                elif not isinstance(index, slice):
                    buffer[index] = part

    for i, leg in enumerate(legs):
        for j in leg.sources:
            if j in flights:
                finish(j)
        posts, incoming = [], []
        for peer, index, rows in leg.into:
            is_direct = isinstance(index, slice) and not add
            parts = [
                buffer[index] if is_direct else buffer.new_empty(rows, *buffer.shape[1:], dtype=dtype)
                for buffer, dtype in zip(memory, wire, strict=True)
            ]
            posts += [Post(False, peer, bytes_of(part)) for part in parts]
            incoming.append((index, parts))
        for peer, index, _ in leg.out:
            parts = [buffer[index].to(dtype) for buffer, dtype in zip(memory, wire, strict=True)]
            posts += [Post(True, peer, bytes_of(part)) for part in parts]
        flights[i] = transport.batch(leg.channel, posts), incoming
    for i in [*flights]:
        finish(i)


def _add(buffer: Tensor, index: Index, part: Tensor) -> None:
    if isinstance(index, slice):
        buffer[index] += part
    else:
        buffer.index_put_((index,), part.to(buffer.dtype), accumulate=True)  # in index order, on a GPU too


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gathering: Gathering, handle: PlanHandle, kind: str, *x: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gathering, ctx.handle, ctx.kind, ctx.rows = gathering, handle, kind, len(x[0])
        rows = gathering.fetch(handle, x)
        ctx.mark_non_differentiable(*(part for part in rows if not part.is_floating_point()))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        indexes = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        home = ctx.gathering.return_gradients(ctx.handle, ctx.kind, [grads[i] for i in indexes])
        result: list[Tensor | None] = [None] * len(grads)
        for i, part in zip(indexes, home, strict=True):
            padding = part.new_zeros(ctx.rows - len(part), *part.shape[1:])
            result[i] = torch.cat([part, padding])
        return None, None, None, *result
