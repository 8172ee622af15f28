"""Well-formedness checks that precede all checks of meaning: codes, ranges, indexes and counts.

They run on every plan decoded from bytes or text. After them, consumers may index operands, walk lists by `count` and
use int64 arithmetic without overflow: no value exceeds 2**48. `ir.verify` checks that the plan computes the right
thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from apportion._core import tables as core
from apportion.ir.arrays import Bools, Ints, index_in_group
from apportion.ir.errors import DecodeError
from apportion.ir.isa import (
    ALL_TO_ALL,
    LIMIT,
    MAX_RANKS,
    MOVE_COLUMNS,
    OP_NAMES,
    RECURRENCE_TABLES,
    RESULTS,
    SPAN_COLUMNS,
    TABLES,
    Op,
)
from apportion.ir.masks.bands import INF, MAX_DIAGONALS
from apportion.ir.plan.tables import Header, Recurrence, Table
from apportion.ir.request.model import MAX_HEADS
from apportion.ir.request.recurrent import MAX_KINDS, widest_halo
from apportion.ir.tensors import PHASES, SENT_GRADIENTS, Space, Tensor

DTYPE_NAMES = ("bf16", "fp16", "fp32", "fp64")
#: dtypes narrower than accumulators
HALF_NAMES = DTYPE_NAMES[:2]

#: (table, column) -> lowest and highest value; all others: 0 to LIMIT
_RANGES: Mapping[tuple[str, str], tuple[int, int]] = {
    ("arenas", "tensor"): (1, max(Tensor)),
    ("arenas", "rows"): (1, LIMIT),
    ("arenas", "heads"): (0, MAX_HEADS),
    ("operands", "tensor"): (0, max(Tensor)),
    ("operands", "space"): (0, max(Space)),
    ("operands", "col"): (0, MAX_HEADS),
    ("instructions", "op"): (min(Op), max(Op)),
    ("instructions", "mode"): (0, ALL_TO_ALL | RESULTS),
    ("transfers", "send"): (0, 1),
    ("tasks", "dmin"): (-LIMIT, LIMIT),
    ("tasks", "dmax"): (-LIMIT, LIMIT),
    ("tasks", "first"): (0, 1),
    ("grads", "dmin"): (-LIMIT, LIMIT),
    ("grads", "dmax"): (-LIMIT, LIMIT),
    ("grads", "first"): (0, 3),
    ("rowops", "first"): (0, 1),
    ("spans", "length"): (1, LIMIT),
    ("moves", "send"): (0, 1),
    ("moves", "rows"): (1, LIMIT),
    ("runs", "rows"): (1, LIMIT),
    ("runs", "past"): (-1, LIMIT),
    ("runs", "leads"): (0, 1),
    ("folds", "heads"): (1, MAX_HEADS),
    ("folds", "parent"): (-1, LIMIT),
    ("states", "heads"): (1, MAX_HEADS),
    ("halo", "send"): (0, 1),
    ("halo", "rows"): (1, LIMIT),
}


def check_header(header: Header) -> None:
    """Checks names, counts, head sets and diagonals. Raises DecodeError."""
    _check_between("ranks", header.ranks, 1, MAX_RANKS)
    for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim"):
        _check_between(name, getattr(header, name), 1, MAX_HEADS)
    if header.q_heads % header.kv_heads:
        raise DecodeError(
            f"header: q_heads = {header.q_heads} is not a multiple of kv_heads = {header.kv_heads}"
        )
    for name, allowed in (("dtype", DTYPE_NAMES), ("sent_gradients", SENT_GRADIENTS)):
        if getattr(header, name) not in allowed:
            raise DecodeError(
                f"header: {name} = {getattr(header, name)[:40]!r}; known are {', '.join(allowed)}"
            )
    if header.sent_gradients == "model" and header.dtype not in HALF_NAMES:
        halves = " and ".join(HALF_NAMES)
        raise DecodeError(f"header: sent_gradients = 'model' is for {halves}, but dtype = {header.dtype!r}")
    if header.latent is not None and (header.kv_heads != 1 or header.latent.rope >= header.head_dim):
        raise DecodeError("header: latent rows need one KV head, and rope less than head_dim")
    _check_names("kinds", header.kinds)
    _check_recurrent(header)
    _check_names("layouts", header.layouts)
    if not header.phases or header.phases != tuple(phase for phase in PHASES if phase in header.phases):
        raise DecodeError(f"header: phases must be one or more of {', '.join(PHASES)}, in this order")
    if header.home_layout not in header.layouts:
        raise DecodeError(f"header: home_layout = {header.home_layout[:40]!r} is not among its layouts")
    for number, heads in enumerate(header.head_sets, 1):
        _check_heads(number, heads, header.q_heads)
    _check_diagonals(header.kinds, header.diagonals)


def _check_between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise DecodeError(f"header: {name} = {value} is outside [{low}, {high}]")


def _check_names(field: str, names: tuple[str, ...]) -> None:
    if not names or len(set(names)) < len(names) or not all(0 < len(name) <= 128 for name in names):
        raise DecodeError(f"header: {field} must be distinct names of 1 to 128 characters")


def _check_heads(number: int, heads: tuple[int, ...], q_heads: int) -> None:
    if not heads or len(set(heads)) < len(heads) or min(heads) < 0 or max(heads) >= q_heads:
        raise DecodeError(f"header: head set {number} must hold distinct heads below {q_heads}")


def _check_recurrent(header: Header) -> None:
    kinds = header.recurrent
    if kinds and (len(kinds) > MAX_KINDS or list(kinds) != sorted(kinds)):
        raise DecodeError(f"header: recurrent must have at most {MAX_KINDS} kinds, sorted")
    if kinds:
        _check_names("recurrent", (*kinds, *header.kinds))


def _check_diagonals(kinds: tuple[str, ...], diagonals: Mapping[str, tuple[tuple[int, int], ...]]) -> None:
    if diagonals.keys() != set(kinds):
        raise DecodeError("header: diagonals must name each kind")
    for kind, pairs in diagonals.items():
        if len(pairs) > MAX_DIAGONALS or sorted(set(pairs)) != list(pairs):
            raise DecodeError(
                f"header: diagonals of {kind} must be distinct, sorted, and at most {MAX_DIAGONALS}"
            )
        if not all(-INF <= dmin <= dmax <= INF for dmin, dmax in pairs):
            raise DecodeError(f"header: diagonals of {kind} must be [dmin, dmax] in [{-INF}, {INF}]")


def check(
    header: Header,
    tokens: Mapping[str, int],
    layouts: Mapping[str, Table],
    programs: Mapping[tuple[str, str], Mapping[str, Table]],
    moves: Mapping[tuple[str, str], Table],
    recurrence: Recurrence | None = None,
    first_rank: int = 0,
) -> None:
    """Refuses tables that cannot be walked. first_rank: the number of the tables' first rank. Raises DecodeError, which
    names rank, table and row."""
    for name, spans in layouts.items():
        _check_spans(_TablePlace(f"layout {name}", "spans", spans, first_rank), tokens[name])
    for (source, target), table in moves.items():
        location = _TablePlace(f"move {source} -> {target}", "moves", table, first_rank)
        location.check_ranges(_ranges("moves", {"peer": (0, header.ranks - 1)}))
    if recurrence is not None:
        _check_recurrence(header, recurrence, first_rank)
    ranges = _ranges_of_programs(header.ranks, len(header.head_sets))
    is_query_only = np.array([False, *(max(heads) >= header.kv_heads for heads in header.head_sets)])
    for (kind, phase), program in programs.items():
        tables = [program[name] for name in TABLES]
        refusal = core.refusal([(table.ptr, table.values) for table in tables], ranges, is_query_only)
        if refusal is not None:
            _refuse_program(header, f"{kind} {phase}", tables, first_rank, refusal)


class _TablePlace:
    """A table and its location, for messages."""

    def __init__(self, where: str, name: str, table: Table, first_rank: int) -> None:
        self.where, self.name, self.table, self.first_rank = where, name, table, first_rank

    def refuse(self, row: int, message: str) -> NoReturn:
        rank, own_row = self.table.rank_and_row(row)
        values = ", ".join(f"{name} {value}" for name, value in self.table.at(row).items())
        where = f"rank {rank + self.first_rank}, {self.where}, {self.name} row {own_row}"
        raise DecodeError(f"{where}: {message} ({values})")

    def check_ranges(self, ranges: Ints) -> None:
        fault = core.out_of_range((self.table.ptr, self.table.values), ranges)
        if fault is not None:
            self.refuse_number(ranges, *fault[2:4])

    def refuse_number(self, ranges: Ints, row: int, column: int) -> NoReturn:
        low, high = ranges[column].tolist()
        self.refuse(row, f"{self.table.names[column]} is outside [{low}, {high}]")


def _check_spans(location: _TablePlace, tokens: int) -> None:
    location.check_ranges(_ranges("spans"))
    spans = location.table
    bad_rows = np.flatnonzero(spans.wide("token") + spans["length"] > tokens)
    if len(bad_rows):
        location.refuse(int(bad_rows[0]), f"ends after the last of {tokens} tokens")
    if float(spans["length"].sum(dtype=np.float64)) > LIMIT:
        raise DecodeError(f"{location.where}: its spans hold more than {LIMIT} rows")


def _check_recurrence(header: Header, tables: Recurrence, first_rank: int) -> None:
    """Checks codes and ranges, and that runs are contiguous, parents precede their slots, and references to the
    rank's own runs, heads of the kind and halo rows are valid."""
    ranges = _ranges_of_recurrence(header.ranks, len(header.recurrent))
    by_name = {name: _TablePlace("recurrence", name, tables[name], first_rank) for name in RECURRENCE_TABLES}
    for name, location in by_name.items():
        location.check_ranges(ranges[name])
    for name, is_wrong, message in _recurrence_faults(header, tables):
        for row in np.flatnonzero(is_wrong)[:1].tolist():
            by_name[name].refuse(row, message)


