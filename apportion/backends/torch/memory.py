"""A rank's memory during one call: home rows and work arenas, and operands as views of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from apportion.backends.interp import ACCUMULATORS, Arena, Component, Operand, Program, components
from apportion.backends.torch.columns import Columns, pick, put
from apportion.backends.torch.kernels import accumulator_dtype
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import HEADLESS, KV_SIDE
from apportion.ir.isa import Tensor as Name

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

Parts = tuple[Tensor, ...]


class View:
    """Rows and head columns of an operand. `read` gives views of the memory where columns are evenly spaced;
    where they are not, copies, and `write` puts them back after changes in place."""

    __slots__ = ("_columns", "_parts", "_rows", "operand", "wire")

    def __init__(self, operand: Operand, arrays: Parts, wire: tuple[torch.dtype, ...]) -> None:
        self.operand, self.wire = operand, wire
        self._rows = tuple(array.narrow(0, operand.row, operand.rows) for array in arrays)
        self._columns: Columns | None = None if operand.tensor in HEADLESS else operand.columns
        scattered = isinstance(self._columns, tuple)
        self._parts = None if scattered else self._gather()

    def _gather(self) -> Parts:
        columns = self._columns
        return self._rows if columns is None else tuple(pick(rows, columns) for rows in self._rows)

    def read(self) -> Parts:
        return self._gather() if self._parts is None else self._parts

    def write(self, parts: Sequence[Tensor]) -> None:
        """Stores parts that `read` returned. Nothing to do for views."""
        if self._parts is None and self._columns is not None:
            for rows, part in zip(self._rows, parts, strict=True):
                put(rows, self._columns, part)

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Stores any parts."""
        mine = self.read()
        for own, part in zip(mine, parts, strict=True):
            own.copy_(part)
        self.write(mine)


class Memory:
    """Home rows and work arenas of one call, allocated when it starts and gone when it ends.

    given: home tensors that the caller passes in; other home tensors are made when an operand names them.
    """

    def __init__(self, program: Program, rows: int, given: Mapping[Name, Parts], hidden: int = 0) -> None:
        self._header, self._hidden = program.header, hidden
        self.dtype = DTYPES[program.header.dtype]
        self.device = next(iter(given.values()))[0].device
        self._rows = rows
        self.home: dict[Name, Parts] = dict(given)
        self.work = {arena.tensor: self._arena(arena) for arena in program.arenas}
        self._wire = {
            name: tuple(self._wire_dtype(name, part) for part in components(name, self._header))
            for name in Name
            if name
        }

    def view(self, operand: Operand) -> View:
        """The operand's rows. Raises ExecutionError where the plan leaves its memory."""
        arrays = self.home_rows(operand.tensor) if operand.is_home else self.work.get(operand.tensor)
        if arrays is None or operand.row + operand.rows > len(arrays[0]):
            raise ExecutionError(f"{operand} leaves this rank's rows: the plan was not verified")
        return View(operand, arrays, self._wire[operand.tensor])

    def home_rows(self, tensor: Name) -> Parts:
        """[rows, …] of a home tensor."""
        if tensor not in self.home:
            heads = self._header.kv_heads if tensor in KV_SIDE else self._header.q_heads
            self.home[tensor] = self._empty(tensor, self._rows, heads)
        return self.home[tensor]

    def _arena(self, arena: Arena) -> Parts:
        return self._empty(arena.tensor, arena.rows, arena.heads)

    def _empty(self, tensor: Name, rows: int, heads: int) -> Parts:
        # uninitialised: a verified plan reads no row before it is written
        lead = (rows,) if tensor in HEADLESS else (rows, heads)
        return tuple(
            torch.empty(
                (*lead, part.width) if part.width else lead,
                dtype=self._dtype(tensor, part),
                device=self.device,
            )
            for part in components(tensor, self._header, self._hidden)
        )

    def _dtype(self, tensor: Name, part: Component) -> torch.dtype:
        # Merging rounds an LSE each time, and backward turns that into a relative error of the whole row: in
        # float64 the error of 10 merges is that of one. It travels and is handed to kernels in the
        # accumulator's dtype.
        is_merged = tensor == Name.O and part.name == "lse"
        return torch.float64 if is_merged else self._wire_dtype(tensor, part)

    def _wire_dtype(self, tensor: Name, part: Component) -> torch.dtype:
        if part.integer:
            return torch.int64
        return accumulator_dtype(self.dtype) if tensor in ACCUMULATORS else self.dtype
