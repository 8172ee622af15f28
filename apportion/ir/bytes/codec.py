"""Plans as bytes: msgpack maps around integer columns, with a hash tree over the ranks' parts.

    plan ── header, request, layouts, moves, report    plain data, see `ir.sections`
         ├─ parts[rank]                                its spans, programs and moves, see `ir.columns`
         └─ id = H(magic · H(header) · H(request) · H(layouts) · H(moves) · H(report) · root of parts)

Encoding and decoding cost a small multiple of hashing the bytes. `schemas/FORMAT.md` describes them for readers
in other languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.columns import Cell, Cells
from apportion.ir.bytes.parts import encoder
from apportion.ir.bytes.predictions import RULES, no_operands
from apportion.ir.bytes.sections import read_header, read_moves, read_report, read_request, read_tokens
from apportion.ir.bytes.sources import room_for
from apportion.ir.errors import ConfigError, DecodeError, UnknownNameError
from apportion.ir.fields import choice
from apportion.ir.hashing import SIZE, climb, digest, leaf, path, plan_id, tree
from apportion.ir.isa import FORMAT, MAX_RANKS, MOVE_COLUMNS, PHASES, SPAN_COLUMNS, TABLES, VERSION
from apportion.ir.loops.threads import spread
from apportion.ir.plan import plain, wellformed
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Request, Table, checked_rank
from apportion.ir.text.listing import format_plan

SLICE_FORMAT = "apportion.slice"

Pair = tuple[str, str]  # (kind, phase) of a program, (source, target) of a move
Placed = tuple[tuple[str, ...], Ints]  # a column and its place
Tables = tuple[dict[str, Layout], dict[Pair, ProgramSet], tuple[Move, ...]]


@dataclass(frozen=True)
class Sections:
    """An encoded plan, section by section. `id` is the stored id: `section_id` computes the real one."""

    header: bytes
    request: bytes
    layouts: bytes
    moves: bytes
    report: bytes
    parts: list[bytes]
    id: bytes = b""

    @cached_property
    def tree(self) -> list[list[bytes]]:
        """The hash tree over the parts: its levels from the leaves up."""
        return tree([leaf(part) for part in self.parts])

    def with_id(self, id: bytes) -> Sections:
        """The same sections under another stored id."""
        named = replace(self, id=id)
        named.__dict__["tree"] = self.tree  # hashing is most of the work: not twice
        return named


def section_id(sections: Sections) -> bytes:
    """The id that the sections' bytes have (a damaged plan stores another)."""
    fixed = (sections.header, sections.request, sections.layouts, sections.moves, sections.report)
    return plan_id(map(digest, fixed), sections.tree[-1][0])


