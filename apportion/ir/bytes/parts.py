"""The parts of all ranks as bytes: what msgpack makes of `wire.Part`, laid down by one loop over the ranks.

Parts differ in numbers, not in form. Their form is a row of *tokens*, made once; the loop goes through it for each
rank, all of whose rows it then has at hand:

    TEXT       bytes that all ranks have: keys, and the heads of maps and arrays
    RANK       the rank's number
    CELL       the rank's rows of a table, perhaps none
    OPERANDS   likewise, the operands of a program; those of all programs are gathered first, and their sources found
    BARE       a cell without its head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.cells.columns import MAX_ROWS, most_bytes, write_cell
from apportion.ir.bytes.cells.numbers import Bytes
from apportion.ir.bytes.cells.predictions import BACK, ROWS, RULES, Rule, WalkedRows, memory_for, numbered
from apportion.ir.bytes.cells.sources import find_sources
from apportion.ir.errors import ConfigError
from apportion.ir.isa import LIMIT, TABLES
from apportion.ir.loops.jit import inlined, lean, unlocked
from apportion.ir.plan.tables import Table

TEXT, RANK, CELL, OPERANDS, BARE = range(5)
#: bytes that the head of a cell or a number takes at most
_HEAD = 5
_text = msgspec.msgpack.Encoder().encode
_MAP, _ARRAY = (0x80, 0xDE), (0x90, 0xDC)


class Written(NamedTuple):
    """How a table is written. columns: those that it has in a plan, in order; first, end: its rules among those of all
    tables; derived: how many of these, the first ones, are of columns that no plan has."""

    columns: tuple[str, ...]
    first: int
    end: int
    derived: int


def _written(rules: tuple[Rule, ...], first: int = 0) -> Written:
    columns = tuple(rule.column for rule in rules if rule.kind != BACK)
    return Written(columns, first, first + len(rules), len(rules) - len(columns))


_FIRST = accumulate(map(len, RULES.values()), initial=0)
_WRITTEN = MappingProxyType(
    {name: _written(rules, first) for (name, rules), first in zip(RULES.items(), _FIRST, strict=False)}
)
_RULES = np.concatenate([numbered(rules) for rules in RULES.values()])
_RULES.setflags(write=False)


class TokenForm:
    """Collects tokens, texts and tables. A token is of a kind, and says of a text from where to where; of a cell, the
    number of the table, and of the program whose operands its rows name."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, int]] = []
        self.texts = bytearray()
        self.tables: list[tuple[Table, Written]] = []

    def add_text(self, *texts: bytes) -> None:
        begin = len(self.texts)
        self.texts += b"".join(texts)
        if self.tokens and self.tokens[-1][0] == TEXT:
            begin = self.tokens.pop()[1]
        self.tokens.append((TEXT, begin, len(self.texts)))

    def add_rank(self) -> None:
        self.tokens.append((RANK, 0, 0))

    def add_tables(self, tables: Sequence[tuple[str, Table]], program: int) -> None:
        """An array of a cell for each table, which has a name in `RULES`."""
        self.add_text(_head(_ARRAY, len(tables)))
        for name, table in tables:
            self.add_cell(OPERANDS if name == "operands" else CELL, table, _WRITTEN[name], program)

    def add_cell(self, kind: int, table: Table, written: Written, program: int) -> None:
        self.tokens.append((kind, len(self.tables), program))
        self.tables.append((table, written))


def _head(kind: tuple[int, int], count: int) -> bytes:
    """The head of a map or an array."""
    short, long = kind
    return bytes([short | count]) if count < 16 else bytes([long]) + count.to_bytes(2, "big")


def form_of(
    layouts: Sequence[Table], programs: Mapping[tuple[str, str], Mapping[str, Table]], moves: Sequence[Table]
) -> TokenForm:
    """The form of parts; the phases of a kind stand side by side among the programs."""
    form, none = TokenForm(), len(programs)
    form.add_text(_head(_MAP, 4), _text("rank"))
    form.add_rank()
    form.add_text(_text("layouts"))
    form.add_tables([("spans", table) for table in layouts], none)
    phases: dict[str, list[str]] = {}
    for kind, phase in programs:
        phases.setdefault(kind, []).append(phase)
    form.add_text(_text("programs"), _head(_MAP, len(phases)))
    for number, ((kind, phase), tables) in enumerate(programs.items()):
        if phase == phases[kind][0]:
            form.add_text(_text(kind), _head(_MAP, len(phases[kind])))
        form.add_text(_text(phase))
        form.add_tables([(name, tables[name]) for name in TABLES], number)
    form.add_text(_text("moves"))
    form.add_tables([("moves", table) for table in moves], none)
    return form


# ---------------------------------------------------------------------------------------------- columns


