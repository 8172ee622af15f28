"""Rows between two layouts of a plan, for layers that want another one than attention; its gradient is the inverse."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.memory.arenas import Post
from apportion.ir.errors import ExecutionError, UnknownNameError
from apportion.ir.plan.tables import Move


class PeerRows(NamedTuple):
    """Rows [row, row + rows) sent to or received from a peer."""

    send: bool
    peer: int
    row: int
    rows: int


class Remap(torch.autograd.Function):
    """x [rows of the source, ...] -> [rows of the target, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: PlanHandle, move: Move, inverse: bool) -> Tensor:
        ctx.handle, ctx.move, ctx.inverse = handle, move, inverse
        return _moved(x, handle, move, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return remapped(grad, ctx.handle, ctx.move, not ctx.inverse), None, None, None


def remapped(x: Tensor, handle: PlanHandle, move: Move, inverse: bool) -> Tensor:
    """x moved from the move's source layout to its target (`inverse`: back), differentiable; a collective."""
    out: Tensor = Remap.apply(x, handle, move, inverse)  # type: ignore[no-untyped-call]
    return out


def find_move(handle: PlanHandle, source: str, target: str) -> tuple[Move, bool]:
    """The plan's move between two layouts, and whether it must run backwards. Raises UnknownNameError."""
    for move in handle.slice.moves:
        if {move.source, move.target} == {source, target}:
            return move, move.source == target
    known = ", ".join(f"{move.source} and {move.target}" for move in handle.slice.moves) or "none"
    raise UnknownNameError("remap", f"{source} -> {target}", f"the plan moves between {known}", "name these")


def to_linear(x: Tensor, handle: PlanHandle) -> Tensor:
    """x [home rows, ...] -> [rows of the layout `linear`, ...], even tokens for layers that work row by row, where the
    plan found that they pay; else x itself. Differentiable; every rank calls it."""
    return _where_planned(x, handle, inverse=False)


def from_linear(x: Tensor, handle: PlanHandle) -> Tensor:
    """The inverse of `to_linear`."""
    return _where_planned(x, handle, inverse=True)


def _where_planned(x: Tensor, handle: PlanHandle, inverse: bool) -> Tensor:
    move = next((move for move in handle.slice.moves if move.target == "linear"), None)
    return x if move is None else remapped(x, handle, move, inverse)


def _moved(x: Tensor, handle: PlanHandle, move: Move, inverse: bool) -> Tensor:
    source, target = (move.target, move.source) if inverse else (move.source, move.target)
    form = f"{x.dtype} {list(x.shape[1:])}"
    with handle.call(f"rows of {form} from layout {source} to {target}, plan {handle.name}"):
        return _moved_rows(x, handle, move, inverse)


def _moved_rows(x: Tensor, handle: PlanHandle, move: Move, inverse: bool) -> Tensor:
    handle.require_unpadded("layouts are moved")
    source, target = (move.target, move.source) if inverse else (move.source, move.target)
    given, wanted = (int(handle.slice.layout(name).rows_per_rank[0]) for name in (source, target))
    if len(x) != given:
        raise ExecutionError(f"this rank holds {given} rows of layout {source}, got {len(x)}")
    x, out = x.contiguous(), x.new_empty(wanted, *x.shape[1:])
    rows, rank = _rows(move, inverse), handle.communicator.rank
    posts = [
        Post(r.send, r.peer, (x if r.send else out)[r.row : r.row + r.rows].view(-1).view(torch.uint8))
        for r in rows
        if r.peer != rank
    ]
    flight = handle.communicator.batch(0, posts)
    own = [[r for r in rows if r.peer == rank and r.send == send] for send in (True, False)]
    for a, b in zip(*own, strict=True):
        out[b.row : b.row + b.rows] = x[a.row : a.row + a.rows]
    flight.wait()
    return out


def _rows(move: Move, inverse: bool) -> list[PeerRows]:
    columns = (move.table[name].tolist() for name in ("send", "peer", "row", "rows"))
    return [PeerRows(bool(send) ^ inverse, *rest) for send, *rest in zip(*columns, strict=True)]
