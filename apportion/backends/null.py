"""A backend that computes nothing and records what it was told, to test trainers without a device.

null = NullBackend(plan.for_rank(3))
o, lse = null.forward("default", q, k, v)       # zeros of the right shape, after the shapes were checked
dq, dk, dv = null.backward("default", do)
null.calls                                      # every instruction of both programs, in order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apportion.backends.interp import Machine, Operand, Program, Step, Transfer, compile_program, components
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ExecutionError, UnknownNameError
from apportion.ir.isa import OP_NAMES, Op
from apportion.ir.tensors import Tensor

Zeros = NDArray[np.float64]


class Shaped(Protocol):
    """Anything with a shape: arrays of numpy, torch or jax."""

    @property
    def shape(self) -> Any: ...


@dataclass(frozen=True)
class TracedRow:
    """One row of an instruction that a rank was told to execute.

    `operands` are the row's operands in the order of its columns, as text; `peer` is the other rank of a
    transfer and `send` its direction. An instruction without rows (wait, an empty launch) is one call without
    operands.
    """

    rank: int
    kind: str
    phase: str
    instruction: int
    op: str
    round: int = 0
    operands: tuple[str, ...] = ()
    peer: int | None = None
    send: bool = False


class NullBackend:
    """Walks a rank's programs, keeps the calls, returns zeros. Takes the rank's slice of the plan."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece
        self.calls: list[TracedRow] = []

    @property
    def rows(self) -> int:
        """The number of home rows."""
        return int(self.piece.layout(self.piece.header.home_layout).rows_per_rank[0])

    def forward(self, kind: str, q: Shaped, k: Shaped, v: Shaped) -> tuple[Zeros, Zeros]:
        """o [rows, Hq, Dv] and lse [rows, Hq], all zeros, of q [rows, Hq, D] and k, v [rows, Hk, D or Dv].

        Raises ExecutionError for other shapes, UnknownNameError for another kind.
        """
        self._check(Tensor.Q, (q,))
        self._check(Tensor.KV, (k, v))
        return self._walk(kind, "forward")

    def forward_block(self, kind: str, hidden: Shaped) -> tuple[Zeros, Zeros]:
        """As `forward`, for programs that project hidden states [rows, E]."""
        if len(hidden.shape) != 2 or hidden.shape[0] != self.rows:
            raise ExecutionError(
                f"hidden has shape {tuple(hidden.shape)}; rank {self.piece.rank} has {self.rows} rows"
            )
        return self._walk(kind, "forward")

    def backward(self, kind: str, do: Shaped) -> tuple[Zeros, Zeros, Zeros]:
        """dq, dk and dv, all zeros, for do [rows, Hq, Dv]."""
        self._check(Tensor.DO, (do,))
        self._walk(kind, "backward")
        (dq,), (dk, dv) = self._zeros(Tensor.DQ), self._zeros(Tensor.DKV)
        return dq, dk, dv

    def _walk(self, kind: str, phase: str) -> tuple[Zeros, Zeros]:
        if (kind, phase) not in self.piece.programs:
            names = ", ".join(self.piece.header.kinds)
            raise UnknownNameError("kind", kind, f"the plan has {names}", "name one of these")
        program = compile_program(self.piece.programs[kind, phase], self.piece.header)
        Recorder(program, self.piece.rank, kind, phase, self.calls.append).run()
        o, lse = self._zeros(Tensor.O)
        return o, lse

    def _shapes(self, tensor: Tensor) -> list[tuple[int, ...]]:
        header = self.piece.header
        lead = (self.rows, header.heads_of(tensor))
        return [(*lead, part.width) if part.width else lead for part in components(tensor, header)]

    def _zeros(self, tensor: Tensor) -> tuple[Zeros, ...]:
        return tuple(np.zeros(shape) for shape in self._shapes(tensor))

    def _check(self, tensor: Tensor, given: tuple[Shaped, ...]) -> None:
        parts = components(tensor, self.piece.header)
        for part, want, array in zip(parts, self._shapes(tensor), given, strict=True):
            if tuple(array.shape) != want:
                raise ExecutionError(f"{part.name} has shape {tuple(array.shape)}; the plan is for {want}")


class Recorder(Machine[str]):
    """A machine whose memory is the names of its operands; `record` receives every call."""

    def __init__(
        self, program: Program, rank: int, kind: str, phase: str, record: Callable[[TracedRow], None]
    ) -> None:
        super().__init__(program)
        self._rank, self._kind, self._phase, self._record = rank, kind, phase, record
        self.bind()

    def view(self, operand: Operand) -> str:
        return str(operand)

    @property
    def handlers(self) -> Mapping[Op, Callable[[Step], None]]:
        return dict.fromkeys(self.program.ops, self._note_rows)

    @classmethod
    def require(cls, program: Program) -> None:
        """All ops are noted alike."""

    def _note_rows(self, step: Step) -> None:
        for row in step.rows:
            named = tuple(self.views[i] for name in step.op.rule.columns if (i := getattr(row, name)))
            more = {"peer": row.peer, "send": row.send} if isinstance(row, Transfer) else {}
            self._note(step, named, **more)
        if not step.rows:
            self._note(step)

    def _note(self, step: Step, operands: tuple[str, ...] = (), **more: Any) -> None:
        name = OP_NAMES[step.op]
        self._record(
            TracedRow(self._rank, self._kind, self._phase, step.index, name, step.round, operands, **more)
        )
