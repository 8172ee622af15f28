"""The integer columns of a plan, encoded and read rank by rank: spans, programs and moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.cells.columns import Cell, Cells
from apportion.ir.bytes.cells.predictions import RULES, no_operands
from apportion.ir.bytes.cells.sources import room_for
from apportion.ir.bytes.parts import encoder
from apportion.ir.bytes.sections import read_moves, read_tokens
from apportion.ir.errors import DecodeError
from apportion.ir.isa import MOVE_COLUMNS, SPAN_COLUMNS, TABLES
from apportion.ir.loops.threads import spread
from apportion.ir.plan import wellformed
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Table
from apportion.ir.tensors import PHASES

Pair = tuple[str, str]  # (kind, phase) of a program, (source, target) of a move
Placed = tuple[tuple[str, ...], Ints]  # a column and its place
Tables = tuple[dict[str, Layout], dict[Pair, ProgramSet], tuple[Move, ...]]


class Parts(list[bytes]):
    """The parts of all ranks, as they were encoded, which know the columns that they were made from."""

    def __init__(self, parts: Iterable[bytes], columns: Iterable[Placed]) -> None:
        super().__init__(parts)
        self._made, self._columns = tuple(self), tuple(columns)
        arrays = [column for _, column in self._columns]
        memory = list(map(_memory, arrays))
        owners = [owner for owner in memory if owner is not None]
        if len(owners) == len(arrays):
            for array in (*arrays, *owners):
                array.setflags(write=False)

    def are_of(
        self, layouts: Mapping[str, Layout], programs: Mapping[Pair, ProgramSet], moves: Sequence[Move]
    ) -> bool:
        """Whether `encode_parts` would give the same again, told without encoding: these have the very columns that
        the parts were made from, and nobody can have written to them. A False may mean that this is not known."""
        columns = _named_columns(layouts, programs, moves)
        same = tuple(self) == self._made and len(self._columns) == len(columns)
        return same and all(
            name == known and column is source and _is_sealed(source)
            for (name, column), (known, source) in zip(columns, self._columns, strict=True)
        )


def _named_columns(
    layouts: Mapping[str, Layout], programs: Mapping[Pair, ProgramSet], moves: Sequence[Move]
) -> list[Placed]:
    """All that parts are made from, each with its place in them."""
    tables: list[tuple[tuple[str, ...], Table, tuple[str, ...]]] = [
        (("layout", name), layout.spans, SPAN_COLUMNS) for name, layout in layouts.items()
    ]
    tables += [
        ((*key, n), program[n], cols) for key, program in programs.items() for n, cols in TABLES.items()
    ]
    tables += [(("move", str(number)), move.table, MOVE_COLUMNS) for number, move in enumerate(moves)]
    found: list[Placed] = []
    for place, table, names in tables:
        found.append(((*place, "ptr"), table.ptr))
        if len(table):
            found += [((*place, name), table.columns[name]) for name in names]
    return found


def _memory(column: Ints) -> Ints | None:
    """The array whose memory a column is, or is a part of; None where it looks into somebody else's."""
    owner = column if column.base is None else column.base
    return owner if type(owner) is np.ndarray and owner.base is None else None


def _is_sealed(column: Ints) -> bool:
    owner = _memory(column)
    return owner is not None and not column.flags.writeable and not owner.flags.writeable


def encode_parts(
    layouts: Mapping[str, Layout],
    programs: Mapping[Pair, ProgramSet],
    moves: Sequence[Move],
    ranks: int,
    threads: int = 1,
) -> Parts:
    """The part of every rank, the same on any number of threads. Raises ConfigError for numbers that no plan can hold.

    Columns, and the arrays that they are parts of, are read-only from then on: the verifier need not read the parts.
    """
    written = encoder(
        [layout.spans for layout in layouts.values()],
        {key: programs[key].tables for key in _ordered(programs)},
        [move.table for move in moves],
        ranks,
    )
    made = spread(written.parts, _pieces(written.before, threads), threads)
    return Parts(chain.from_iterable(made), _named_columns(layouts, programs, moves))


def _ordered(programs: Mapping[Pair, ProgramSet]) -> list[Pair]:
    """Kinds as they come, forward before backward."""
    kinds = list(dict.fromkeys(kind for kind, _ in programs))
    return sorted(programs, key=lambda key: (kinds.index(key[0]), PHASES.index(key[1])))


