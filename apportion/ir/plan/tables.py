"""The plan: layouts and programs as integer tables, rank after rank.

    Plan ── header     format, version, recipe, seed, kinds, head sets, model facts for executors
         ├─ request    batch, cluster, model, policy, digest of the hardware file
         ├─ layouts    name -> spans of every rank
         ├─ programs   (kind, phase) -> tables of every rank
         ├─ moves      remaps between two layouts
         ├─ recurrence tables of recurrent layers, if the model has any
         └─ report     areas, bytes, slots, rounds, bounds, sizes, imbalance, termination

A rank's *slice* (`Plan.for_rank`) is the header, its own part and a hash path to the id, which proves that it belongs
to the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints, group_of, index_in_group, offsets
from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import choice, integer
from apportion.ir.isa import MOVE_COLUMNS, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES, VERSION
from apportion.ir.latent import Latent
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.request.recurrent import Recurrent
from apportion.ir.tensors import GRADIENTS, PHASES, Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of all ranks as a matrix: rank r has rows `ptr[r]:ptr[r + 1]`; `values[i]` is the column `names[i]`.

    ptr: int64 [ranks + 1], from 0 to the number of rows, non-decreasing; values: int32 or int64 [columns, rows], copied
    if a column is not contiguous. Raises ConfigError, since the core does not check indexes.
    """

    ptr: Ints
    names: tuple[str, ...]
    values: Ints

    def __post_init__(self) -> None:
        shape, ptr = self.values.shape, self.ptr
        if self.values.ndim != 2 or shape[0] != len(self.names):
            rule = f"must be [columns, rows] with {len(self.names)} columns"
            raise ConfigError("values", shape, rule, "give one row of the matrix for each name")
        is_valid = ptr.ndim == 1 and ptr.size and ptr[0] == 0 and ptr[-1] == shape[1]
        if not is_valid or np.count_nonzero(ptr[1:] < ptr[:-1]):
            rule = f"must not decrease, and must run from 0 to {shape[1]}, the number of rows"
            raise ConfigError("ptr", ptr[:8].tolist(), rule, "give the first row of each rank, and the end")
        if ptr.dtype != np.int64 or not ptr.flags.c_contiguous:
            object.__setattr__(self, "ptr", np.ascontiguousarray(ptr, np.int64))
        if self.values.strides[1] != self.values.itemsize:
            object.__setattr__(self, "values", np.ascontiguousarray(self.values))

    @staticmethod
    def of(ptr: Ints, columns: Mapping[str, Ints]) -> Table:
        """Builds a table from integer columns, which are copied. Raises ConfigError."""
        for name, column in columns.items():
            if column.dtype.kind not in "iu":
                raise ConfigError(name, column.dtype, "is not an integer dtype", "convert the column")
        return Table(ptr, tuple(columns), np.array([*columns.values()], np.int64))

    def __len__(self) -> int:
        return int(self.ptr[-1])

    def __getitem__(self, name: str) -> Ints:
        column: Ints = self.values[self.names.index(name)]
        return column

    @property
    def columns(self) -> dict[str, Ints]:
        """The columns by name (views, no copies)."""
        return dict(zip(self.names, self.values, strict=True))

    def wide(self, name: str) -> Ints:
        """A column as int64, regardless of its stored dtype."""
        return self[name].astype(np.int64, copy=False)

    @property
    def ranks(self) -> int:
        return len(self.ptr) - 1

    def rank(self, rank: int) -> Table:
        """The rows of one rank, as a one-rank table (views, no copies)."""
        return self.ranks_between(rank, rank + 1)

    def ranks_between(self, first: int, end: int) -> Table:
        """The rows of ranks [first, end) (views, no copies)."""
        lo, hi = int(self.ptr[first]), int(self.ptr[end])
        return Table(self.ptr[first : end + 1] - lo, self.names, self.values[:, lo:hi])

    def take(self, rows: Ints, ptr: Ints | None = None) -> Table:
        """Selects rows, in this order. ptr: offsets of the ranks in the result, by default unchanged."""
        return Table(self.ptr if ptr is None else ptr, self.names, self.values[:, rows])

    def rank_of_row(self) -> Ints:
        """The rank that owns each row."""
        return group_of(np.diff(self.ptr))

    def rank_and_row(self, row: int) -> tuple[int, int]:
        """The rank that owns a row, and the row's number on that rank."""
        rank = int(np.searchsorted(self.ptr, row, side="right")) - 1
        return rank, row - int(self.ptr[rank])

    def at(self, row: int) -> dict[str, int]:
        """One row: column -> value."""
        return dict(zip(self.names, self.values[:, row].tolist(), strict=True))

    def equal(self, other: Table) -> bool:
        """Compares by value, regardless of dtypes."""
        return (
            self.names == other.names
            and np.array_equal(self.ptr, other.ptr)
            and np.array_equal(self.values, other.values)
        )


