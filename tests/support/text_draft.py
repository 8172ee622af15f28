"""The draft of a plan that the text parser fills, and its completion to a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import msgspec
import numpy as np

from apportion import ApportionError, DecodeError, Plan
from apportion.ir.bytes import codec, wire
from apportion.ir.isa import MOVE_COLUMNS, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES, VERSION
from apportion.ir.plan import plain, wellformed
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Recurrence, Request, Table
from apportion.ir.tensors import HEADLESS, PHASES, Space, Tensor
from apportion.ir.text.words import NONE, Operand, Row


class DraftProgram:
    """The program of one rank while it is read."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES if name not in ("arenas", "operands")}
        self.operands: list[Operand] = [NONE]
        self.place: dict[Operand, int] = {NONE: 0}
        self.arenas: list[Row] | None = None

    def set_operands(self, operands: list[Operand]) -> None:
        self.operands = operands
        self.place = {operand: i for i, operand in reversed(list(enumerate(operands)))}

    def index(self, operand: Operand) -> int:
        if operand not in self.place:
            self.place[operand] = len(self.operands)
            self.operands.append(operand)
        return self.place[operand]

    def table(self, name: str, header: Header) -> list[Row]:
        if name == "operands":
            return list(self.operands)
        if name == "arenas":
            return _extents(self.operands, header) if self.arenas is None else self.arenas
        return self.rows[name]


def _extents(operands: Iterable[Operand], header: Header) -> list[Row]:
    """The smallest arenas that hold all work operands. Tensors without heads take one column."""
    most: dict[int, tuple[int, int]] = {}
    for tensor, space, row, rows, col, heads in operands:
        if space == Space.WORK:
            old = most.get(tensor, (0, 0))
            most[tensor] = max(old[0], row + rows), max(old[1], col + _head_count(tensor, heads, header))
    return [(tensor, *most[tensor]) for tensor in sorted(most)]


def _head_count(tensor: int, heads: int, header: Header) -> int:
    if tensor in HEADLESS or heads == 0:
        return header.heads_of(Tensor(tensor))
    return len(header.head_sets[heads - 1]) if heads <= len(header.head_sets) else 0


