"""The interpreter: turns one rank's program into small Python tuples and executes them, with one handler per op.

    ProgramSet of one rank ──compile_program──► Program(steps, operands, arenas) ──Machine.run──► numbers

A backend implements `Machine`: `view` maps an operand to the backend's memory once per call, and each op
has one method that takes a `Step` and finds its operands in `self.views`. A program is compiled once and may
run many times; views, arenas and rounds in flight belong to one machine, that is, to one call.

Two calls may take turns on a rank, so that one computes while the other communicates: a program is split into
dispatch, compute and collect (`ir.plan.segments`), each executed as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import FIRST_DKV, FIRST_DQ, OP_NAMES, TABLES, Op
from apportion.ir.plan.ops import starts_of
from apportion.ir.plan.segments import Cuts, own_cuts, segment_ends
from apportion.ir.plan.tables import Header, ProgramSet
from apportion.ir.tensors import HEADLESS, TENSOR_NAMES, Space, Tensor

View = TypeVar("View")


class Component(NamedTuple):
    """One array of a tensor: [rows, heads, width], or [rows, heads] if width is 0; X and dX: [rows, width]."""

    name: str
    width: int
    integer: bool = False


def components(tensor: Tensor, header: Header, hidden: int = 0) -> tuple[Component, ...]:
    """The arrays of a tensor, in the order in which they move. `hidden` is the width of X and dX."""
    contents = tensor.contents
    widths = contents.widths(header.head_dim, header.v_head_dim, hidden, header.latent)
    return tuple(
        Component(part.name, width, part.integer) for part, width in zip(contents.parts, widths, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Operand:
    """Rows [row, row + rows) of a tensor at home or in its work arena.

    `heads` are the head numbers, in order (none for X and dX); `columns` are the head columns they occupy: a
    slice if they are evenly spaced, so that a backend can take a view, else a tuple of their numbers.
    """

    index: int
    tensor: Tensor
    space: Space
    row: int
    rows: int
    heads: tuple[int, ...]
    columns: slice | tuple[int, ...]

    @property
    def row_slice(self) -> slice:
        return slice(self.row, self.row + self.rows)

    @property
    def is_home(self) -> bool:
        return self.space == Space.HOME

    @property
    def column_list(self) -> tuple[int, ...]:
        """The operand's head columns as a tuple; (0,) for a tensor without heads."""
        columns = self.columns
        return (tuple(range(columns.stop)[columns]) if isinstance(columns, slice) else columns) or (0,)

    def __str__(self) -> str:
        space = "home" if self.is_home else "work"
        heads = "" if not self.heads else f" heads {','.join(map(str, self.heads))}"
        return f"{TENSOR_NAMES[self.tensor]}.{space}[{self.row}:{self.row + self.rows}){heads}"


class Transfer(NamedTuple):
    """One tile of a round; `operand` is an index into the program's operands, as in all rows below."""

    send: bool
    peer: int
    operand: int


class Task(NamedTuple):
    """Attention of query rows to key rows. `kv_of[i]`: the key operand's column that holds query head i's KV head."""

    q: int
    kv: int
    o: int
    dmin: int
    dmax: int
    first: bool
    kv_of: tuple[int, ...]


class GradTask(NamedTuple):
    """The gradient of a task; a `first` flag means that it overwrites the accumulator instead of adding to it."""

    q: int
    kv: int
    do: int
    delta: int
    dq: int
    dkv: int
    dmin: int
    dmax: int
    first_dq: bool
    first_dkv: bool
    kv_of: tuple[int, ...]


class RowOp(NamedTuple):
    """A row of any other op: operand indices, in the columns that the op's rule defines; 0: no operand."""

    a: int
    b: int
    c: int
    d: int
    first: bool


