"""Differentiable exchange of rows between ranks by index, a collective.

out[into] = received rows, from rank 0, 1, …        sent: x[take], to rank 0, 1, …
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.transport import Transport


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

    def __call__(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x [n, ...] -> [rows, ...], `fill` where no row arrives; differentiable: a row's gradient is the sum over
        all its destinations. A collective."""
        return _ExchangeFunction.apply(x, self, fill)  # type: ignore[no-untyped-call,no-any-return]

    def forward(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`__call__` without autograd."""
        sources, targets = self.take.to(x.device), self.into.to(x.device)
        out = x.new_full((self.rows, *x.shape[1:]), fill)
        out[targets] = _exchange_rows(self, "", x[sources], self.sent, self.received)
        return out

    def backward(self, grad: Tensor, rows: int) -> Tensor:
        """grad [rows of the result, ...] -> gradient of x [rows, ...]. A collective."""
        sources, targets = self.take.to(grad.device), self.into.to(grad.device)
        gradients = _exchange_rows(self, "gradient of ", grad[targets], self.received, self.sent)
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


def _exchange_rows(
    exchange: Exchange, prefix: str, rows: Tensor, sent: list[int], received: list[int]
) -> Tensor:
    """[sum of received, ...]: the rows received from rank 0, 1, …"""
    transport, form = exchange.transport, f"{rows.dtype} {list(rows.shape[1:])}"
    if transport.ranks == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    row_bytes = rows.element_size() * math.prod(rows.shape[1:])
    sizes = [count * row_bytes for count in sent], [count * row_bytes for count in received]
    with transport.call(f"{prefix}{exchange.name}, rows of {form}"):
        transport.all_to_all(0, _bytes(rows), _bytes(out), sizes).wait()
    return out


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)
