"""Runs of latent rows that an instruction's tasks read: each row is expanded once, for as many heads as memory allows.

tasks on    KV.work[0:512)  KV.work[256:768)   │  KV.home[0:64)
runs        KV.work[0:768)                     │  KV.home[0:64)      one product of each with the layer's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from apportion.backends.interp import GradTask, Operand, Task

#: maximum elements of expanded keys and values in memory at a time
MAX_ELEMENTS = 2**27


T = TypeVar("T", Task, GradTask)


@dataclass
class LatentRun(Generic[T]):
    """Contiguous rows of KV, the same rows of dKV if gradients are accumulated, and their readers. heads: the query
    heads whose keys and values are needed."""

    kv: Operand
    dkv: Operand | None
    heads: tuple[int, ...]
    tasks: list[T]

    def slices(self, elements: int) -> Iterator[slice]:
        """Slices of the heads, expanded one slice at a time. elements: per expanded row and head."""
        step = max(1, MAX_ELEMENTS // (elements * self.kv.rows))
        return (slice(first, min(first + step, len(self.heads))) for first in range(0, len(self.heads), step))

    def rows_of(self, operand: Operand) -> slice:
        """The rows of a task's operand within the run."""
        return slice(operand.row - self.kv.row, operand.row - self.kv.row + operand.rows)


def latent_runs(operands: Sequence[Operand], tasks: Sequence[T]) -> list[LatentRun[T]]:
    """The runs that tasks read. Rows with gradients in another space or at another offset form another run."""
    groups: dict[tuple[object, ...], list[LatentRun[T]]] = {}
    for task in sorted(tasks, key=lambda task: operands[task.kv].row):
        kv, heads = operands[task.kv], operands[task.q].heads
        dkv = operands[task.dkv] if isinstance(task, GradTask) else None
        key = (kv.space, heads) if dkv is None else (kv.space, heads, dkv.space, dkv.row - kv.row)
        runs = groups.setdefault(key, [])
        if not runs or kv.row > runs[-1].kv.row_slice.stop:
            runs.append(LatentRun(kv, dkv, heads, []))
        run = runs[-1]
        rows = max(run.kv.rows, kv.row_slice.stop - run.kv.row)
        run.kv, run.dkv = replace(run.kv, rows=rows), run.dkv and replace(run.dkv, rows=rows)
        run.tasks.append(task)
    return [run for runs in groups.values() for run in runs]
