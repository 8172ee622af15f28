"""What every plan must satisfy before its meaning can be discussed: codes, ranges, indexes and counts.

They run on every plan that comes in as bytes or text. After them consumers may index operands, walk lists by
`count` and do int64 arithmetic without care: no value exceeds 2**48. Whether the plan computes the right thing
is for `ir.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import DecodeError
from apportion.ir.isa import ALL_TO_ALL, LIMIT, MAX_RANKS, OP_NAMES, OPERAND_COLUMNS, RESULTS, TABLES, Op
from apportion.ir.masks.bands import INF, MAX_DIAGONALS
from apportion.ir.plan.ops import IS_KEY, LIST_OF_OP, LISTS
from apportion.ir.plan.tables import Header, Table
from apportion.ir.request.model import MAX_HEADS
from apportion.ir.tensors import PHASES, SENT_GRADIENTS, Space, Tensor

DTYPE_NAMES = ("bf16", "fp16", "fp32", "fp64")
#: those narrower than accumulators
HALF_NAMES = DTYPE_NAMES[:2]

#: (table, column) -> lowest and highest value; the others are 0 to LIMIT
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
}


def check_header(header: Header) -> None:
    """Names, counts, head sets and diagonals. Raises DecodeError."""
    _between("ranks", header.ranks, 1, MAX_RANKS)
    for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim"):
        _between(name, getattr(header, name), 1, MAX_HEADS)
    if header.q_heads % header.kv_heads:
        raise DecodeError(
            f"header: q_heads = {header.q_heads} is no multiple of kv_heads = {header.kv_heads}"
        )
    if header.dtype not in DTYPE_NAMES:
        raise DecodeError(f"header: dtype = {header.dtype[:40]!r}, known are {', '.join(DTYPE_NAMES)}")
    if header.sent_gradients not in SENT_GRADIENTS:
        raise DecodeError(
            f"header: sent_gradients = {header.sent_gradients[:40]!r}, known are {', '.join(SENT_GRADIENTS)}"
        )
    if header.sent_gradients == "model" and header.dtype not in HALF_NAMES:
        halves = " and ".join(HALF_NAMES)
        raise DecodeError(f"header: sent_gradients = 'model' is for {halves}, and dtype = {header.dtype!r}")
    _names("kinds", header.kinds)
    _names("layouts", header.layouts)
    if not header.phases or header.phases != tuple(phase for phase in PHASES if phase in header.phases):
        raise DecodeError(f"header: phases must be of {', '.join(PHASES)}, in this order, and one at least")
    if header.home_layout not in header.layouts:
        raise DecodeError(f"header: home_layout = {header.home_layout[:40]!r} is not among its layouts")
    for number, heads in enumerate(header.head_sets, 1):
        _check_heads(number, heads, header.q_heads)
    _check_diagonals(header.kinds, header.diagonals)


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise DecodeError(f"header: {name} = {value} is outside [{low}, {high}]")


def _names(field: str, names: tuple[str, ...]) -> None:
    if not names or len(set(names)) < len(names) or not all(0 < len(name) <= 128 for name in names):
        raise DecodeError(f"header: {field} must be distinct names of 1 to 128 characters")


def _check_heads(number: int, heads: tuple[int, ...], q_heads: int) -> None:
    if not heads or len(set(heads)) < len(heads) or min(heads) < 0 or max(heads) >= q_heads:
        raise DecodeError(f"header: head set {number} must hold distinct heads below {q_heads}")


def _check_diagonals(kinds: tuple[str, ...], diagonals: Mapping[str, tuple[tuple[int, int], ...]]) -> None:
    if diagonals.keys() != set(kinds):
        raise DecodeError("header: diagonals must be of each kind")
    for kind, pairs in diagonals.items():
        if len(pairs) > MAX_DIAGONALS or sorted(set(pairs)) != list(pairs):
            raise DecodeError(
                f"header: diagonals of {kind} must be distinct, sorted, and {MAX_DIAGONALS} at most"
            )
        if not all(-INF <= dmin <= dmax <= INF for dmin, dmax in pairs):
            raise DecodeError(f"header: diagonals of {kind} must be [dmin, dmax] in [{-INF}, {INF}]")


def check(
    header: Header,
    tokens: Mapping[str, int],
    layouts: Mapping[str, Table],
    programs: Mapping[tuple[str, str], Mapping[str, Table]],
    moves: Mapping[tuple[str, str], Table],
    first_rank: int = 0,
) -> None:
    """Refuse tables that cannot be walked. Columns may have any integer dtype; `first_rank` is that of their first.

    Raises DecodeError naming rank, table and row.
    """
    for name, spans in layouts.items():
        _TablePlace(f"layout {name}", "spans", spans, first_rank).check_spans(tokens[name])
    for (source, target), table in moves.items():
        place = _TablePlace(f"move {source} -> {target}", "moves", table, first_rank)
        place.check_ranges({"peer": (0, header.ranks - 1)})
    for (kind, phase), program in programs.items():
        _check_program(header, f"{kind} {phase}", program, first_rank)


class _TablePlace:
    """A table and where it stands, for messages."""

    def __init__(self, where: str, name: str, table: Table, first_rank: int) -> None:
        self.where, self.name, self.table, self.first_rank = where, name, table, first_rank

    def __getitem__(self, name: str) -> Ints:
        return self.table[name]

    @cached_property
    def rows(self) -> Ints:
        """[ranks] rows of each rank."""
        return self.table.ptr[1:] - self.table.ptr[:-1]

    def refuse(self, bad: Bools, message: str) -> None:
        """Raise for the first row marked in `bad` [rows] bool."""
        rows = np.flatnonzero(bad)
        if len(rows):
            row = int(rows[0])
            rank = int(np.searchsorted(self.table.ptr, row, side="right")) - 1
            values = ", ".join(f"{name} {self[name][row]}" for name in self.table.names)
            own_row = row - int(self.table.ptr[rank])
            where = f"rank {rank + self.first_rank}, {self.where}, {self.name} row {own_row}"
            raise DecodeError(f"{where}: {message} ({values})")

    def check_ranges(self, more: Mapping[str, tuple[int, int]]) -> None:
        if len(self.table) == 0:
            return
        for name, values in self.table.columns.items():
            low, high = more.get(name) or _RANGES.get((self.name, name), (0, LIMIT))
            top = min(high, int(np.iinfo(values.dtype).max))
            # without a sign what is below 0 is above all else
            if (low and values.min() < low) or (values if low else _unsigned(values)).max() > top:
                self.refuse((values < low) | (values > high), f"{name} is outside [{low}, {high}]")

    def check_spans(self, tokens: int) -> None:
        self.check_ranges({})
        ends = self["token"].astype(np.int64) + self["length"]
        self.refuse(ends > tokens, f"ends after the last of {tokens} tokens")
        if float(self["length"].sum(dtype=np.float64)) > LIMIT:
            raise DecodeError(f"{self.where}: its spans hold more than {LIMIT} rows")

    def check_operands(self, counts: Ints) -> None:
        """`counts` [ranks]: operands of each rank; every index is below."""
        begins, limits = self.begins(), counts[self.rows > 0]
        if len(begins) == 0:
            return
        for name in OPERAND_COLUMNS[self.name]:
            if (np.maximum.reduceat(self[name], begins) >= limits).any():
                bad = self[name] >= np.repeat(counts, self.rows)
                self.refuse(bad, f"{name} is not among the rank's operands")

    def begins(self) -> Ints:
        """The first row of each rank that has some."""
        return self.table.ptr[:-1][self.rows > 0]


def _unsigned(values: Ints) -> NDArray[np.unsignedinteger[Any]]:
    return values.view(f"u{values.dtype.itemsize}")


def _check_program(header: Header, where: str, program: Mapping[str, Table], first_rank: int) -> None:
    places = {name: _TablePlace(where, name, program[name], first_rank) for name in TABLES}
    limits = {"peer": (0, header.ranks - 1), "heads": (0, len(header.head_sets))}
    for name, place in places.items():
        place.check_ranges(limits if name in ("transfers", "operands") else {})
    _check_arenas(places["arenas"])
    _check_operand_table(header, places["operands"])
    for name in OPERAND_COLUMNS:
        places[name].check_operands(places["operands"].rows)
    _check_instructions(places["instructions"])
    _check_counts(places)


def _check_arenas(place: _TablePlace) -> None:
    arenas = place.table
    if len(arenas):
        key = arenas.rank_of_row() * (max(Tensor) + 1) + arenas["tensor"]
        again = np.ones(len(arenas), bool)
        again[np.unique(key, return_index=True)[1]] = False
        place.refuse(again, "a second arena of one tensor")


def _check_operand_table(header: Header, operands: _TablePlace) -> None:
    """Operand 0 is none, the others name rows of a tensor; head sets of KV tensors hold KV heads."""
    begins = operands.begins()
    firsts = np.zeros(len(operands.table), bool)
    none = operands.table.values[:, begins]
    if none.any():
        firsts[begins] = none.any(0)
        operands.refuse(firsts, "operand 0 must be none")
    if any(np.count_nonzero(operands[name]) != len(firsts) - len(begins) for name in ("tensor", "rows")):
        firsts[begins] = True
        blank = (operands["tensor"] == 0) | (operands["rows"] == 0)
        operands.refuse(blank & ~firsts, "only operand 0 may be none or have no rows")
    foreign = np.array([False, *(max(heads) >= header.kv_heads for heads in header.head_sets)])
    if foreign.any():
        operands.refuse(
            IS_KEY[operands["tensor"]] & foreign[operands["heads"]],
            f"its heads go beyond {header.kv_heads} KV heads",
        )


def _check_instructions(place: _TablePlace) -> None:
    op, count = place["op"], place["count"]
    launch, wait = op == Op.LAUNCH, op == Op.WAIT
    stray = ~launch & ((place["channel"] != 0) | (place["mode"] != 0) | (~wait & (place["round"] != 0)))
    place.refuse(stray, "round, channel and mode belong to launch (round to wait)")
    place.refuse(wait & (count != 0), f"{OP_NAMES[Op.WAIT]} takes no list")


def _check_counts(places: Mapping[str, _TablePlace]) -> None:
    """Per rank and list, the counts of the instructions add up to the rows."""
    place = places["instructions"]
    ranks, count = place.table.ranks, place["count"]
    longest = max(len(places[name].table) for name in LISTS)
    place.refuse(count > longest, "count exceeds its list")
    width = len(LISTS) + 1
    key = np.repeat(np.arange(0, ranks * width, width), place.rows)
    key += LIST_OF_OP[place["op"]]
    # float64 sums are exact: counts are at most `longest`, which the input's size bounds
    sums = np.bincount(key, count, ranks * width).reshape(-1, width)
    for number, name in enumerate(LISTS):
        rows = places[name].rows
        wrong = np.flatnonzero(sums[:, number] != rows)
        if len(wrong):
            rank = int(wrong[0])
            raise DecodeError(
                f"rank {rank + place.first_rank}, {place.where}: its instructions consume "
                f"{int(sums[rank, number])} rows of {name}, which has {int(rows[rank])}"
            )
