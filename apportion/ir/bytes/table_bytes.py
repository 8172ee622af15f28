"""Encodes and decodes the tables of a plan, rank by rank: spans, programs, moves, recurrences.

A rank's part concatenates its rows of each table: the spans of each layout, the tables of each program, the moves, the
tables of recurrent layers. `core/ir/tables.hpp` describes the bytes of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, product

import numpy as np

from apportion._core import tables as core
from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.sections import read_moves, read_tokens
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import LIMIT, MOVE_COLUMNS, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES
from apportion.ir.plan import wellformed
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Recurrence, Table
from apportion.ir.tensors import PHASES
from apportion.ir.threads import spread

Pair = tuple[str, str]  # (kind, phase) of a program, (source, target) of a move
Tables = tuple[dict[str, Layout], dict[Pair, ProgramSet], tuple[Move, ...], Recurrence | None]


class Parts(list[bytes]):
    """The encoded parts of all ranks, with references to their source tables."""

    def __init__(self, parts: Iterable[bytes], tables: Sequence[Table]) -> None:
        super().__init__(parts)
        self._original, self._tables = tuple(self), tuple(tables)
        arrays = [array for table in tables for array in (table.ptr, table.values)]
        if all(map(_is_owner, arrays)):
            for array in arrays:
                array.setflags(write=False)

    def encodes(self, tables: Sequence[Table]) -> bool:
        """True if `encode_parts` of these tables would give the same bytes, decided without encoding: the arrays are
        the same objects, and nothing else can have written to them. Also False if this cannot be decided."""
        is_same = tuple(self) == self._original and len(self._tables) == len(tables)
        return is_same and all(
            table.names == original.names
            and table.ptr is original.ptr
            and table.values is original.values
            and all(_is_owner(array) and not array.flags.writeable for array in (table.ptr, table.values))
            for table, original in zip(tables, self._tables, strict=True)
        )


def _is_owner(array: Ints) -> bool:
    """True if no other array can write to the memory of this one."""
    return type(array) is np.ndarray and array.base is None


def tables_of(
    layouts: Mapping[str, Layout],
    programs: Mapping[Pair, ProgramSet],
    moves: Sequence[Move],
    recurrence: Recurrence | None = None,
) -> list[Table]:
    """All tables in the order of a part: kinds in the order of `programs`, forward before backward."""
    tables = [layout.spans for layout in layouts.values()]
    kinds = dict.fromkeys(kind for kind, _ in programs)
    ordered = [programs[key] for key in product(kinds, PHASES) if key in programs]
    tables += [program[name] for program in ordered for name in TABLES]
    tables += [move.table for move in moves]
    return tables + ([] if recurrence is None else [recurrence[name] for name in RECURRENCE_TABLES])


def encode_parts(tables: Sequence[Table], ranks: int, threads: int = 1) -> Parts:
    """Encodes the part of every rank from the tables of a plan, as `tables_of` lists them; the result does not depend
    on `threads`. Raises ConfigError for numbers out of range.

    Makes the arrays read-only, so that the verifier need not decode the parts to know that they encode these tables.
    """
    return Parts(encode_tables(tables, ranks, threads), tables)


def encode_tables(tables: Sequence[Table], ranks: int, threads: int = 1) -> Iterator[bytes]:
    """Like `encode_parts`, for tables in the order of `tables_of`, but leaves arrays writeable."""
    for table in tables:
        _check_numbers(table)
    arrays = [(table.ptr, table.values) for table in tables]
    ends = np.linspace(0, ranks, min(threads, ranks) + 1).astype(np.int64).tolist()
    return chain.from_iterable(spread(lambda bounds: core.encode(arrays, *bounds), pairwise(ends), threads))


def _check_numbers(table: Table) -> None:
    """Raises ConfigError for tables with too many rows or numbers out of range."""
    longest = int(np.diff(table.ptr).max(initial=0))
    if longest > core.MAX_ROWS:
        raise ConfigError(
            "rows", longest, f"a rank may have at most {core.MAX_ROWS} rows in a table", "use larger blocks"
        )
    values = table.values
    if values.itemsize > 4 and values.size and (values.min() < -LIMIT or values.max() > LIMIT):
        column, row = np.argwhere((values < -LIMIT) | (values > LIMIT))[0].tolist()
        rule = f"is outside [-2**48, 2**48] in row {row}"
        raise ConfigError(table.names[column], int(values[column, row]), rule, "use smaller numbers")


#: columns of tables that may be int32
_NARROW = {names for name, names in TABLES.items() if name != "arenas"}


def read_tables(
    header: Header,
    layouts: bytes,
    moves: bytes,
    parts: Sequence[bytes],
    first: int = 0,
    tokens: int | None = None,
) -> Tables:
    """Decodes the tables of the ranks from `first` on. layouts, moves: the encoded sections; parts: one per rank;
    tokens: the number of tokens of the batch, if known. Raises DecodeError."""
    layout_tokens = read_tokens(layouts, header, tokens, header.version)
    pairs = read_moves(moves, header, header.version)
    for part in parts:
        wire.check_size(part, "part")
    keys = [*product(header.kinds, header.phases)]
    forms: list[tuple[str, tuple[str, ...]]] = [(f"layout {name}", SPAN_COLUMNS) for name in header.layouts]
    forms += [(f"{' '.join(key)} {name}", names) for key in keys for name, names in TABLES.items()]
    forms += [(f"move {source} -> {target}", MOVE_COLUMNS) for source, target in pairs]
    forms += [(name, names) for name, names in RECURRENCE_TABLES.items() if header.recurrent]
    tables = read_parts(forms, parts, first)
    spans = dict(zip(header.layouts, tables, strict=False))
    programs = {key: {name: next(tables) for name in TABLES} for key in keys}
    remaps = dict(zip(pairs, tables, strict=False))
    recurrence = Recurrence({name: next(tables) for name in RECURRENCE_TABLES}) if header.recurrent else None
    wellformed.check(header, layout_tokens, spans, programs, remaps, recurrence, first)
    return (
        {name: Layout(name, table) for name, table in spans.items()},
        {key: ProgramSet(tables) for key, tables in programs.items()},
        tuple(Move(*pair, table) for pair, table in remaps.items()),
        recurrence,
    )


def read_parts(
    forms: Sequence[tuple[str, tuple[str, ...]]], parts: Sequence[bytes], first: int
) -> Iterator[Table]:
    """Decodes the tables of parts with the dtypes that lowering uses: int32 for operands, instructions and lists if the
    sum of any two of their numbers fits, else int64. forms: (name in messages, columns) of each table."""
    columns = [names for _, names in forms]
    try:
        tables = core.decode(parts, [*map(len, columns)], [names in _NARROW for names in columns])
    except core.Malformed as fault:
        rank, table, column, rule = fault.args
        table_name, names = forms[table]
        prefix = f"column {names[column]!r} " if column >= 0 else ""
        raise DecodeError(f"rank {first + rank}, {table_name}: {prefix}{rule}") from None
    return (Table(ptr, names, values) for (ptr, values), names in zip(tables, columns, strict=True))