#: rows of all tables that are encoded at a time: what is made of them on the way is 100 bytes each
_ROWS_AT_ONCE = 1 << 18


def _pieces(before: Ints, threads: int) -> list[range]:
    """Ranges of ranks with much the same rows, as many for each thread. before: int64 [ranks + 1], rows before each."""
    rows = int(before[-1])
    count = threads * max(-(-rows // (threads * _ROWS_AT_ONCE)), 1)
    bounds = np.searchsorted(before, rows * np.arange(count + 1) // count)
    bounds[-1] = len(before) - 1  # the last ranks may be without rows
    return [range(begin, end) for begin, end in pairwise(np.unique(bounds).tolist())]


def read_tables(
    header: Header,
    layouts: bytes,
    moves: bytes,
    parts: Sequence[bytes],
    first: int = 0,
    tokens: int | None = None,
) -> Tables:
    """What the ranks from `first` on hold. layouts, moves: these sections; parts: of the ranks; tokens: of the batch,
    where it is known. Raises DecodeError."""
    version, lenient = header.version, wire.newer(header.version)
    of_layouts = read_tokens(layouts, header, tokens, version)
    pairs = read_moves(moves, header, version)
    read = [wire.read_part(part, rank, version) for rank, part in enumerate(parts, first)]
    for part in read:
        _check_part(part, header, len(pairs), read[0], lenient)
    none = no_operands(len(read))

    def table(cells: list[Cell], where: str, name: str) -> Table:
        return Cells(cells, where, first).table(RULES[name], header.ranks, none, lenient)

    spans = {
        name: table([part.layouts[number] for part in read], f"layout {name}", "spans")
        for number, name in enumerate(header.layouts)
    }
    remaps = {
        (source, target): table([part.moves[number] for part in read], f"move {source} -> {target}", "moves")
        for number, (source, target) in enumerate(pairs)
    }
    programs = _read_programs(read, header.ranks, first, lenient)
    wellformed.check(header, of_layouts, spans, programs, remaps, first)
    return (
        {name: Layout(name, table) for name, table in spans.items()},
        {key: ProgramSet(tables) for key, tables in programs.items()},
        tuple(Move(*pair, table) for pair, table in remaps.items()),
    )


def _check_part(
    part: wire.RankTables, header: Header, moves: int, other: wire.RankTables, lenient: bool
) -> None:
    """Whether it has what the header says, and the phases that another one has. Raises DecodeError."""
    where = f"part of rank {part.rank}"
    if list(part.programs) != list(header.kinds) or len(part.moves) != moves:
        raise DecodeError(f"{where}: its attention kinds or its number of moves are not the plan's")
    if len(part.layouts) != len(header.layouts):
        raise DecodeError(f"{where}: {len(part.layouts)} layouts, the header names {len(header.layouts)}")
    for kind, programs in part.programs.items():
        known = [phase for phase in PHASES if phase in programs]
        if not known or not list(programs) == known == list(other.programs[kind]):
            raise DecodeError(f"{where}: its phases of {kind} are not the plan's")
        for tables in programs.values():
            if len(tables) < len(TABLES) or (len(tables) > len(TABLES) and not lenient):
                raise DecodeError(f"{where}: {len(tables)} tables of {kind}, expected {len(TABLES)}")


def _read_programs(
    parts: list[wire.RankTables], ranks: int, first: int, lenient: bool
) -> dict[Pair, dict[str, Table]]:
    cells = {
        (kind, phase): {
            name: Cells([part.programs[kind][phase][n] for part in parts], f"{kind} {phase} {name}", first)
            for n, name in enumerate(TABLES)
        }
        for kind, phases in parts[0].programs.items()
        for phase in phases
    }
    operands = room_for([of["operands"].rows for of in cells.values()], ranks)
    found: dict[Pair, dict[str, Table]] = {}
    for number, (key, of) in enumerate(cells.items()):
        operands.read(number, of["operands"], lenient)
        named = operands.named(number)
        found[key] = {
            name: operands.table(number)
            if name == "operands"
            else table.table(RULES[name], ranks, named, lenient)
            for name, table in of.items()
        }
    return found
