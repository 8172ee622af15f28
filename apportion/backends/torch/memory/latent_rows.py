"""Latent rows that the tasks of an instruction read: each is expanded once, for as many heads as memory allows.

tasks on    KV.work[0:512)  KV.work[256:768)   │  KV.home[0:64)
runs        KV.work[0:768)                     │  KV.home[0:64)      one product of each with the layer's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from apportion.backends.interp import GradTask, Operand, Task

#: numbers of expanded keys and values that are held at a time
MOST_NUMBERS = 2**27


T = TypeVar("T", Task, GradTask)


@dataclass
class LatentRun(Generic[T]):
    """Neighbouring rows of KV, the same rows of dKV where gradients are added, and who reads them. heads: the query
    heads, whose keys and values are wanted."""

    kv: Operand
    dkv: Operand | None
    heads: tuple[int, ...]
    tasks: list[T]

    def slices(self, numbers: int) -> Iterator[slice]:
        """Heads that are expanded at a time. numbers: of one row and head, expanded."""
        step = max(1, MOST_NUMBERS // (numbers * self.kv.rows))
        return (slice(at, min(at + step, len(self.heads))) for at in range(0, len(self.heads), step))

    def rows_of(self, operand: Operand) -> slice:
        """Where rows of a task are in the run."""
        return slice(operand.row - self.kv.row, operand.row - self.kv.row + operand.rows)


def latent_runs(operands: Sequence[Operand], tasks: Sequence[T]) -> list[LatentRun[T]]:
    """The runs that tasks read. Rows whose gradients are added elsewhere are a run of their own."""
    found: dict[tuple[object, ...], list[LatentRun[T]]] = {}
    for task in sorted(tasks, key=lambda task: operands[task.kv].row):
        kv, heads = operands[task.kv], operands[task.q].heads
        dkv = operands[task.dkv] if isinstance(task, GradTask) else None
        apart = (kv.space, heads) if dkv is None else (kv.space, heads, dkv.space, dkv.row - kv.row)
        runs = found.setdefault(apart, [])
        if not runs or kv.row > runs[-1].kv.row_slice.stop:
            runs.append(LatentRun(kv, dkv, heads, []))
        run = runs[-1]
        rows = max(run.kv.rows, kv.row_slice.stop - run.kv.row)
        run.kv, run.dkv = replace(run.kv, rows=rows), run.dkv and replace(run.dkv, rows=rows)
        run.tasks.append(task)
    return [run for runs in found.values() for run in runs]