def _check_columns(field: str, table: Table, columns: tuple[str, ...]) -> None:
    """Checks names and order of columns: encoding and verification use their positions. Raises ConfigError."""
    if table.names != columns:
        rule = f"must have the columns {', '.join(columns)}, in this order"
        raise ConfigError(field, ", ".join(table.names), rule, "reorder the columns")


def empty_table(names: tuple[str, ...], ranks: int) -> Table:
    """A table without rows."""
    return Table(np.zeros(ranks + 1, np.int64), names, np.zeros((len(names), 0), np.int64))


def join_tables(tables: Sequence[Table]) -> Table:
    """Concatenates the ranks of all tables."""
    ends = np.cumsum([len(table) for table in tables])
    ptr = [
        tables[0].ptr,
        *(table.ptr[1:] + end for table, end in zip(tables[1:], ends.tolist(), strict=False)),
    ]
    return Table(
        np.concatenate(ptr), tables[0].names, np.concatenate([table.values for table in tables], axis=1)
    )


@dataclass(frozen=True, eq=False)
class Layout:
    """Location of each token: spans (rank, row, token, length, sequence, position).

    The layouts of a slice hold one rank, numbered 0. Raises ConfigError for an unknown rank.
    """

    name: str
    spans: Table

    def __post_init__(self) -> None:
        _check_columns(f"layout {self.name}", self.spans, SPAN_COLUMNS)

    @cached_property
    def rows_per_rank(self) -> Ints:
        """int64 [ranks]: rows of each rank."""
        sums = offsets(self.spans["length"])
        rows: Ints = sums[self.spans.ptr[1:]] - sums[self.spans.ptr[:-1]]
        return rows

    def tokens(self, rank: int) -> Ints:
        """[rows]: the global token of each of the rank's rows, in row order."""
        return _expand(self._of(rank), "token")

    def position_ids(self, rank: int) -> Ints:
        """[rows]: the position id of each of the rank's rows, in row order."""
        return _expand(self._of(rank), "position")

    def sequences(self, rank: int) -> Ints:
        """[rows]: the sequence of each of the rank's rows, in row order."""
        spans = self._of(rank)
        return np.repeat(spans["sequence"], spans["length"]).astype(np.int64)

    def to_cu_seqlens(self, rank: int) -> Ints:
        """[pieces + 1] int32: cumulative lengths of the rank's runs of consecutive tokens of one sequence, in row
        order, as varlen attention kernels expect them."""
        lengths = self._of(rank)["length"]
        return offsets(lengths).astype(np.int32)

    def _of(self, rank: int) -> Table:
        """The rank's spans in row order, as a one-rank table."""
        spans = self.spans.rank(checked_rank(rank, self.spans.ranks))
        return spans.take(np.argsort(spans["row"], kind="stable"))


def checked_rank(rank: int, ranks: int) -> int:
    """Returns `rank` if it is valid. Raises ConfigError otherwise."""
    return integer("rank", rank, 0, ranks - 1)


def _expand(spans: Table, column: str) -> Ints:
    length = spans["length"].astype(np.int64)
    start = spans[column].astype(np.int64)
    offset = index_in_group(length)
    return np.repeat(start, length) + offset