class Packed(NamedTuple):
    """Some ranks' rows of all tables. values: int64, their columns end to end, table after table; ptr: int64
    [tables, ranks + 1], rows before each rank; tables: int64 [tables, 4], first, end and derived as in `Written`, and
    where the table begins in `values`; rules: int64 [columns, 4], as `numbered`; ranks: of the plan."""

    values: Ints
    ptr: Ints
    tables: Ints
    rules: Ints
    ranks: int


class Encoder:
    """Writes what a form says, of tables that all have the same ranks."""

    def __init__(self, form: TokenForm, rules: Ints, ranks: int) -> None:
        """rules: of the tables, as `numbered`; ranks: of the plan. Raises ConfigError for numbers that no plan can
        hold."""
        self._tokens, self._texts = np.array(form.tokens, np.int64), np.frombuffer(form.texts, np.uint8)
        self._tables, self._rules, self._ranks = form.tables, rules, ranks
        self._columns = [
            [_checked(name, table[name]) for name in written.columns] for table, written in form.tables
        ]
        self._ptr = np.array([table.ptr for table, _ in form.tables], np.int64)
        longest = int(np.diff(self._ptr).max(initial=0))
        if longest > MAX_ROWS:
            rule = f"a rank has at most {MAX_ROWS} in a table"
            raise ConfigError("rows", longest, rule, "use larger blocks")

    @property
    def before(self) -> Ints:
        """int64 [ranks + 1]: rows of all tables before each rank."""
        return np.asarray(self._ptr.sum(0))

    def parts(self, ranks: range) -> list[bytes]:
        """What is written for each of these ranks."""
        out, ends = self.write(ranks)
        return [out[begin:end].tobytes() for begin, end in pairwise([0, *ends.tolist()])]

    def write(self, ranks: range) -> tuple[Bytes, Ints]:
        """What is written for these ranks, end to end, and int64 [ranks], where each ends."""
        ptr = self._ptr[:, ranks.start : ranks.stop + 1]
        held: list[Ints] = []
        tables: list[tuple[int, int, int, int]] = []
        base = 0
        bounds = zip(ptr[:, 0].tolist(), ptr[:, -1].tolist(), strict=True)
        for (begin, end), columns, (_, written) in zip(bounds, self._columns, self._tables, strict=True):
            held += [column[begin:end] for column in columns]
            tables.append((written.first, written.end, written.derived, base))
            base += len(columns) * (end - begin)
        values = np.concatenate(held, out=np.empty(base, np.int64))
        packed = Packed(values, ptr - ptr[:, :1], np.array(tables, np.int64), self._rules, self._ranks)
        found: tuple[Bytes, Ints] = _write(ranks.start, self._tokens, self._texts, packed)
        return found


def encode_table(table: Table, rules: tuple[Rule, ...]) -> tuple[Bytes, Ints]:
    """The cells of a table that refers to no operands, end to end, and int64 [ranks], where each ends. Raises
    ConfigError for numbers that no plan can hold."""
    form = TokenForm()
    form.add_cell(BARE, table, _written(rules), 0)
    return Encoder(form, numbered(rules), table.ranks).write(range(table.ranks))


def encoder(
    layouts: Sequence[Table],
    programs: Mapping[tuple[str, str], Mapping[str, Table]],
    moves: Sequence[Table],
    ranks: int,
) -> Encoder:
    """Writes the parts of a plan. Raises as `Encoder`."""
    return Encoder(form_of(layouts, programs, moves), _RULES, ranks)


def _checked(name: str, column: Ints) -> Ints:
    """The column. Raises ConfigError for what no plan can hold."""
    if column.dtype.kind not in "iu":
        raise ConfigError(name, column.dtype, "is no dtype of integers", "convert the column")
    if column.dtype.itemsize > 4 and len(column) and (column.min() < -LIMIT or column.max() > LIMIT):
        row = int(np.flatnonzero((column < -LIMIT) | (column > LIMIT))[0])
        rule = f"is outside [-2**48, 2**48] in row {row}"
        raise ConfigError(name, int(column[row]), rule, "use smaller numbers")
    return column


# ---------------------------------------------------------------------------------------------- the loop


class Scratch(NamedTuple):
    """What the loop over the ranks works in. operands: as `Packed.values`, all columns of those of a rank, `most` each;
    begins, newest: int64, for each program where its operands begin and the highest that was named so far, and one more
    for tables that name none; slots: of `find_sources`; memory, places, departs: of `Rows`; cell: bytes of one."""

    operands: Ints
    most: int
    begins: Ints
    newest: Ints
    slots: Ints
    memory: Ints
    places: Ints
    departs: Ints
    cell: Bytes