@dataclass
class TextDraft:
    """The lines of a text, grouped by kind; rows by rank."""

    version: tuple[int, int] = VERSION
    json: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    ranks: set[int] = field(default_factory=set)
    spans: dict[str, dict[int, list[Row]]] = field(default_factory=dict)
    moves: dict[tuple[str, str], dict[int, list[Row]]] = field(default_factory=dict)
    programs: dict[tuple[str, str], dict[int, DraftProgram]] = field(default_factory=dict)
    recurrent: defaultdict[str, dict[int, list[Row]]] = field(default_factory=lambda: defaultdict(dict))

    def plan(self) -> Plan:
        request = self.request()
        header = self.header(request)
        ranks = header.ranks
        if self.ranks and max(self.ranks) >= ranks:
            raise DecodeError(f"rank {max(self.ranks)}: the plan has {ranks} ranks")
        spans = {name: _table(self.spans.get(name, {}), SPAN_COLUMNS, ranks) for name in header.layouts}
        layouts = {name: Layout(name, table) for name, table in spans.items()}
        programs = {key: self.program_set(key, header) for key in self.program_keys(header)}
        pairs = {pair: self.moves.get(pair, {}) for pair in self.move_pairs(header)}
        moves = tuple(Move(*pair, _table(rows, MOVE_COLUMNS, ranks)) for pair, rows in pairs.items())
        wellformed.check(
            header,
            dict.fromkeys(header.layouts, request.batch.tokens),
            spans,
            {key: program.tables for key, program in programs.items()},
            {(move.source, move.target): move.table for move in moves},
            recurrence := self.recurrence(header),
        )
        return self.seal(Plan(header, request, layouts, programs, moves, self.report(), recurrence))

    def recurrence(self, header: Header) -> Recurrence | None:
        if not header.recurrent and any(self.recurrent.values()):
            raise DecodeError("recurrent: the header has no recurrent kinds")
        columns_of = RECURRENCE_TABLES.items()
        tables = {name: _table(self.recurrent[name], columns, header.ranks) for name, columns in columns_of}
        return Recurrence(tables) if header.recurrent else None

    def request(self) -> Request:
        if "request" not in self.json:
            raise DecodeError("request: the text has none")
        wire.check_plain(self.json["request"], "request")
        return plain.request_from_data(self.json["request"])

    def header(self, request: Request) -> Header:
        """The header in the text, completed from the request and the lines."""
        model = request.model
        header_fields = self.json.get("header", {})
        if not isinstance(header_fields, dict) or "version" in header_fields:
            raise DecodeError("header: expected an object without a version (the first line gives it)")
        unknown = set(header_fields) - {item.name for item in fields(Header)}
        if unknown:
            raise DecodeError(f"header: unknown field {min(unknown)[:40]!r}")
        implied = {
            "ranks": request.cluster.ranks,
            "kinds": list(dict.fromkeys(kind for kind, _ in self.programs)),
            "recipe": "by-hand",
            "seed": 0,
            "home_layout": "attention",
            "layouts": list(self.spans),
            "head_sets": [],
            **{
                name: getattr(model, name)
                for name in ("q_heads", "kv_heads", "head_dim", "dtype", "sent_gradients")
            },
            "v_head_dim": model.value_dim,
            "recurrent": {kind: kind_spec.to_data() for kind, kind_spec in model.recurrent.items()},
            "phases": [phase for phase in PHASES if phase in {phase for _, phase in self.programs}],
        }
        try:
            header = msgspec.convert(implied | header_fields | {"version": self.version}, Header)
        except msgspec.ValidationError as error:
            raise DecodeError(f"header: {error}") from None
        if "diagonals" not in header_fields:
            header = replace(header, diagonals=plain.diagonals_of(request.batch, header.kinds))
        wellformed.check_header(header)
        plain.check_facts(header, request)
        return header

    def program_keys(self, header: Header) -> list[tuple[str, str]]:
        for kind, phase in self.programs:
            if kind not in header.kinds:
                raise DecodeError(f"program {kind} {phase}: the header names no such kind")
        keys = [*product(header.kinds, header.phases)]
        for kind, phase in keys:
            if (kind, phase) not in self.programs:
                raise DecodeError(f"header: kind {kind} has no program {phase}")
        return keys

    def program_set(self, key: tuple[str, str], header: Header) -> ProgramSet:
        found = self.programs[key]
        programs = [found.get(rank) or DraftProgram() for rank in range(header.ranks)]
        tables = {}
        for name, columns in TABLES.items():
            rows = {rank: program.table(name, header) for rank, program in enumerate(programs)}
            tables[name] = _table(rows, columns, header.ranks)
        return ProgramSet(tables)

    def move_pairs(self, header: Header) -> list[tuple[str, str]]:
        listed = self.json.get("moves")
        try:
            pairs = list(self.moves) if listed is None else msgspec.convert(listed, list[tuple[str, str]])
        except msgspec.ValidationError as error:
            raise DecodeError(f"moves: {error}") from None
        if not set(self.moves) <= set(pairs):
            raise DecodeError("moves: the line does not name every move of the ranks")
        plain.check_pairs(pairs, header)
        return pairs

    def report(self) -> dict[str, Any]:
        report = self.json.get("report", {})
        wire.check_plain(report, "report")
        if not isinstance(report, dict):
            raise DecodeError("report: expected an object")
        return report

    def seal(self, plan: Plan) -> Plan:
        """Seals the plan. A text with an id keeps its request exactly; without one, the request gains its defaults."""
        try:
            if self.id is None:
                return codec.seal(plan)
            sealed = codec.encode_sections(plan, request=self.json["request"])
        except (ApportionError, OverflowError) as error:
            raise DecodeError(f"plan: {error}") from None
        if sealed.id.hex() != self.id:
            raise DecodeError(f"id: the text says {self.id}, what it describes has {sealed.id.hex()}")
        return replace(plan, sections=sealed)


def _table(rows_of: Mapping[int, list[Row]], names: tuple[str, ...], ranks: int) -> Table:
    ptr = np.cumsum([0, *(len(rows_of.get(rank, ())) for rank in range(ranks))])
    rows = [row for rank in range(ranks) for row in rows_of.get(rank, ())]
    values = np.array(rows, np.int64).reshape(len(rows), len(names))
    return Table(ptr, names, values.T.copy())