@dataclass(frozen=True, eq=False)
class ProgramSet:
    """The programs of all ranks for one attention kind and phase: the tables of `isa.TABLES`."""

    tables: Mapping[str, Table]

    def __post_init__(self) -> None:
        for name, table in self.tables.items():
            _check_columns(name, table, TABLES[name])
            if table.ranks != self.ranks:
                rule = f"must have {self.ranks} ranks, like the instructions table"
                raise ConfigError(name, table.ranks, rule, "give each rank its rows, or none")

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def rank(self, rank: int) -> ProgramSet:
        """One rank's program, as one-rank tables."""
        return ProgramSet({name: table.rank(rank) for name, table in self.tables.items()})

    @property
    def ranks(self) -> int:
        return self.tables["instructions"].ranks

    @property
    def arrays(self) -> tuple[tuple[Ints, Ints], ...]:
        """The tables as the core takes them: `ptr` and `values` of each of `isa.TABLES`."""
        return tuple([(self.tables[name].ptr, self.tables[name].values) for name in TABLES])


def empty_programs(ranks: int) -> ProgramSet:
    return ProgramSet({name: empty_table(columns, ranks) for name, columns in TABLES.items()})


@dataclass(frozen=True, eq=False)
class Move:
    """A remap of token rows from layout `source` to layout `target`; its inverse swaps send and receive."""

    source: str
    target: str
    table: Table

    def __post_init__(self) -> None:
        _check_columns(f"move {self.source} -> {self.target}", self.table, MOVE_COLUMNS)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Tables of recurrent layers for all ranks: `isa.RECURRENCE_TABLES`, over home rows."""

    tables: Mapping[str, Table]

    def __post_init__(self) -> None:
        for name, columns in RECURRENCE_TABLES.items():
            _check_columns(name, self.tables[name], columns)

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def rank(self, rank: int) -> Recurrence:
        """One rank's tables, as one-rank tables."""
        return Recurrence({name: table.rank(rank) for name, table in self.tables.items()})


@dataclass(frozen=True)
class Header:
    """Metadata that every rank needs, including the model facts for backends."""

    ranks: int
    kinds: tuple[str, ...]
    recipe: str
    seed: int
    home_layout: str  # the layout of home rows: "loader" if the program reshuffles, else "attention"
    layouts: tuple[str, ...]
    head_sets: tuple[tuple[int, ...], ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    engines: Mapping[str, str] = field(default_factory=dict)
    version: tuple[int, int] = VERSION
    #: kind -> distinct (dmin, dmax) of its masks, sorted; empty if there are too many
    diagonals: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    sent_gradients: str = "wide"  # as in the model
    phases: tuple[str, ...] = PHASES  # the same for every kind
    recurrent: Mapping[str, Recurrent] = field(default_factory=dict)  # as in the model
    latent: Latent | None = None  # as in the model

    def narrows(self, tensor: Tensor) -> bool:
        """True if tiles of a tensor are rounded to the model's dtype for transfer, as in `Model.narrows`."""
        return self.sent_gradients == "model" and tensor in GRADIENTS

    def heads_of(self, tensor: Tensor) -> int:
        """The number of heads of a tensor; 1 if it is headless."""
        if tensor.contents.side is None:
            return 1
        return self.kv_heads if tensor.contents.side == "key" else self.q_heads


@dataclass(frozen=True)
class Request:
    """The request of a plan: enough to verify the plan without other input."""

    batch: Batch
    cluster: Cluster
    model: Model
    policy: Policy
    hardware: str = ""  # hex digest of the hardware file; "" if there is none


@dataclass(frozen=True, eq=False)
class PlanTables:
    """The contents of a plan, without its encoding."""

    header: Header
    request: Request
    layouts: Mapping[str, Layout]
    programs: Mapping[tuple[str, str], ProgramSet]  # (kind, phase)
    moves: tuple[Move, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    recurrence: Recurrence | None = None  # set if the header has recurrent kinds

    def layout(self, name: str) -> Layout:
        """The layout of that name. Raises UnknownNameError."""
        if not isinstance(name, str) or name not in self.layouts:
            raise UnknownNameError(
                "layout", name, f"the plan has {', '.join(self.layouts)}", "use one of these"
            )
        return self.layouts[name]

    def program(self, rank: int, kind: str, phase: str) -> ProgramSet:
        """One rank's program of one attention kind and phase, as one-rank tables.

        Raises ConfigError if the plan has no such rank, UnknownNameError for an unknown kind or phase.
        """
        choice("kind", kind, dict.fromkeys(kind for kind, _ in self.programs))
        choice("phase", phase, [key_phase for key_kind, key_phase in self.programs if key_kind == kind])
        return self.programs[kind, phase].rank(checked_rank(rank, self.header.ranks))
