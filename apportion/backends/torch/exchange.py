"""Differentiable exchange of rows between ranks by index, a collective.

out[into] = received rows, from rank 0, 1, …        sent: x[take], to rank 0, 1, …
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.transport import Flight, Transport
from apportion.ir.plan.tables import Table


@dataclass(frozen=True)
class Exchange:
    """The rows to send and receive. name: for errors, equal on all ranks. take: int64, rows of x for rank 0, 1, …;
    sent: how many go to each rank. into: int64, the result rows (distinct) for rows from rank 0, 1, …; received: how
    many come from each rank; rows: the number of result rows."""

    transport: Transport
    name: str
    take: Tensor
    sent: list[int]
    into: Tensor
    received: list[int]
    rows: int

    @staticmethod
    def of(transport: Transport, name: str, table: Table, rows: int, inverse: bool = False) -> Exchange:
        """The exchange of a rank's rows of a table with the columns `isa.MOVE_COLUMNS`, or its inverse."""
        (take, sent), (into, received) = (
            _moved_rows(table, transport.ranks, send != inverse) for send in (True, False)
        )
        return Exchange(transport, name, take, sent, into, received, rows)

    def __call__(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x [n, ...] -> [rows, ...], `fill` where no row arrives; differentiable: a row's gradient is the sum over
        all its destinations. A collective."""
        return _ExchangeFunction.apply(x, self, fill)  # type: ignore[no-untyped-call,no-any-return]

    def forward(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`__call__` without autograd."""
        sources, targets = self.take.to(x.device), self.into.to(x.device)
        out = x.new_full((self.rows, *x.shape[1:]), fill)
        (out[targets],) = exchange_rows(self.transport, self.name, [(x[sources], self.sent, self.received)])
        return out

    def backward(self, grad: Tensor, rows: int) -> Tensor:
        """grad [rows of the result, ...] -> gradient of x [rows, ...]. A collective."""
        sources, targets = self.take.to(grad.device), self.into.to(grad.device)
        parts = [(grad[targets], self.received, self.sent)]
        (gradients,) = exchange_rows(self.transport, f"gradient of {self.name}", parts)
        total = grad.new_zeros(rows, *grad.shape[1:], dtype=accumulator_dtype(grad.dtype))
        # accumulates in index order, on a GPU too
        total.index_put_((sources,), gradients.to(total.dtype), accumulate=True)
        return total.to(grad.dtype)


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, fill: float) -> Tensor:
        ctx.exchange, ctx.rows = exchange, len(x)
        return exchange.forward(x, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.backward(grad, ctx.rows), None, None


def _moved_rows(table: Table, ranks: int, send: bool) -> tuple[Tensor, list[int]]:
    """The rows sent to, or received from, rank 0, 1, ..., int64, and the count for each."""
    columns = (table[name].tolist() for name in ("send", "peer", "row", "rows"))
    runs = [(peer, row, rows) for flag, peer, row, rows in zip(*columns, strict=True) if flag == send]
    counts = [sum(rows for target, _, rows in runs if target == peer) for peer in range(ranks)]
    ranges = [torch.arange(row, row + rows) for _, row, rows in sorted(runs, key=lambda run: run[0])]
    return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64), counts


def exchange_rows(
    transport: Transport, label: str, parts: Sequence[tuple[Tensor, list[int], list[int]]]
) -> list[Tensor]:
    """Exchanges parts (rows for rank 0, 1, …, and how many go to and come from each); returns the rows from rank 0, 1,
    …. A collective; all parts travel at the same time."""
    flights, outputs = list[Flight](), list[Tensor]()
    if transport.ranks == 1:
        return [rows for rows, *_ in parts]
    forms = " and ".join(f"{rows.dtype} {list(rows.shape[1:])}" for rows, *_ in parts)
    with transport.call(f"{label}, rows of {forms}"):
        for rows, *counts in parts:
            out = rows.new_empty(sum(counts[1]), *rows.shape[1:])
            row_bytes = rows.element_size() * math.prod(rows.shape[1:])
            sent, received = ([count * row_bytes for count in side] for side in counts)
            flights.append(
                transport.all_to_all(0, bytes_of(rows.contiguous()), bytes_of(out), (sent, received))
            )
            outputs.append(out)
        for flight in flights:
            flight.wait()
    return outputs


def bytes_of(rows: Tensor) -> Tensor:
    """uint8 [n]: a view of contiguous rows; raises RuntimeError for others, since a copy would receive nothing."""
    return rows.view(-1).view(torch.uint8)