@unlocked
def _write(first_rank: int, tokens: Ints, texts: Bytes, packed: Packed) -> tuple[Bytes, Ints]:
    """The parts of the ranks from `first_rank` on, one after another, and where each ends."""
    ptr, ranks = packed.ptr, packed.ptr.shape[1] - 1
    held, programs, columns = np.zeros(ranks, np.int64), 0, 0
    longest, cell, room = 0, 0, ranks * (len(texts) + _HEAD * len(tokens))
    for token in range(len(tokens)):
        kind, table = tokens[token, 0], tokens[token, 1]
        if kind >= CELL:
            width, most = packed.tables[table, 1] - packed.tables[table, 0], 0
            for rank in range(ranks):
                size = ptr[table, rank + 1] - ptr[table, rank]
                most = max(most, size)
                if kind == OPERANDS:
                    held[rank] += size
            if kind == OPERANDS:
                programs, columns = programs + 1, width
            longest, cell = max(longest, most), max(cell, most_bytes(1, width, most))
            room += most_bytes(ranks, width, ptr[table, -1])
    most = held.max()
    places = np.empty((2, longest + 1), np.int64)
    scratch = Scratch(
        np.empty(columns * most, np.int64),
        most,
        np.empty(programs + 2, np.int64),
        np.empty(programs + 1, np.int64),
        np.empty((2, 2 * most + 1), np.int64),
        memory_for(packed.ranks, most),
        places[0],
        places[1],
        np.empty(cell, np.uint8),
    )
    out, ends = np.empty(room, np.uint8), np.empty(ranks, np.int64)
    _write_parts(first_rank, tokens, texts, packed, scratch, out, ends)
    return out[: ends[-1]], ends


@lean
def _write_parts(
    first_rank: int, tokens: Ints, texts: Bytes, packed: Packed, scratch: Scratch, out: Bytes, ends: Ints
) -> None:
    at = 0
    for rank in range(len(ends)):
        _gather_operands(rank, tokens, packed, scratch)
        for token in range(len(tokens)):
            kind, a, b = tokens[token, 0], tokens[token, 1], tokens[token, 2]
            if kind == TEXT:
                at = _copy(out, at, texts, a, b)
            elif kind == RANK:
                at = _write_count(out, at, first_rank + rank)
            else:
                size = write_cell(_rows(rank, kind, a, b, packed, scratch), scratch.cell, 0)
                if kind != BARE:
                    at = _write_head(out, at, size)
                at = _copy(out, at, scratch.cell, 0, size)
        ends[rank] = at


@inlined
def _gather_operands(rank: int, tokens: Ints, packed: Packed, scratch: Scratch) -> None:
    """The rank's operands of all programs, with their sources."""
    count, begins, most = 0, scratch.begins, scratch.most
    for token in range(len(tokens)):
        if tokens[token, 0] == OPERANDS:
            table, begins[tokens[token, 2]] = tokens[token, 1], count
            first, last, derived, base = packed.tables[table]
            begin, end, total = packed.ptr[table, rank], packed.ptr[table, rank + 1], packed.ptr[table, -1]
            for column in range(derived, last - first):
                own = scratch.operands[column * most + count : column * most + count + end - begin]
                values = packed.values[base + begin : base + end]
                for row in range(len(own)):
                    own[row] = values[row]
                base += total
            count += end - begin
    begins[-2:] = count
    scratch.newest[:] = 0
    find_sources(scratch.operands, most, count, scratch.slots)


@inlined
def _rows(rank: int, kind: int, table: int, program: int, packed: Packed, scratch: Scratch) -> WalkedRows:
    """The rank's rows of a table; kind, table, program: of a token."""
    begins, named = scratch.begins, ROWS * scratch.most
    first, last, _, base = packed.tables[table]
    values, total = packed.values, packed.ptr[table, -1]
    begin, end = packed.ptr[table, rank], packed.ptr[table, rank + 1]
    if kind == OPERANDS:
        values, base, total = scratch.operands, 0, scratch.most
        begin, end = begins[program], begins[program + 1]
    return WalkedRows(
        values,
        base,
        total,
        begin,
        end,
        packed.rules[first:last],
        packed.ranks,
        0,
        scratch.operands[named + begins[program] : named + begins[program + 1]],
        scratch.newest,
        program,
        scratch.memory,
        (rank * len(packed.tables) + table) * len(packed.rules) + 1,
        scratch.places,
        scratch.departs,
    )


@inlined
def _copy(out: Bytes, at: int, source: Bytes, begin: int, end: int) -> int:
    target, held = out[at : at + end - begin], source[begin:end]
    for place in range(len(target)):
        target[place] = held[place]
    return at + end - begin


@inlined
def _write_count(out: Bytes, at: int, count: int) -> int:
    """A number up to 65,535 in its shortest form."""
    if count < 128:
        out[at] = count
        return at + 1
    if count < 256:
        out[at], out[at + 1] = 0xCC, count
        return at + 2
    out[at], out[at + 1], out[at + 2] = 0xCD, count >> 8, count & 255
    return at + 3


@inlined
def _write_head(out: Bytes, at: int, size: int) -> int:
    """The head of a cell."""
    length = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    out[at] = 0xC4 if length == 1 else 0xC5 if length == 2 else 0xC6
    for place in range(length):
        out[at + 1 + place] = (size >> (8 * (length - 1 - place))) & 255
    return at + 1 + length
