"""A single task as a program of one instruction with all its rows at home, for profiles that time tasks one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from apportion.backends.interp import compile_program
from apportion.backends.torch.executor import Layer, LoadRequest
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.memory.arenas import Buffer, Memory
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.stage.machine import StageMachine
from apportion.backends.torch.stage.program import load
from apportion.ir.isa import TABLES, Op, Use
from apportion.ir.plan.tables import Header, ProgramSet, Table
from apportion.ir.tensors import KV_SIDE, Space, Tensor as Name


def lone_task(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dmin: int, dmax: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that compute a task's forward and backward: they read only its operands and write each result once.

    q [rows, Hq, D], k [keys, Hk, D], v [keys, Hk, Dv], do [rows, Hq, Dv]. A pair is allowed if row - key is
    in [dmin, dmax].
    """
    home = {Name.Q: (q,), Name.KV: (k, v)}
    dtype = next(name for name, value in DTYPES.items() if value == q.dtype)
    widths = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    header = Header(1, ("default",), "", 0, "attention", ("attention",), (), *widths, dtype)
    forward = _machine(header, Op.ATTEND, home, (dmin, dmax))
    backward = _machine(header, Op.ATTEND_GRAD, {**home, Name.DO: (do,)}, (dmin, dmax))
    return forward.run, backward.run


def _machine(
    header: Header, op: Op, home: dict[Name, tuple[Tensor, ...]], diagonals: tuple[int, int]
) -> StageMachine:
    rows, keys = (len(home[name][0]) for name in (Name.Q, Name.KV))
    columns, device = _columns(op, rows, keys, diagonals), home[Name.Q][0].device
    rows = max(rows, keys)
    executable = load(LoadRequest(columns, compile_program(columns, header), device, rows))
    memory = Memory(executable.arenas, rows, home, Buffer(executable.arenas.size, device))
    return StageMachine(executable, memory, Layer(Score(header.head_dim**-0.5)), RecordingDevice(0, 1))


def _columns(op: Op, rows: int, keys: int, diagonals: tuple[int, int]) -> ProgramSet:
    ends = [argument.tensors[0] for argument in op.rule.arguments]
    counts = [keys if name in KV_SIDE else rows for name in ends]
    operands = [
        (int(name), int(Space.HOME), 0, count, 0, 0) for name, count in zip(ends, counts, strict=True)
    ]
    first = sum(argument.flag for argument in op.rule.arguments if argument.use is Use.ADD)
    task = (*range(1, len(ends) + 1), *diagonals, first)
    lists: dict[str | None, list[tuple[int, ...]]] = {
        "operands": [(0,) * 6, *operands],
        "instructions": [(int(op), 0, 0, 0, 1)],
        op.rule.list: [task],
    }
    tables = {}
    for name, names in TABLES.items():
        rows_of = np.array(lists.get(name, []), np.int64).reshape(-1, len(names))
        tables[name] = Table.of(np.array([0, len(rows_of)]), dict(zip(names, rows_of.T, strict=True)))
    return ProgramSet(tables)