Row = Transfer | Task | GradTask | RowOp


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. Only the list given by the op's rule is filled."""

    index: int
    op: Op
    round: int
    channel: int
    mode: int
    transfers: tuple[Transfer, ...] = ()
    tasks: tuple[Task, ...] = ()
    grads: tuple[GradTask, ...] = ()
    rowops: tuple[RowOp, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the list that is filled."""
        return self.transfers or self.tasks or self.grads or self.rowops

    def __str__(self) -> str:
        name = OP_NAMES[self.op]
        if self.op == Op.WAIT:
            return f"wait round {self.round}"
        if self.op == Op.LAUNCH:
            return f"launch round {self.round} channel {self.channel} ({len(self.transfers)} transfers)"
        return f"{name} × {len(self.rows)}"


class Segments(NamedTuple):
    """The steps of a program in three parts, each executed as a whole."""

    dispatch: tuple[Step, ...]
    compute: tuple[Step, ...]
    collect: tuple[Step, ...]


class Arena(NamedTuple):
    """Work rows of one tensor: `rows` × `heads` head columns."""

    tensor: Tensor
    rows: int
    heads: int


@dataclass(frozen=True)
class Program:
    """A compiled program of one rank, ready to execute."""

    header: Header
    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    arenas: tuple[Arena, ...]

    @cached_property
    def channels(self) -> tuple[int, ...]:
        """The channels that the program launches on, ascending."""
        return tuple(sorted({step.channel for step in self.steps if step.op == Op.LAUNCH}))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of its steps, ascending."""
        return tuple(sorted({step.op for step in self.steps}))

    @cached_property
    def uses_project(self) -> bool:
        """True if the program calls the layer's projection, and so takes hidden states instead of q, k, v."""
        return any(op.rule.products for op in self.ops)

    @cached_property
    def writes_dx_once(self) -> bool:
        """True if the projection writes each row of dX once and nothing accumulates into it."""
        rows = [(step.op, row) for step in self.steps for row in step.rowops]
        uses = [op for op, row in rows for index in (row.a, row.c, row.d) if self._is_dx(index)]
        writes = [op for op, row in rows if op == Op.PROJECT_GRAD and row.first]
        operands = (transfer.operand for step in self.steps for transfer in step.transfers)
        return len(uses) == len(writes) and not any(map(self._is_dx, operands))

    def _is_dx(self, index: int) -> bool:
        return self.operands[index].tensor == Tensor.DX

    @property
    def cuts(self) -> Cuts:
        """This rank's own segment boundaries; see `ir.plan.segments`."""
        return own_cuts(*self._columns)

    def segments(self, cuts: Cuts) -> Segments:
        """Splits the program at the boundaries that all ranks agreed on."""
        dispatch, compute = segment_ends(*self._columns, cuts)
        return Segments(self.steps[:dispatch], self.steps[dispatch:compute], self.steps[compute:])

    @property
    def _columns(self) -> tuple[Ints, Ints]:
        return np.array([step.op for step in self.steps]), np.array([step.round for step in self.steps])


def compile_program(program: ProgramSet, header: Header) -> Program:
    """Compiles a one-rank program. Raises ExecutionError if its lists and operands are inconsistent."""
    if program.ranks != 1:
        raise ExecutionError(
            f"the program covers {program.ranks} ranks; select one with `ProgramSet.rank(r)` first"
        )
    operands = tuple(_operands(program, header))
    heads, group = [operand.heads for operand in operands], header.q_heads // header.kv_heads

    def kv_of(q: int, kv: int) -> tuple[int, ...]:
        return kv_columns(heads[q], heads[kv], group)

    lists: Mapping[str, tuple[Row, ...]] = {
        "transfers": tuple(Transfer(bool(send), peer, i) for send, peer, i in _rows(program, "transfers")),
        "tasks": tuple(
            Task(q, kv, o, dmin, dmax, bool(first), kv_of(q, kv))
            for q, kv, o, dmin, dmax, first in _rows(program, "tasks")
        ),
        "grads": tuple(
            GradTask._make((*row, bool(first & FIRST_DQ), bool(first & FIRST_DKV), kv_of(row[0], row[1])))
            for *row, first in _rows(program, "grads")
        ),
        "rowops": tuple(RowOp(a, b, c, d, bool(first)) for a, b, c, d, first in _rows(program, "rowops")),
    }
    steps = tuple(_steps(program, lists))
    arenas = tuple(Arena(Tensor(t), rows, heads) for t, rows, heads in _rows(program, "arenas"))
    return Program(header, operands, steps, arenas)


def _rows(program: ProgramSet, table: str) -> Iterator[tuple[int, ...]]:
    """The rows of a table as tuples of Python integers."""
    return zip(*(program[table][name].tolist() for name in TABLES[table]), strict=True)


def _operands(program: ProgramSet, header: Header) -> Iterator[Operand]:
    for index, (tensor, space, row, rows, col, heads) in enumerate(_rows(program, "operands")):
        names = _heads(header, Tensor(tensor), heads)
        columns = names if space == Space.HOME else tuple(range(col, col + len(names)))
        yield Operand(index, Tensor(tensor), Space(space), row, rows, names, columns_of(columns))


def _heads(header: Header, tensor: Tensor, heads: int) -> tuple[int, ...]:
    if tensor in HEADLESS:
        return ()
    if heads > len(header.head_sets):
        raise ExecutionError(f"an operand refers to head set {heads}; the plan has {len(header.head_sets)}")
    if heads:
        return tuple(header.head_sets[heads - 1])
    return tuple(range(header.heads_of(tensor)))


def columns_of(numbers: tuple[int, ...]) -> slice | tuple[int, ...]:
    """The numbers as a slice if they are evenly spaced and ascending, else unchanged."""
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if not numbers or stride <= 0 or numbers != tuple(range(numbers[0], numbers[-1] + 1, stride)):
        return numbers
    return slice(numbers[0], numbers[-1] + 1, stride)


@lru_cache(maxsize=1024)
def kv_columns(q_heads: tuple[int, ...], kv_heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The index in `kv_heads` of each query head's KV head; a KV head serves `group` query heads. Raises
    ExecutionError if a KV head is missing."""
    used_heads = [head // group for head in q_heads]
    if not set(used_heads) <= set(kv_heads):
        raise ExecutionError(f"a task of query heads {q_heads} has only the KV heads {kv_heads}")
    return tuple(map(kv_heads.index, used_heads))


def _steps(program: ProgramSet, lists: Mapping[str, tuple[Row, ...]]) -> Iterator[Step]:
    table, counts = program["instructions"], dict.fromkeys(lists, 0)
    starts = starts_of(table["op"], table.wide("count")).tolist()
    for index, (row, start) in enumerate(zip(_rows(program, "instructions"), starts, strict=True)):
        op, round_, channel, mode, count = row
        name = Op(op).rule.list
        if name is None:
            yield Step(index, Op(op), round_, channel, mode)
            continue
        rows = lists[name][start : start + count]
        if len(rows) != count:
            raise ExecutionError(
                f"instruction {index} ({OP_NAMES[Op(op)]}) needs {count} {name}, but only {len(rows)} remain"
            )
        counts[name] += count
        yield Step(index, Op(op), round_, channel, mode, **{name: rows})  # type: ignore[arg-type]
    for name, entries in lists.items():
        if counts[name] != len(entries):
            raise ExecutionError(f"{len(entries) - counts[name]} {name} belong to no instruction")


class Machine(ABC, Generic[View]):
    """A single execution of one rank's program. A backend subclasses it with its memory and one method per op, which
    has the op's name and takes a `Step`. Raises ExecutionError for a program with an op that has no method.

    `views[i]` is the view of operand i; operand 0 means "none" and has no view.
    """

    views: list[View]

    def __init__(self, program: Program) -> None:
        self.require(program)
        self.program = program

    @classmethod
    def require(cls, program: Program) -> None:
        """Raises ExecutionError if the program has an op without a method."""
        for op in program.ops:
            if not hasattr(cls, OP_NAMES[op]):
                raise ExecutionError(
                    f"{cls.__name__} has no handler for the op {OP_NAMES[op]}, which the program uses"
                )

    def bind(self) -> None:
        """Resolves all operands; called once the backend has allocated its memory."""
        self.views = [cast("View", None), *map(self.view, self.program.operands[1:])]

    @property
    def handlers(self) -> Mapping[Op, Callable[[Step], None]]:
        """The dispatch table: op of the program -> the method that executes its steps."""
        # not cached: bound methods would form a reference cycle, and only the garbage collector would free the arenas
        return MappingProxyType({op: getattr(self, OP_NAMES[op]) for op in self.program.ops})

    def run(self) -> None:
        """Executes the program from the first instruction to the last."""
        self.execute(self.program.steps)

    def execute(self, steps: Iterable[Step]) -> None:
        """Executes these steps. The caller must run every step exactly once and in order, over one or more calls."""
        handlers = self.handlers
        for step in steps:
            handlers[step.op](step)

    @abstractmethod
    def view(self, operand: Operand) -> View:
        """The operand in this backend's memory."""
