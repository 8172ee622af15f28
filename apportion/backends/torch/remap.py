"""Moves rows between two layouts of a plan, for layers that need a layout other than attention's; differentiable."""

from __future__ import annotations

from torch import Tensor

from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.handle import PlanHandle
from apportion.ir.errors import ExecutionError, UnknownNameError
from apportion.ir.plan.tables import Move


def remap(x: Tensor, handle: PlanHandle, move: Move, inverse: bool) -> Tensor:
    """Moves x from the move's source layout to its target, or back if `inverse`; differentiable. A collective.
    Raises ExecutionError for a different number of rows, and if ranks hold different plans."""
    handle.require_unpadded("layouts are moved")
    source, target = (move.target, move.source) if inverse else (move.source, move.target)
    source_rows, target_rows = (int(handle.slice.layout(name).rows_per_rank[0]) for name in (source, target))
    if len(x) != source_rows:
        raise ExecutionError(f"this rank holds {source_rows} rows of layout {source}, got {len(x)}")
    handle.agree()
    name = f"rows from layout {source} to {target}, plan {handle.name}"
    return Exchange.of(handle.communicator, name, move.table, target_rows, inverse)(x)


def find_move(handle: PlanHandle, source: str, target: str) -> tuple[Move, bool]:
    """The plan's move between two layouts, and whether it must run backwards. Raises UnknownNameError."""
    for move in handle.slice.moves:
        if {move.source, move.target} == {source, target}:
            return move, move.source == target
    pairs = ", ".join(f"{move.source} and {move.target}" for move in handle.slice.moves) or "none"
    raise UnknownNameError(
        "remap", f"{source} -> {target}", f"the plan moves between {pairs}", "name two of these"
    )


def to_linear(x: Tensor, handle: PlanHandle) -> Tensor:
    """x [home rows, ...] -> [rows of the layout `linear`, ...], an even split for layers that work row by row, if the
    plan has that layout; else x itself. Differentiable; every rank calls it."""
    return _remap_if_planned(x, handle, inverse=False)


def from_linear(x: Tensor, handle: PlanHandle) -> Tensor:
    """The inverse of `to_linear`."""
    return _remap_if_planned(x, handle, inverse=True)


def _remap_if_planned(x: Tensor, handle: PlanHandle, inverse: bool) -> Tensor:
    move = next((move for move in handle.slice.moves if move.target == "linear"), None)
    return x if move is None else remap(x, handle, move, inverse)
