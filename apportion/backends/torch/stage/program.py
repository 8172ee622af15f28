"""Loads a rank's program as launches: all tables are built once per plan and sent to the device in one copy.

    columns ──worklists──► attend, dq, dkdv       steps ──rowlists──► move, add, merge, delta, finish
                    └────────── one int32 buffer, pinned, copied in stream order ───────────────────────────┘

For each launch, a call only has to insert its arrays among the prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apportion.backends.torch.executor import Executable, LoadRequest
from apportion.backends.torch.stage.drafts import Drafts, Launch
from apportion.ir.arrays import Ints


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
    """A loaded program. launches: by step; results: copies of dq, dk and dv in the model's dtype."""

    table: Table
    launches: Mapping[int, tuple[Launch, ...]]
    results: tuple[Launch, ...]
    drafts: Drafts

    @property
    def table_numbers(self) -> int:
        return len(self.table.data)


def load(request: LoadRequest) -> StageExecutable:
    """Loads a one-rank program on a device."""
    drafts, program = Drafts(request), request.program
    steps = {step.index: [*drafts.step(step)] for step in program.steps}
    results = [*drafts.results(request.rows)]
    numbers = np.concatenate([*drafts.tables, np.zeros(4, np.int32)])
    drafts.tables.clear()
    spare = request.envelope.size("table_numbers", len(numbers)) - len(numbers)
    table = Table(np.pad(numbers, (0, spare)), request.device)
    launches = {index: tuple(draft.on(table.data) for draft in group) for index, group in steps.items()}
    last = tuple(draft.on(table.data) for draft in results)
    return StageExecutable(program, drafts.rounds, drafts.arenas, table, launches, last, drafts)
