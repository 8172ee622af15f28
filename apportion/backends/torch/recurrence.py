"""Exchanges of recurrent layers on any placement of tokens: states between a document's runs, and halo rows.

A run of tokens maps its incoming state to out = M in + U. Runs that have a successor send U and M of each head to
slots, where they are folded along the document; the incoming states are sent back.

    forward    U, M of runs ──► slots   in[first] = 0,  in[next] = M in + U                 ──► in of runs
    backward   d in of runs ──► slots   d out = Σ over successors (d in + Mᵀ d out)         ──► d U = d out of runs

Both, and the exchange of halo rows that convolutions read, are ops, whose results selective activation checkpointing
can save. All ranks call them. `ir.isa.RECURRENCE_TABLES` documents the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from apportion.backends.torch.exchange import Exchange, exchange_rows
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.ops import LIBRARY, op
from apportion.ir.arrays import Bools, Ints, index_in_group, offsets
from apportion.ir.plan.tables import Recurrence, Table
from apportion.ir.request.recurrent import EARLY_SHARE, Recurrent, widest_halo


@dataclass(frozen=True)
class RunGroup:
    """Runs of one class. runs: their numbers; rows: int64, their rows, concatenated; lengths: rows per run; ends: int64
    [runs + 1], like cu_seqlens; has_all: whether the rank has no other runs, so that rows are in order."""

    runs: list[int]
    rows: Tensor
    lengths: list[int]
    ends: Tensor
    has_all: bool


@dataclass(frozen=True)
class HeadTransfer:
    """Transfer of some runs' heads to slots, or back; slots are in order of arrival. sent: int64, heads of runs to send
    to peer 0, 1, …; inverse: the inverse of `sent`; to_slots, to_runs: counts per peer in each direction."""

    sent: Tensor
    inverse: Tensor
    to_slots: list[int]
    to_runs: list[int]


@dataclass(frozen=True)
class Level:
    """Slots (one per head) whose runs have the same depth in their documents. parent: index of each slot's parent among
    the leading slots of the previous level; into: index of each slot's state; leads: indices of slots with a successor;
    u, m: indices of their U and M."""

    parent: Tensor
    into: Tensor
    leads: Tensor
    u: Tensor
    m: Tensor


@dataclass(frozen=True)
class RankRecurrence:
    """A rank's part of one kind of recurrent layers, on a device.

    whole, first, middle, last: runs of whole documents; of other documents, runs without a past, with a past and a
    successor, and without a successor; early: whether last runs are computed before their states arrive. place: int64
    [rows], the index of each row among the rows of these groups, end to end. u, m, states: transfers. halo: exchange
    of the rows before each run, as many as the widest kind reads, the nearest last; windows: int64, indices (in halo
    rows, then the rank's rows) of what this kind's convolution reads, run by run; kept: int64 [rows], indices of the
    convolution's results for the rank's rows.
    """

    name: str
    layer: Recurrent
    whole: RunGroup
    first: RunGroup
    middle: RunGroup
    last: RunGroup
    early: bool
    place: Tensor
    u: HeadTransfer
    m: HeadTransfer
    states: HeadTransfer
    levels: list[Level]
    halo: Exchange
    windows: Tensor
    kept: Tensor


def recurrence_of(handle: PlanHandle, kind: str, device: torch.device) -> RankRecurrence:
    """The rank's part of a kind on a device, built on first use."""

    def build() -> RankRecurrence:
        with torch.device(device):
            return _recurrence(handle, kind)

    return handle.state(build, "recurrence", kind, device)


# ---- tables


def _recurrence(handle: PlanHandle, kind: str) -> RankRecurrence:
    kinds, tables = handle.slice.header.recurrent, handle.slice.recurrence
    assert tables is not None  # the header has kinds
    runs, ranks, number = tables["runs"], handle.communicator.ranks, [*kinds].index(kind)
    past, leads = runs["past"] >= 0, runs["leads"] > 0
    whole, first, middle, last = (
        _group(runs, np.flatnonzero((past == with_past) & (leads == with_next)))
        for with_past, with_next in ((False, False), (False, True), (True, True), (True, False))
    )
    rows = torch.cat([group.rows for group in (whole, first, middle, last)])
    slots = _Slots.of(tables, number, ranks, kinds[kind].heads)
    is_followed = slots.past & slots.leads
    name, width = f"kind {kind}, plan {handle.name}", widest_halo(kinds)
    rows_before = f"rows before runs of {name}"
    halo = Exchange.of(handle.communicator, rows_before, tables["halo"], len(runs) * width)
    return RankRecurrence(
        name,
        kinds[kind],
        whole,
        first,
        middle,
        last,
        early=len(last.rows) > EARLY_SHARE * len(rows),
        place=rows.argsort(),
        u=slots.transfer(first.runs + middle.runs, slots.leads),
        m=slots.transfer(middle.runs, is_followed),
        states=slots.transfer(middle.runs + last.runs, slots.past),
        levels=slots.levels(is_followed),
        halo=halo,
        **_windows(runs, kinds[kind].halo, width),
    )


def _windows(runs: Table, reach: int, widest: int) -> dict[str, Tensor]:
    """`windows` and `kept` of a convolution that reads `reach` rows before a run."""
    lengths, number = runs.wide("rows"), np.arange(len(runs))
    offset = index_in_group(lengths + reach)
    run = np.repeat(number, lengths + reach)
    halo = (run + 1) * widest + offset - reach
    row = len(runs) * widest + runs.wide("row")[run] + offset - reach
    positions = np.repeat(number * reach, lengths) + np.arange(int(lengths.sum()))  # runs are in row order
    return {"windows": _ints(np.where(offset < reach, halo, row)), "kept": _ints(positions)}


def _group(runs: Table, numbers: Ints) -> RunGroup:
    lengths = runs.wide("rows")[numbers]
    rows = np.repeat(runs.wide("row")[numbers], lengths) + index_in_group(lengths)
    return RunGroup(
        numbers.tolist(), _ints(rows), lengths.tolist(), _ints(offsets(lengths)), len(numbers) == len(runs)
    )


@dataclass(frozen=True)
class _Slots:
    """Slots in which heads of a kind are folded, one per head. run, head, peer: by head of this rank's runs; slot_peer,
    parent: by slot of this rank, parent -1 if none; past, leads: bool, whether slots have a predecessor and
    a successor."""

    run: Ints
    head: Ints
    peer: Ints
    slot_peer: Ints
    parent: Ints
    past: Bools
    leads: Bools
    heads: int
    ranks: int

    @staticmethod
    def of(tables: Recurrence, kind: int, ranks: int, heads: int) -> _Slots:
        states, folds = (_table_of_kind(tables[name], kind) for name in ("states", "folds"))
        counts = states.wide("heads")
        head = np.repeat(states.wide("head"), counts) + index_in_group(counts)
        run, peer = (np.repeat(states.wide(name), counts) for name in ("run", "peer"))
        counts, parent = folds.wide("heads"), folds.wide("parent")
        start = offsets(counts)
        first_slot = int(np.count_nonzero(tables["folds"]["kind"] < kind))  # slots are sorted by kind
        parent_index = np.maximum(parent - first_slot, 0)
        parent_slot = np.where(
            np.repeat(parent >= 0, counts),
            np.repeat(start[parent_index], counts) + index_in_group(counts),
            -1,
        )
        leads = np.zeros(len(parent_slot), bool)
        leads[parent_slot[parent_slot >= 0]] = True
        slot_peer = np.repeat(folds.wide("peer"), counts)
        return _Slots(run, head, peer, slot_peer, parent_slot, parent_slot >= 0, leads, heads, ranks)

    def transfer(self, runs: list[int], of_slots: Bools) -> HeadTransfer:
        """Builds the transfer of these runs' heads, in this order, to their slots."""
        position = np.full(int(self.run.max(initial=-1)) + 1, -1)
        position[runs] = np.arange(len(runs))
        order = np.argsort(self.peer, kind="stable")
        order = order[position[self.run[order]] >= 0]
        rows = position[self.run[order]] * self.heads + self.head[order]
        counts = (
            np.bincount(peers, minlength=self.ranks) for peers in (self.peer[order], self.slot_peer[of_slots])
        )
        to_slots, to_runs = (part.tolist() for part in counts)
        return HeadTransfer(_ints(rows), _ints(np.argsort(rows)), to_slots, to_runs)

    def _arrival_positions(self, of_slots: Bools) -> Ints:
        """The position of each of these slots in order of arrival."""
        order = np.argsort(self.slot_peer, kind="stable")
        positions = np.zeros(len(order), np.int64)
        positions[order] = np.cumsum(of_slots[order]) - 1
        return positions

    def levels(self, followed: Bools) -> list[Level]:
        """The levels of the fold. followed: slots with an M."""
        depth = np.zeros(len(self.parent), np.int64)
        for slot, parent in enumerate(self.parent.tolist()):
            depth[slot] = depth[parent] + 1 if parent >= 0 else 0
        u, m, state = map(self._arrival_positions, (self.leads, followed, self.past))
        position, levels = np.zeros(len(depth), np.int64), list[Level]()
        for level in range(int(depth.max(initial=-1)) + 1):
            slots = np.flatnonzero(depth == level)
            lead_indexes = np.flatnonzero(self.leads[slots])
            leaders = slots[lead_indexes]
            columns = position[self.parent[slots]], state[slots], lead_indexes, u[leaders], m[leaders]
            position[leaders] = np.arange(len(leaders))
            levels.append(Level(*map(_ints, columns)))
        return levels


def _table_of_kind(table: Table, kind: int) -> Table:
    rows = np.flatnonzero(table["kind"] == kind)
    return table.take(rows, np.array([0, len(rows)]))


def _ints(values: Ints) -> Tensor:
    return torch.tensor(np.asarray(values, np.int64))


# ---- the fold


@op
def _fold(u: Tensor, m: Tensor, number: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """u [first and middle runs, heads, K, V], m [middle runs, heads, ...] -> the incoming states [middle and last
    runs, heads, K, V], and the M of this rank's slots."""
    handle = PlanHandle.of_number(number)
    local = recurrence_of(handle, kind, u.device)
    u_rows, m_rows = u.flatten(0, 1), m.flatten(0, 1)
    label = f"states of {local.name}"
    u_slots, m_slots = _to_slots(handle, label, (u_rows, local.u), (m_rows, local.m))
    states = u.new_empty(sum(local.states.to_runs), *u.shape[2:])
    out = u_slots[:0]
    for depth, level in enumerate(local.levels):
        state = out[level.parent] if depth else None
        out = u_slots[level.u]
        if state is not None:
            states[level.into] = state
            out = out + _apply_transition(m_slots[level.m], state[level.leads])
    rows = _to_runs(handle, label, states, local.states)
    return rows.view(len(local.middle.runs) + len(local.last.runs), *u.shape[1:]), m_slots


@op
def _fold_grad(dstates: Tensor, m_slots: Tensor, number: Tensor, kind: str) -> Tensor:
    """Returns du [first and middle runs, heads, K, V]."""
    handle = PlanHandle.of_number(number)
    local = recurrence_of(handle, kind, dstates.device)
    label = f"gradient of states of {local.name}"
    (din,) = _to_slots(handle, label, (dstates.flatten(0, 1), local.states))
    douts = dstates.new_zeros(sum(local.u.to_runs), *dstates.shape[2:])
    for depth in reversed(range(1, len(local.levels))):
        level, previous = local.levels[depth], local.levels[depth - 1]
        dstate = din[level.into]
        dstate[level.leads] += _apply_transition(
            m_slots[level.m].mT if m_slots.dim() == 3 else m_slots[level.m], douts[level.u]
        )
        # accumulates in index order, on a GPU too
        douts.index_put_((previous.u[level.parent],), dstate, accumulate=True)
    du = _to_runs(handle, label, douts, local.u)
    return du.view(len(local.first.runs) + len(local.middle.runs), *dstates.shape[1:])


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, m: Tensor, number: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            states, m_slots = fold_op(u, m, number, kind)
        ctx.kind = kind
        ctx.save_for_backward(states, m_slots, number)
        ctx.mark_non_differentiable(m_slots)
        return states, m_slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        states, m_slots, number = ctx.saved_tensors
        du = fold_grad_op(dstates, m_slots, number, ctx.kind)
        local = recurrence_of(PlanHandle.of_number(number), ctx.kind, du.device)
        first, middle = len(local.first.runs), len(local.middle.runs)
        dm = _transition_gradient(local.layer, du[first:], states[:middle])
        return du, dm, None, None


def _apply_transition(m: Tensor, state: Tensor) -> Tensor:
    """Applies M to states [n, K, V]; m: [n, K, K], diagonal [n, K], or scalar [n]."""
    with torch.autocast(m.device.type, enabled=False):  # backward may run under autocast
        return m @ state if m.dim() == 3 else m.view(*m.shape, *(1,) * (3 - m.dim())) * state


def _transition_gradient(layer: Recurrent, dout: Tensor, state: Tensor) -> Tensor:
    if layer.delta:
        with torch.autocast(dout.device.type, enabled=False):
            return dout @ state.mT
    product = (dout * state).sum(-1)
    return product if layer.gate == "diagonal" else product.sum(-1)


def _to_slots(handle: PlanHandle, label: str, *parts: tuple[Tensor, HeadTransfer]) -> list[Tensor]:
    """Sends the heads of runs to their slots, for each part."""
    transfers = [(rows[transfer.sent], transfer.to_slots, transfer.to_runs) for rows, transfer in parts]
    return exchange_rows(handle.communicator, f"{label}, to slots", transfers)


def _to_runs(handle: PlanHandle, label: str, rows: Tensor, transfer: HeadTransfer) -> Tensor:
    """The inverse of `_to_slots`, for one part."""
    parts = [(rows, transfer.to_runs, transfer.to_slots)]
    (received,) = exchange_rows(handle.communicator, f"{label}, to runs", parts)
    return received[transfer.inverse]


# ---- rows before runs


@op
def _halo(x: Tensor, number: Tensor, kind: str) -> Tensor:
    """x [rows, channels] -> [runs * width, channels]: the rows before each run, zeros before a document."""
    return recurrence_of(PlanHandle.of_number(number), kind, x.device).halo.forward(x)


@op
def _halo_grad(grad: Tensor, rows: int, number: Tensor, kind: str) -> Tensor:
    """The gradient of x [rows, channels]."""
    return recurrence_of(PlanHandle.of_number(number), kind, grad.device).halo.backward(grad, rows)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, kind: str) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = halo_op(x, number, kind)
        ctx.rows, ctx.kind = len(x), kind
        ctx.save_for_backward(number)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (number,) = ctx.saved_tensors
        return halo_grad_op(grad, ctx.rows, number, ctx.kind), None, None


LIBRARY.impl("fold", _Fold.apply, "Autograd")
LIBRARY.impl("halo", _Halo.apply, "Autograd")
fold_op, fold_grad_op = torch.ops.apportion.fold.default, torch.ops.apportion.fold_grad.default
halo_op, halo_grad_op = torch.ops.apportion.halo.default, torch.ops.apportion.halo_grad.default
