"""Loads a rank's program as launches: all tables are built once per plan and sent to the device in one copy.

    columns ──worklists──► attend, dq, dkdv       steps ──rowlists──► move, add, merge, delta, finish
                    └────────── one int32 buffer, pinned, copied in stream order ───────────────────────────┘

For each launch, a call only has to insert its arrays among the prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from apportion.backends.torch.executor import Executable, LoadRequest
from apportion.backends.torch.memory.arenas import Arenas
from apportion.backends.torch.memory.rounds import find_rounds
from apportion.backends.torch.stage.drafts import Drafts, Launch
from apportion.backends.torch.stage.in_place import DirectRows, earliest_writes
from apportion.backends.torch.stage.rowlists import Slot
from apportion.backends.torch.stage.variants import Variant, variant
from apportion.ir.arrays import Ints
from apportion.ir.plan.fusion import find_complete_rows
from apportion.ir.tensors import Tensor as Name


class Table:
    """All tables of a program on its device. They are copied on the stream of the loading thread, possibly ahead of
    time: other streams wait for the copy once."""

    def __init__(self, numbers: Ints, device: torch.device) -> None:
        host = torch.from_numpy(numbers)
        self._joined: set[int] = set()
        self._copied: Any = None
        if device.type != "cuda":
            self.data = host
            return
        self.data = host.pin_memory().to(device, non_blocking=True)
        stream = torch.cuda.current_stream(device)
        self._copied = stream.record_event()
        self._joined.add(stream.cuda_stream)

    def join(self) -> None:
        """Makes the current stream wait for the copy; called before it uses the tables."""
        if self._copied is None:
            return
        stream = torch.cuda.current_stream(self.data.device)
        if stream.cuda_stream not in self._joined:
            stream.wait_event(self._copied)
            self.data.record_stream(stream)
            self._joined.add(stream.cuda_stream)


@dataclass(frozen=True)
class StageExecutable(Executable):
    """A loaded program. launches: by step; slots: the arrays that a machine provides, by number; shares: number of
    tiles of all delta instructions; complete: (step, tensor, whether at home) -> ascending ranges of rows that it
    leaves as results; in_place: the destinations of each sum's complete work rows."""

    table: Table
    launches: Mapping[int, tuple[Launch, ...]]
    results: tuple[Launch, ...]  # dq, dk, dv in the model's dtype
    slots: tuple[Slot, ...]
    variant: Variant
    shares: int
    complete: Mapping[tuple[int, Name, bool], list[tuple[int, int]]]
    in_place: Mapping[Name, list[DirectRows]]

    @property
    def table_numbers(self) -> int:
        return len(self.table.data)

    @cached_property
    def constants(self) -> Mapping[bool, Mapping[str, Mapping[str, Any]]]:
        """The compile-time arguments of the attention kernels, without and with a softcap."""
        shapes, constants_of = self.variant.shapes, self.variant.constants
        return {
            capped: {kernel: constants_of(kernel, capped) for kernel in shapes} for capped in (False, True)
        }


def load(request: LoadRequest, shapes: Variant | None = None) -> StageExecutable:
    """Loads a one-rank program on a device. shapes: tile shapes; by default chosen for the header."""
    columns, program, device, rows, hidden, envelope = request
    complete = find_complete_rows(columns)
    rounds = find_rounds(columns, program, hidden, earliest_writes(columns, complete))
    arenas = Arenas(program, rounds.staging_bytes, hidden, envelope)
    header = program.header
    kernel_shapes = shapes or variant(header.dtype, header.head_dim, header.v_head_dim)
    drafts = Drafts(columns, program, arenas, rounds, kernel_shapes, complete)
    drafts_of = {step.index: tuple(drafts.step(step)) for step in program.steps}
    results = tuple(drafts.results(rows))
    numbers = np.concatenate([*drafts.tables, np.zeros(4, np.int32)])
    spare = envelope.size("table_numbers", len(numbers)) - len(numbers)
    table = Table(np.pad(numbers, (0, spare)), device)
    launches = {
        index: tuple(draft.launch(table.data, drafts) for draft in group)
        for index, group in drafts_of.items()
    }
    last = tuple(draft.launch(table.data, drafts) for draft in results)
    slots, finished, shares = tuple(drafts.slots), drafts.complete(), drafts.shares
    in_place = {Name[column.upper()]: entries for column, entries in drafts.in_place.rows.items()}
    result_only = frozenset(
        Name[column.upper()] for column, ranges in complete.items() if ranges.has_all_results(rows)
    )
    common = program, rounds, arenas, result_only
    return StageExecutable(*common, table, launches, last, slots, kernel_shapes, shares, finished, in_place)