def _recurrence_faults(header: Header, tables: Recurrence) -> Iterator[tuple[str, Bools, str]]:
    """Yields (table, rows that violate the rule, message) for each rule."""
    runs, folds, states, halo = (tables[name] for name in RECURRENCE_TABLES)
    number, previous_end = index_in_group(np.diff(runs.ptr)), np.roll(runs.wide("row") + runs["rows"], 1)
    expected_row = np.where(number == 0, 0, previous_end)
    yield "runs", runs["row"] != expected_row, "it does not begin at the end of the previous run"
    yield "runs", (runs["past"] < 0) & (runs["peer"] > 0), "it has a peer without a past"
    yield "folds", folds["parent"] >= index_in_group(np.diff(folds.ptr)), "its parent is not an earlier slot"
    heads = np.array([kind.heads for kind in header.recurrent.values()])
    for name, table in (("folds", folds), ("states", states)):
        exceeds = table["head"] + table["heads"] > heads[table["kind"]]
        yield name, exceeds, "its heads exceed the heads of its kind"
    count = np.diff(runs.ptr)
    yield "states", states["run"] >= count[states.rank_of_row()], "its run is not among the rank's"
    rows = (count * widest_halo(header.recurrent))[halo.rank_of_row()]
    exceeds = (halo["send"] == 0) & (halo["row"] + halo["rows"] > rows)
    yield "halo", exceeds, "its rows are not before a run of the rank"


