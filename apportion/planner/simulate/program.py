"""A program as the simulator runs it: what each instruction takes, which launch it belongs to, and what it moves.

    instructions of all ranks ──► Script    work_us, and the launch that a launch or a wait is about
    transfers of all ranks    ──► Traffic   every send with its receive: one row a transfer, with its two ports

A *launch* is one rank's part of a round. Ports are numbered: a rank's own link out, then in, then the NICs out, then
in; each carries one transfer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints, offsets
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import VerifyError
from apportion.ir.isa import RESULTS, Op
from apportion.ir.orders import sort_order
from apportion.ir.plan.fusion import Complete, find_complete
from apportion.ir.plan.programs import ProgramView, head_table
from apportion.ir.plan.row_statistics import Statistics, find_statistics
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor

#: what an instruction is to the event loop
WORK, LAUNCH, WAIT = range(3)


class Script(NamedTuple):
    """Instructions of all ranks and their launches, as the event loop reads them.

    ptr: int64 [ranks + 1] first instruction of each rank. role: uint8 [instructions], WORK, LAUNCH or WAIT. work_us:
    float64 [instructions], of a launch before it, of a wait after its round is complete. end_us: float64 [ranks], work
    after the last instruction. launch: int64 [instructions], the launch of a launch or wait, else -1.
    rank, round, channel: int64 [launches]. before, after: int64 [launches], the neighbours in the launch's channel, or
    -1. end_ptr: int64 [launches + 1] into ends: int64 [2 transfers], the transfers of each launch.
    """

    ptr: Ints
    role: Ints
    work_us: Floats
    end_us: Floats
    launch: Ints
    rank: Ints
    round: Ints
    channel: Ints
    before: Ints
    after: Ints
    end_ptr: Ints
    ends: Ints


class Traffic(NamedTuple):
    """Transfers in the order that ports prefer: by round, by how far the receiver is behind the sender in the circle
    of ranks (so that all-to-all goes in shifts, which no two transfers dispute), by sender, as listed.

    sender, receiver: int64 [transfers], launches. out_port, in_port: int64. wire_us: float64, how long it occupies
    both ports. latency_us: float64, how much later it is complete. bytes, tensor: int64.
    """

    sender: Ints
    receiver: Ints
    out_port: Ints
    in_port: Ints
    wire_us: Floats
    latency_us: Floats
    bytes: Ints
    tensor: Ints


class Tiles(NamedTuple):
    """Transfers as listed, rank after rank. launch: int64, and send, peer, operand: integers [transfers], an operand by
    its number on its rank. rank, round, first: int64, and results: bool [launches], where the operands of the rank
    begin, and whether what travels are results. bytes, tensor: int64 [operands]. wire: int64 [2, operands], what an
    operand takes on its way, and as a result."""

    launch: Ints
    send: Ints
    peer: Ints
    operand: Ints
    rank: Ints
    round: Ints
    first: Ints
    results: Bools
    bytes: Ints
    wire: Ints
    tensor: Ints


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of all ranks: tensor, rows, heads (1 for X and dX), bytes in memory, int64 [operands]; wire: int64 [2,
    operands], bytes of one that travels, and of a sum once it is a result in the model's dtype; ptr [ranks + 1]."""

    tensor: Ints
    rows: Ints
    heads: Ints
    bytes: Ints
    wire: Ints
    ptr: Ints

    @property
    def results(self) -> Ints:
        """int64 [operands]: bytes of a sum as a result."""
        of_results: Ints = self.wire[1]
        return of_results