# ---------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan of one microbatch for all ranks. Equal plans have equal ids. Build with `seal`."""

    header: Header
    request: Request
    layouts: Mapping[str, Layout]
    programs: Mapping[tuple[str, str], ProgramSet]  # (kind, phase)
    moves: tuple[Move, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    sections: Sections | None = None  # as encoded, set by `seal` and `decode`

    @property
    def id(self) -> bytes:
        """32 bytes, BLAKE2b over the digests of the encoded sections."""
        return self.sealed().id

    def sealed(self) -> Sections:
        """The plan as encoded, once."""
        sealed = encode_sections(self) if self.sections is None else self.sections
        object.__setattr__(self, "sections", sealed)
        return sealed

    def encode(self) -> bytes:
        """The plan as bytes: a function of request, recipe, seed and version alone."""
        return encode(self)

    @staticmethod
    def decode(data: bytes) -> Plan:
        """The plan in `data`. Raises DecodeError (VersionError for an unknown major version)."""
        return decode(data)

    def for_rank(self, rank: int) -> Slice:
        """The rank's slice: its part, the header and the proof that it belongs to this plan's id.
        Raises ConfigError where the plan has no such rank."""
        return slice_plan(self, checked_rank(rank, self.header.ranks))

    def text(self, rank: int | None = None) -> str:
        """The plan, or one rank of it, as text; the whole text parses back with `ir.parse`."""
        return format_plan(self, rank)

    def layout(self, name: str) -> Layout:
        """The layout of that name. Raises UnknownNameError."""
        if name not in self.layouts:
            raise UnknownNameError(
                "layout", name, f"the plan has {', '.join(self.layouts)}", "name one of these"
            )
        return self.layouts[name]

    def program(self, rank: int, kind: str, phase: str) -> ProgramSet:
        """One rank's program of one attention kind and phase, as one-rank tables.

        Raises ConfigError where the plan has no such rank, UnknownNameError for a kind or phase it does not have.
        """
        choice("kind", kind, dict.fromkeys(kind for kind, _ in self.programs))
        choice("phase", phase, [held for of, held in self.programs if of == kind])
        return self.programs[kind, phase].rank(checked_rank(rank, self.header.ranks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


# ---------------------------------------------------------------------------------------------- encode


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


def encode_sections(
    plan: Plan, parts: list[bytes] | None = None, request: Mapping[str, object] | None = None
) -> Sections:
    """The plan's sections and their id.

    parts: the result of `encode_parts`, where the caller has it; request: the request as it was written, where
    that is to be kept. Raises ConfigError for a report and numbers that no plan can hold, and where the header names
    other layouts or kinds, or in another order: parts name neither.
    """
    _check_order("layouts", tuple(plan.layouts), plan.header.layouts)
    _check_order("kinds", tuple(dict.fromkeys(kind for kind, _ in plan.programs)), plan.header.kinds)
    report = _encode_report(plan)
    tokens = plan.request.batch.tokens
    if parts is None:
        parts = encode_parts(plan.layouts, plan.programs, plan.moves, plan.header.ranks)
    sections = Sections(
        header=wire.encode_section(plain.header_data(plan.header)),
        request=_encode_request(plan) if request is None else wire.encode_section(request),
        layouts=wire.encode_section({name: {"tokens": tokens} for name in plan.layouts}),
        moves=wire.encode_section([[move.source, move.target] for move in plan.moves]),
        report=report,
        parts=parts,
    )
    return sections.with_id(section_id(sections))


def _check_order(field: str, held: tuple[str, ...], named: tuple[str, ...]) -> None:
    if held != named:
        rule = f"must be those of the header, in its order: {', '.join(named)}"
        raise ConfigError(field, held, rule, "make the header name what the plan has")


def _encode_request(plan: Plan) -> bytes:
    """The request's bytes: those that the plan came with, as long as they say the same."""
    now, held = plain.request_data(plan.request), plan.sections
    fresh: bytes = wire.encode_section(now)
    if held is None or held.request == fresh:
        return fresh
    same = plain.request_data(read_request(held.request, plan.header.version)) == now
    return held.request if same else fresh


def _encode_report(plan: Plan) -> bytes:
    try:
        report: bytes = wire.encode_section(plan.report)
        read_report(report, VERSION)
    except (DecodeError, TypeError, OverflowError) as error:
        rule, remedy = str(error), "report numbers that are finite, texts, lists and maps with texts as keys"
        raise ConfigError("report", plan.report, rule, remedy) from None
    return report


def seal(plan: Plan, parts: list[bytes] | None = None) -> Plan:
    """The plan with fresh sections and the id of what it holds now. `parts` and errors: as in `encode_sections`."""
    return replace(plan, sections=encode_sections(plan, parts))


def encode(plan: Plan) -> bytes:
    """The plan as bytes."""
    return encode_wire(plan.sealed(), plan.header.version)


def encode_wire(sections: Sections, version: Sequence[int] = VERSION) -> bytes:
    """The bytes of a plan with these sections and the id that they store."""
    s, (major, minor) = sections, version
    return wire.encode_struct(
        wire.PlanWire(
            FORMAT, (major, minor), s.header, s.request, s.layouts, s.moves, s.report, s.parts, s.id
        )
    )


# ---------------------------------------------------------------------------------------------- decode


def decode(data: bytes, check_id: bool = True) -> Plan:
    """The plan in `data`, its columns int64. Structure and id are checked, meaning is for `verify`.

    check_id: refuse a plan whose stored id is not that of its bytes; False keeps the stored id in
    `plan.sections.id` for the verifier to report.

    Raises DecodeError; VersionError for an unknown major version. Allocates at most 240 times `len(data)`.
    """
    found: wire.PlanWire = wire.read_envelope(data, wire.decode_plan, "plan", FORMAT)
    if not 1 <= len(found.parts) <= MAX_RANKS:
        raise DecodeError(f"plan: {len(found.parts)} parts, from 1 to {MAX_RANKS} are allowed")
    if not wire.newer(found.version):
        wire.check_canonical_plan(len(data), found)
    sections = Sections(
        found.header, found.request, found.layouts, found.moves, found.report, found.parts, found.id
    )
    if check_id:
        _check_id(found.id, section_id(sections), "plan")
    return _decode_sections(sections, found.version)


def _check_id(stored: bytes, real: bytes, what: str) -> None:
    if stored != real:
        raise DecodeError(
            f"{what}: stored id {stored[:SIZE].hex()} differs from {real.hex()}, the id of its bytes: "
            "it was changed or damaged after it was made"
        )


def _decode_sections(sections: Sections, version: tuple[int, int]) -> Plan:
    header = read_header(sections.header, version)
    if header.ranks != len(sections.parts):
        raise DecodeError(f"header: ranks = {header.ranks}, but the plan has {len(sections.parts)} parts")
    request = read_request(sections.request, version)
    plain.check_facts(header, request)
    report = read_report(sections.report, version)
    tables = read_tables(header, sections.layouts, sections.moves, sections.parts, 0, request.batch.tokens)
    return Plan(header, request, *tables, report, sections)


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


def _check_part(part: wire.Part, header: Header, moves: int, other: wire.Part, lenient: bool) -> None:
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
    parts: list[wire.Part], ranks: int, first: int, lenient: bool
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


# ---------------------------------------------------------------------------------------------- slices


@dataclass(frozen=True, eq=False)
class Slice:
    """One rank's part of a plan, with the proof that it belongs to the plan's id.

    Tables and layouts hold this rank alone: address them with rank 0.
    """

    id: bytes
    rank: int
    header: Header
    layouts: Mapping[str, Layout]
    programs: Mapping[Pair, ProgramSet]
    moves: tuple[Move, ...]
    wire: wire.SliceWire

    @property
    def ranks(self) -> int:
        return self.header.ranks

    @property
    def part_bytes(self) -> int:
        """Size of the encoded part, in bytes: what targets on plan size count."""
        return len(self.wire.part)

    def layout(self, name: str) -> Layout:
        """This rank's rows of the layout of that name. Raises UnknownNameError."""
        if name not in self.layouts:
            raise UnknownNameError(
                "layout", name, f"the plan has {', '.join(self.layouts)}", "name one of these"
            )
        return self.layouts[name]

    def encode(self) -> bytes:
        """The slice as bytes."""
        return wire.encode_struct(self.wire)

    @staticmethod
    def decode(data: bytes) -> Slice:
        """The slice in `data`; its id follows from its bytes. Raises DecodeError, VersionError."""
        found: wire.SliceWire = wire.read_envelope(data, wire.decode_slice, "slice", SLICE_FORMAT)
        if not wire.newer(found.version):
            wire.check_canonical(len(data), found, "slice")
        _check_id(found.id, _slice_id(found), f"slice of rank {found.rank}")
        return _open_slice(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and (self.id, self.rank) == (other.id, other.rank)

    def __hash__(self) -> int:
        return hash((self.id, self.rank))


def _slice_id(found: wire.SliceWire) -> bytes:
    if not 0 <= found.rank < found.ranks <= MAX_RANKS:
        raise DecodeError(f"slice: rank {found.rank} of {found.ranks}")
    if len(found.digests) != 2:
        raise DecodeError(f"slice: {len(found.digests)} digests, expected those of request and report")
    if any(len(node) != SIZE for node in [*found.digests, *found.path]):
        raise DecodeError(f"slice: a digest does not have {SIZE} bytes")
    request, report = found.digests
    digests = (digest(found.header), request, digest(found.layouts), digest(found.moves), report)
    return plan_id(digests, climb(leaf(found.part), found.rank, found.ranks, found.path))


def _open_slice(found: wire.SliceWire) -> Slice:
    header = read_header(found.header, found.version)
    if header.ranks != found.ranks:
        raise DecodeError(f"slice: of {found.ranks} ranks, but its plan has {header.ranks}")
    tables = read_tables(header, found.layouts, found.moves, [found.part], found.rank)
    return Slice(found.id, found.rank, header, *tables, found)


def slice_plan(plan: Plan, rank: int) -> Slice:
    """The slice of one rank. Raises ConfigError where the plan has no such rank."""
    if not 0 <= rank < plan.header.ranks:
        raise ConfigError("rank", rank, f"the plan has {plan.header.ranks} ranks", "name one from 0 on")
    (found,) = _slice_wires(plan, [rank])
    layouts = {name: Layout(name, layout.spans.rank(rank)) for name, layout in plan.layouts.items()}
    programs = {key: program.rank(rank) for key, program in plan.programs.items()}
    moves = tuple(Move(move.source, move.target, move.table.rank(rank)) for move in plan.moves)
    return Slice(found.id, rank, plan.header, layouts, programs, moves, found)


def encode_slices(plan: Plan) -> list[bytes]:
    """The bytes of every rank's slice, without opening any."""
    return [wire.encode_struct(found) for found in _slice_wires(plan, range(plan.header.ranks))]


def _slice_wires(plan: Plan, ranks: Iterable[int]) -> Iterator[wire.SliceWire]:
    s: Sections = plan.sealed()
    digests = [digest(s.request), digest(s.report)]
    for rank in ranks:
        yield wire.SliceWire(
            SLICE_FORMAT,
            plan.header.version,
            rank,
            plan.header.ranks,
            s.header,
            s.layouts,
            s.moves,
            s.parts[rank],
            digests,
            path(s.tree, rank),
            s.id,
        )