def _ranges(table: str, more: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> Ints:
    """int64 [columns, 2]: lowest and highest value of each column."""
    columns = {"spans": SPAN_COLUMNS, "moves": MOVE_COLUMNS, **RECURRENCE_TABLES, **TABLES}[table]
    return np.array([more.get(name) or _RANGES.get((table, name), (0, LIMIT)) for name in columns])


@lru_cache(64)
def _ranges_of_programs(ranks: int, head_sets: int) -> Ints:
    """int64 [columns of all tables, 2]: lowest and highest values."""
    more = {"peer": (0, ranks - 1), "heads": (0, head_sets)}
    limits = {"transfers": more, "operands": more}
    return np.concatenate([_ranges(name, limits.get(name, {})) for name in TABLES])


@lru_cache(64)
def _ranges_of_recurrence(ranks: int, kinds: int) -> Mapping[str, Ints]:
    """Table -> int64 [columns, 2], lowest and highest values."""
    more = {"peer": (0, ranks - 1), "kind": (0, kinds - 1)}
    return {name: _ranges(name, more) for name in RECURRENCE_TABLES}


def _refuse_program(
    header: Header,
    where: str,
    tables: Sequence[Table],
    first_rank: int,
    refusal: tuple[str, int, int, int, int],
) -> NoReturn:
    """Raises the DecodeError for a refusal by the core."""
    flaw, number, row, column, consumed = refusal
    name, table = tuple(TABLES)[number], tables[number]
    location = _TablePlace(where, name, table, first_rank)
    if flaw == "range":
        ranges = _ranges_of_programs(header.ranks, len(header.head_sets))
        location.refuse_number(ranges[sum(len(other.names) for other in tables[:number]) :], row, column)
    if flaw == "sum":
        count = int(table.ptr[row + 1] - table.ptr[row])
        raise DecodeError(
            f"rank {row + first_rank}, {where}: its instructions consume {consumed} rows of {name}, which has {count}"
        )
    messages = {
        "second arena": "a second arena of one tensor",
        "operand zero": "operand 0 must be none",
        "empty operand": "only operand 0 may be none or have no rows",
        "foreign heads": f"its head set exceeds the {header.kv_heads} KV heads",
        "unknown operand": f"{table.names[column]} is not among the rank's operands",
        "stray field": "round, channel and mode belong to launch (round also to wait)",
        "wait with rows": f"{OP_NAMES[Op.WAIT]} consumes no rows, so its count must be 0",
        "count": "count exceeds its list",
    }
    location.refuse(row, messages[flaw])