@dataclass(frozen=True, eq=False)
class View(ProgramView):
    """The programs of all ranks of one kind and phase, and what follows from their tables. cluster: where they run."""

    plan: Plan
    phase: str
    source: ProgramSet
    cluster: Cluster

    @property
    def model(self) -> Model:
        return self.plan.request.model

    @property
    def ranks(self) -> int:
        return self.plan.header.ranks

    @cached_property
    def speeds(self) -> Floats:
        """float64 [ranks]."""
        speeds = self.cluster.speeds
        return np.ones(self.ranks) if speeds is None else np.asarray(speeds, np.float64)

    @cached_property
    def launch_ranks(self) -> Ints:
        """int64 [launches]."""
        return self.rank_of[self.launches]

    @cached_property
    def launch_rounds(self) -> Ints:
        """int64 [launches]."""
        return self.instructions["round"][self.launches].astype(np.int64)

    @cached_property
    def tiles(self) -> Tiles:
        """All transfers, with what they move."""
        table, ptr = self.source["transfers"], self.operands.ptr
        launch = np.repeat(np.arange(len(self.launches)), self.instructions["count"][self.launches])
        first, found = ptr[self.launch_ranks], self.operands
        send, peer, operand = table.values
        return Tiles(
            launch,
            send,
            peer,
            operand,
            self.launch_ranks,
            self.launch_rounds,
            first,
            self.instructions["mode"][self.launches] & RESULTS > 0,
            found.bytes,
            found.wire,
            found.tensor,
        )

    @cached_property
    def launch_of(self) -> Ints:
        """int64 [instructions]: the launch that a launch starts or a wait waits for, else -1. Raises VerifyError for a
        wait without launch."""
        table, found = self.instructions, np.full(len(self.instructions), -1)
        found[self.launches] = np.arange(len(self.launches))
        waits = np.flatnonzero(table["op"] == Op.WAIT)
        missing = waits[self.partner[waits] < 0]
        if len(missing):
            rank, round_ = self.rank_of[missing[0]], table["round"][missing[0]]
            raise VerifyError(
                f"rank {rank} waits for round {round_} and never launches it: such a plan cannot run; verify it"
            )
        found[waits] = found[self.partner[waits]]
        return found

    @cached_property
    def operands(self) -> Operands:
        table = self.source["operands"]
        tensor, rows = (table.wide(name) for name in ("tensor", "rows"))
        heads, row_bytes = self._shapes()
        kind = tensor * heads.shape[1] + table["heads"]
        return Operands(
            tensor,
            rows,
            heads.ravel()[kind],
            rows * row_bytes.ravel()[kind],
            rows * heads.ravel()[kind] * self._wire_bytes.take(tensor, 1),
            table.ptr.astype(np.int64, copy=False),
        )

    def _shapes(self) -> tuple[Ints, Ints]:
        """int64 [tensors, none and head sets] each: heads of an operand, and bytes of one of its rows."""
        head = self.plan.header
        heads = head_table(head.q_heads, head.kv_heads, head.head_sets)
        per_head = [self.model.row_bytes(Tensor(t), 1) for t in range(max(Tensor) + 1)]
        if self.phase == "backward":  # what the forward gave
            per_head[Tensor.O] = self.model.output_bytes
        return heads, heads * np.array(per_head)[:, None]

    @cached_property
    def _wire_bytes(self) -> Ints:
        """int64 [2, tensors]: of a row of one head that travels, and of one of a sum as a result; 0 of what is no
        sum."""
        model = self.model
        return np.array(
            [
                [of(tensor) for tensor in Tensor]
                for of in (partial(model.sent_bytes, heads=1), model.sent_result_bytes)
            ]
        )

    @cached_property
    def complete(self) -> Mapping[str, Complete]:
        """Column of the tasks' list -> the home rows that its tasks leave as results."""
        return find_complete(self.source, self.phase)

    @cached_property
    def statistics(self) -> Statistics:
        """Home rows whose statistics attention computes."""
        return find_statistics(self.source)

    @cached_property
    def in_place(self) -> Ints:
        """int64 [transfers]: how many of its rows tasks have written into the message."""
        found = np.zeros(len(self.source["transfers"]), np.int64)
        for one in self.complete.values():
            found += one.sent.sums(len(found))
        return found

    @cached_property
    def delivered(self) -> tuple[Ints, Ints]:
        """int64 [n] each: the rows of list `rowops` that are of `deliver`, and how many rows of the sum each has to
        move, which no task has written where they belong."""
        some = np.flatnonzero(self.instructions["op"][self.instruction_of("rowops")] == Op.DELIVER)
        left = self.operands.rows[self.operand("rowops", "a")[some]]
        for one in self.complete.values():
            left = left - one.delivered.sums(len(self.source["rowops"]))[some]
        return some, left

    @cached_property
    def finished(self) -> tuple[Ints, Ints]:
        """int64 [n] each: the rows of list `rowops` that are of `finish`, and how many rows of O each has to do, which
        no task has left complete."""
        instruction = self.instruction_of("rowops")
        some = np.flatnonzero(self.instructions["op"][instruction] == Op.FINISH)
        if not len(some):
            return some, some
        operand, rank = self.operand("rowops", "c")[some], self.rank_of[instruction[some]]
        rows, row = self.operands.rows[operand], self.source["operands"].wide("row")[operand]
        return some, rows - self.complete["o"].within(rank, row, rows)

    @cached_property
    def stated(self) -> tuple[Ints, Ints]:
        """int64 [n] each: the rows of list `rowops` that are of `delta`, and how many rows each has to do, as no task
        does."""
        some = np.flatnonzero(self.instructions["op"][self.instruction_of("rowops")] == Op.DELTA)
        rows = self.operands.rows[self.operand("rowops", "c")[some]]
        return some, rows - self.statistics.rowops.sums(len(self.source["rowops"]))[some]

    def operand(self, name: str, column: str) -> Ints:
        """int64 [rows]: which of `operands` a column of a list names."""
        return self.source[name][column] + self._first_operands[name]

    @cached_property
    def _first_operands(self) -> dict[str, Ints]:
        """list -> int64 [rows]: the first operand of each row's rank."""
        first = self.operands.ptr[:-1]
        return {
            name: np.repeat(first, np.diff(self.source[name].ptr)) for name in ("tasks", "grads", "rowops")
        }


def write_script(view: View, work_us: Floats, end_us: Floats, traffic: Traffic) -> Script:
    """The script of a program. Raises VerifyError for a wait without launch."""
    table, at, rank = view.instructions, view.launches, view.launch_ranks
    role = np.full(len(table), WORK, np.uint8)
    role[at], role[table["op"] == Op.WAIT] = LAUNCH, WAIT
    channel = table["channel"][at].astype(np.int64)
    before, after = neighbours(rank * (int(channel.max(initial=0)) + 1) + channel)
    ends = np.concatenate([traffic.sender, traffic.receiver])
    order = sort_order(ends, len(at))
    return Script(
        table.ptr.astype(np.int64),
        role,
        work_us,
        end_us,
        view.launch_of,
        rank,
        view.launch_rounds,
        channel,
        before,
        after,
        offsets(np.bincount(ends, minlength=len(at))),
        (order % max(len(traffic.sender), 1)).astype(np.int64),
    )


def neighbours(stream: Ints) -> tuple[Ints, Ints]:
    """int64 [launches] each: the launches before and after each one in its stream, -1 for none."""
    before, after = np.full((2, len(stream)), -1)
    order = np.argsort(stream, kind="stable")
    same = np.flatnonzero(stream[order[1:]] == stream[order[:-1]])
    before[order[same + 1]], after[order[same]] = order[same], order[same + 1]
    return before, after


def launch_instructions(script: Script) -> Ints:
    """int64 [launches]: the instruction of each launch."""
    return np.flatnonzero(script.role == LAUNCH)
