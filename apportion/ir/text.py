"""Plans as text: one instruction per line, one section per rank; the whole text parses back to an equal plan.

    apportion.plan 1.0
    id 5f0c…                                    computed where it is left out
    header {"home_layout": "attention", …}      JSON, may span lines; what is left out follows from the rest
    request {"batch": …, "cluster": …, "model": …, "policy": …}
    report {…}                                  may be left out

    rank 0
    layout attention: row=0 token=0 length=8 sequence=0 position=0; row=8 …
    move attention -> linear: send 1 row=0 rows=4; receive 1 row=4 rows=4
    program default forward
      arenas KV 8x2, O 8x4                      may be left out: as large as what is used
      operands none, Q.home[0:8), …             only where the order is not that of first use
      launch 0 channel 1 all_to_all: send Q.home[0:8) to 1, receive KV.work[0:8) from 1
      wait 0
      attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) causal first, …
      finish O.home[0:8)

An operand is `tensor.space[row:end)`, then `.h2` for head set 2 and `.c4` for column 4 where these are not 0.
Bounds of a task are `causal`, `full` or `[dmin,dmax]`. `first` (`first_dq`, `first_dkv`) marks what is
overwritten. A column that an instruction has no place for appears as `b=operand` where it is not none; `~5` tells
operand 5 from an equal one before it. Comments run from `#` to the end of the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from apportion.ir import codec, sections, structure, wire
from apportion.ir.errors import ApportionError, ConfigError, DecodeError, VersionError
from apportion.ir.isa import (
    ALL_TO_ALL,
    FORMAT,
    HEADLESS,
    KV_SIDE,
    MOVE_COLUMNS,
    OP_LIST,
    OP_NAMES,
    PHASES,
    SPAN_COLUMNS,
    TABLES,
    TENSOR_NAMES,
    VERSION,
    Op,
    Space,
    Tensor,
)
from apportion.ir.plan import Header, Layout, Move, Plan, ProgramSet, Request, Table

Row = tuple[int, ...]
Operand = tuple[int, int, int, int, int, int]  # tensor, space, row, rows, col, heads

NONE: Operand = (0, 0, 0, 0, 0, 0)
_SPACE_NAMES = MappingProxyType({Space.HOME: "home", Space.WORK: "work"})
_TENSORS = MappingProxyType({name: int(tensor) for tensor, name in TENSOR_NAMES.items()})
_SPACES = MappingProxyType({name: int(space) for space, name in _SPACE_NAMES.items()})
_OPS = MappingProxyType({name: op for op, name in OP_NAMES.items()})


@dataclass(frozen=True)
class _Form:
    """How a row of an op's list is written: `reads -> writes bounds flags`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flags: Mapping[str, int]  # word -> bit of `first`


_FIRST = MappingProxyType({"first": 1})
_FORMS: Mapping[Op, _Form] = MappingProxyType(
    {
        Op.ATTEND: _Form(("q", "kv"), ("o",), _FIRST),
        Op.ATTEND_GRAD: _Form(("q", "kv", "do", "delta"), ("dq", "dkv"), {"first_dq": 1, "first_dkv": 2}),
        Op.DELTA: _Form(("a", "b"), ("c",), _FIRST),
        Op.MERGE: _Form(("a",), ("c",), _FIRST),
        Op.ADD: _Form(("a",), ("c",), _FIRST),
        Op.COPY: _Form(("a",), ("c",), _FIRST),
        Op.CLEAR: _Form((), ("c",), _FIRST),
        Op.PROJECT: _Form(("a",), ("b", "c"), _FIRST),
        Op.PROJECT_GRAD: _Form(("a", "b", "c"), ("d",), _FIRST),
        Op.FINISH: _Form((), ("c",), _FIRST),
    }
)


# ---------------------------------------------------------------------------------------------- print


def format_plan(plan: Plan, rank: int | None = None, around: int | None = None) -> str:
    """The plan as text, or one rank of it. `around`: only the instructions within 2 of this one, numbered.

    Raises ConfigError where the plan has no such rank.
    """
    if rank is None:
        blocks = [_head_lines(plan)]
        blocks += [list(_rank_lines(plan, number, around)) for number in range(plan.header.ranks)]
    elif 0 <= rank < plan.header.ranks:
        blocks = [list(_rank_lines(plan, rank, around))]
    else:
        raise ConfigError("rank", rank, f"the plan has {plan.header.ranks} ranks", "name one from 0 on")
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def format_instruction(program: ProgramSet, index: int) -> str:
    """One instruction of a one-rank program, as its line of text."""
    table = program["instructions"]
    before = slice(0, index)
    name = OP_LIST[Op(int(table["op"][index]))]
    same = [OP_LIST.get(Op(int(op))) == name for op in table["op"][before]]
    start = int(table["count"][before][same].sum())
    return _Writer(program).instruction(index, start)


def excerpt(program: ProgramSet, index: int, context: int = 2) -> str:
    """The numbered lines around an instruction of a one-rank program, with `>` at the instruction."""
    lines = list(_Writer(program).lines())
    shown = range(max(0, index - context), min(len(lines), index + context + 1))
    return "\n".join(f"{'>' if at == index else ' '} {at:4d}  {lines[at]}" for at in shown)


def _head_lines(plan: Plan) -> list[str]:
    sealed: codec.Sections = plan._sealed()
    header = {name: value for name, value in sections.header_data(plan.header).items() if name != "version"}
    lines = [
        "{} {}.{}".format(FORMAT, *plan.header.version),
        f"id {sealed.id.hex()}",
        f"header {_json(header)}",
        f"request {_json(msgspec.msgpack.decode(sealed.request))}",
    ]
    if plan.moves:
        lines.append(f"moves {_json([[move.source, move.target] for move in plan.moves])}")
    if plan.report:
        lines.append(f"report {_json(msgspec.msgpack.decode(sealed.report))}")
    return lines


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _rank_lines(plan: Plan, rank: int, around: int | None) -> Iterator[str]:
    yield f"rank {rank}"
    for name, layout in plan.layouts.items():
        rows = _pairs(layout.spans.rank(rank), SPAN_COLUMNS)
        if rows:
            yield f"layout {_name(name)}: {'; '.join(rows)}"
    for move in plan.moves:
        rows = _move_rows(move.table.rank(rank))
        if rows:
            yield f"move {_name(move.source)} -> {_name(move.target)}: {'; '.join(rows)}"
    for (kind, phase), programs in plan.programs.items():
        yield f"program {_name(kind)} {phase}"
        program = programs.rank(rank)
        if around is None:
            yield from ("  " + line for line in _program_lines(program))
        elif len(program["instructions"]):
            yield excerpt(program, around)


def _program_lines(program: ProgramSet) -> list[str]:
    writer = _Writer(program)
    lines = list(writer.lines())
    if writer.used != writer.operands or len(set(writer.operands)) < len(writer.operands):
        lines.insert(0, ("operands " + ", ".join(map(_operand, writer.operands))).rstrip())
    return [_arena_line(program["arenas"]), *lines]


def _arena_line(table: Table) -> str:
    rows = [f"{TENSOR_NAMES[Tensor(t)]} {rows}x{heads}" for t, rows, heads in _rows(table, TABLES["arenas"])]
    return ("arenas " + ", ".join(rows)).rstrip()


def _rows(table: Table, names: tuple[str, ...]) -> list[Row]:
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def _pairs(table: Table, names: tuple[str, ...]) -> list[str]:
    return [" ".join(f"{n}={v}" for n, v in zip(names, row, strict=True)) for row in _rows(table, names)]


def _move_rows(table: Table) -> list[str]:
    return [
        f"{'send' if send else 'receive'} {peer} row={row} rows={rows}"
        for send, peer, row, rows in _rows(table, MOVE_COLUMNS)
    ]


def _name(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else json.dumps(name)


def _operand(operand: Operand) -> str:
    if operand == NONE:
        return "none"
    tensor, space, row, rows, col, heads = operand
    text = f"{TENSOR_NAMES[Tensor(tensor)]}.{_SPACE_NAMES[Space(space)]}[{row}:{row + rows})"
    return text + (f".h{heads}" if heads else "") + (f".c{col}" if col else "")


def _bounds(dmin: int, dmax: int, q_rows: int, kv_rows: int) -> str:
    if dmax == q_rows - 1 and dmin in (0, 1 - kv_rows):
        return "causal" if dmin == 0 else "full"
    return f"[{dmin},{dmax}]"


class _Writer:
    """Prints the instructions of a one-rank program, noting operands in order of first use."""

    def __init__(self, program: ProgramSet) -> None:
        self.instructions = _rows(program["instructions"], TABLES["instructions"])
        self.lists = {name: _rows(program[name], TABLES[name]) for name in structure.OPERAND_COLUMNS}
        self.operands: list[Operand] = _rows(program["operands"], TABLES["operands"])  # type: ignore[assignment]
        self.place = {operand: i for i, operand in reversed(list(enumerate(self.operands)))}
        self.used: list[Operand] = [NONE]
        self._seen = {0}

    def lines(self) -> Iterator[str]:
        start = dict.fromkeys(self.lists, 0)
        for index, (op, *_, count) in enumerate(self.instructions):
            name = OP_LIST[Op(op)]
            yield self.instruction(index, start[name] if name else 0)
            if name:
                start[name] += count

    def instruction(self, index: int, start: int) -> str:
        """The line of an instruction whose list rows begin at `start`."""
        number, round, channel, mode, count = self.instructions[index]
        op = Op(number)
        name = OP_LIST[op]
        rows = self.lists[name][start : start + count] if name else []
        if op is Op.LAUNCH:
            words = f"launch {round}" + (f" channel {channel}" if channel else "")
            words += " all_to_all" if mode == ALL_TO_ALL else ""
            return f"{words}: {', '.join(map(self.transfer, rows))}" if rows else words
        if op is Op.WAIT:
            return f"wait {round}"
        return f"{OP_NAMES[op]} {', '.join(self.row(op, row) for row in rows)}".rstrip()

    def transfer(self, row: Row) -> str:
        send, peer, operand = row
        return f"send {self.name(operand)} to {peer}" if send else f"receive {self.name(operand)} from {peer}"

    def row(self, op: Op, row: Row) -> str:
        form, columns = _FORMS[op], structure.OPERAND_COLUMNS[OP_LIST[op] or ""]
        value = dict(zip(TABLES[OP_LIST[op] or ""], row, strict=True))
        words = [self.name(value[slot]) for slot in form.reads]
        words += ["->"] if form.reads else []
        words += [self.name(value[slot]) for slot in form.writes]
        if "dmin" in value:
            q, kv = self.operands[value["q"]], self.operands[value["kv"]]
            words.append(_bounds(value["dmin"], value["dmax"], q[3], kv[3]))
        words += [word for word, bit in form.flags.items() if value["first"] & bit]
        stray = [slot for slot in columns if value[slot] and slot not in form.reads + form.writes]
        return " ".join(words + [f"{slot}={self.name(value[slot])}" for slot in stray])

    def name(self, index: int) -> str:
        operand = self.operands[index]
        if index not in self._seen:
            self._seen.add(index)
            self.used.append(operand)
        return _operand(operand) + ("" if self.place[operand] == index else f"~{index}")


# ---------------------------------------------------------------------------------------------- parse

_INT = r"(\d{1,15})"
_NAME = r'("(?:[^"\\]|\\.)*"|[\w.-]+)'
_OPERAND = re.compile(
    rf"(\w+)\.(home|work)\[{_INT}:{_INT}\)(?:\.h{_INT})?(?:\.c{_INT})?(?:~{_INT})?", re.ASCII
)
_BOUNDS = re.compile(r"\[(-?\d{1,15}),(-?\d{1,15})\]", re.ASCII)
_COMMAS = re.compile(r",(?![^\[\]()]*\])")  # commas outside of [dmin,dmax]
_TRANSFER = re.compile(rf"(send|receive)\s+(\S+)\s+(to|from)\s+{_INT}", re.ASCII)
_LAUNCH = re.compile(rf"{_INT}(?:\s+channel\s+{_INT})?(\s+all_to_all)?\s*(?::(.*))?", re.ASCII)
_ARENA = re.compile(rf"(\w+)\s+{_INT}x{_INT}", re.ASCII)
_MOVE_ROW = re.compile(rf"(send|receive)\s+{_INT}\s+row={_INT}\s+rows={_INT}", re.ASCII)
_LAYOUT = re.compile(rf"{_NAME}\s*:(.*)", re.ASCII)
_MOVE = re.compile(rf"{_NAME}\s*->\s*{_NAME}\s*:(.*)", re.ASCII)
_PROGRAM = re.compile(rf"{_NAME}\s+(\w+)", re.ASCII)
_SPAN = re.compile(r"\s+".join(f"{name}={_INT}" for name in SPAN_COLUMNS), re.ASCII)
_COMMENT = re.compile(r"(^|\s)#.*")


class _Program:
    """A one-rank program while it is read."""

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
    """Arenas that hold every work operand. Tensors without heads take one column."""
    most: dict[int, tuple[int, int]] = {}
    for tensor, space, row, rows, col, heads in operands:
        if space == Space.WORK:
            old = most.get(tensor, (0, 0))
            most[tensor] = max(old[0], row + rows), max(old[1], col + _head_count(tensor, heads, header))
    return [(tensor, *most[tensor]) for tensor in sorted(most)]


def _head_count(tensor: int, heads: int, header: Header) -> int:
    if tensor in HEADLESS:
        return 1
    if heads == 0:
        return header.kv_heads if tensor in KV_SIDE else header.q_heads
    return len(header.head_sets[heads - 1]) if heads <= len(header.head_sets) else 0


def parse(text: str) -> Plan:
    """The plan that `text` describes, sealed. Raises DecodeError with the number of the line.

    May be left out of hand-written text: `id` and `report` (computed, empty), header fields (from the request and
    the lines), `operands` (order of first use) and `arenas` (largest extents used).
    """
    reader = _Reader(text)
    reader.read()
    return reader.plan()


class _Reader:
    """Reads line by line; each first word has its method."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = 0
        self.json: dict[str, Any] = {}
        self.id: str | None = None
        self.rank = -1
        self.spans: dict[str, dict[int, list[Row]]] = {}
        self.moves: dict[tuple[str, str], dict[int, list[Row]]] = {}
        self.programs: dict[tuple[str, str], dict[int, _Program]] = {}
        self.ranks: set[int] = set()
        self.program: _Program | None = None
        self.words: dict[str, Callable[[str], None]] = {
            "id": self.read_id,
            "rank": self.read_rank,
            "layout": self.read_layout,
            "move": self.read_move,
            "program": self.read_program,
            "arenas": self.read_arenas,
            "operands": self.read_operands,
            "launch": self.read_launch,
            "wait": self.read_wait,
        }

    def fail(self, message: str) -> DecodeError:
        return DecodeError(f"line {self.number}: {message}")

    def match(self, pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
        found = pattern.fullmatch(text.strip())
        if not found:
            raise self.fail(f"expected {expected}, found {text.strip()[:80]!r}")
        return found

    def read(self) -> None:
        at, first = 0, True
        while at < len(self.text):
            end = self.text.find("\n", at)
            end = len(self.text) if end < 0 else end
            self.number += 1
            line = _COMMENT.sub("", self.text[at:end]).strip()
            word, _, rest = line.partition(" ")
            if word in ("header", "request", "report", "moves") and not first:
                end = self.read_json(word, self.text.index(word, at) + len(word))
            elif line and first:
                self.read_version(line)
                first = False
            elif line:
                self.read_line(word, rest.strip())
            at = end + 1
        if first:
            raise DecodeError(f"line 1: expected '{FORMAT} {VERSION[0]}.{VERSION[1]}', found nothing")

    def read_version(self, line: str) -> None:
        found = self.match(re.compile(rf"{re.escape(FORMAT)} {_INT}\.{_INT}"), line, f"'{FORMAT} 1.0'")
        version = int(found[1]), int(found[2])
        if version[0] != VERSION[0]:
            raise VersionError(
                f"plan of format version {version[0]}.{version[1]}; this release reads {VERSION[0]}.x"
            )
        if version != VERSION:
            raise self.fail(f"this release reads texts of version {VERSION[0]}.{VERSION[1]}")

    def read_json(self, word: str, at: int) -> int:
        """Reads the value after `word`, which may span lines; returns the end of its last line."""
        if word in self.json:
            raise self.fail(f"a second {word}")
        try:
            at = len(self.text) - len(self.text[at:].lstrip())
            self.json[word], stop = _JSON.raw_decode(self.text, at)
        except (ValueError, RecursionError) as error:
            raise self.fail(f"{word}: {error}") from None
        end = self.text.find("\n", stop)
        end = len(self.text) if end < 0 else end
        if _COMMENT.sub("", self.text[stop:end]).strip():
            raise self.fail(f"{word}: more text after its value")
        self.number += self.text.count("\n", at, stop)
        return end

    def read_line(self, word: str, rest: str) -> None:
        if word in self.words:
            self.words[word](rest)
        elif word in _OPS:
            self.read_instruction(_OPS[word], rest)
        else:
            known = ", ".join([*self.words, *(name for name in _OPS if name not in self.words)])
            raise self.fail(f"unknown word {word[:40]!r}; known are header, request, report, moves, {known}")

    def read_id(self, rest: str) -> None:
        self.id = self.match(re.compile("[0-9a-f]{64}"), rest, "64 hexadecimal digits")[0]

    def read_rank(self, rest: str) -> None:
        self.rank = int(self.match(re.compile(_INT, re.ASCII), rest, "a rank")[1])
        if self.rank in self.ranks:
            raise self.fail(f"a second section of rank {self.rank}")
        self.ranks.add(self.rank)
        self.program = None

    def in_rank(self) -> int:
        if self.rank < 0:
            raise self.fail("stands before the first 'rank' line")
        return self.rank

    def read_layout(self, rest: str) -> None:
        found = self.match(_LAYOUT, rest, "'layout name: row=… token=… length=… sequence=… position=…; …'")
        expected = " ".join(f"{name}=…" for name in SPAN_COLUMNS)
        rows = [tuple(map(int, self.match(_SPAN, row, expected).groups())) for row in _split(found[2], ";")]
        self.spans.setdefault(self.unquote(found[1]), {}).setdefault(self.in_rank(), []).extend(rows)

    def read_move(self, rest: str) -> None:
        found = self.match(_MOVE, rest, "'move source -> target: send peer row=… rows=…; …'")
        rows = []
        for row in _split(found[3], ";"):
            way, *numbers = self.match(_MOVE_ROW, row, "'send|receive peer row=… rows=…'").groups()
            rows.append((int(way == "send"), *map(int, numbers)))
        pair = self.unquote(found[1]), self.unquote(found[2])
        self.moves.setdefault(pair, {}).setdefault(self.in_rank(), []).extend(rows)

    def unquote(self, name: str) -> str:
        try:
            return str(json.loads(name)) if name.startswith('"') else name
        except ValueError as error:
            raise self.fail(f"name {name[:40]}: {error}") from None

    def read_program(self, rest: str) -> None:
        found = self.match(_PROGRAM, rest, "'program kind phase'")
        if found[2] not in PHASES:
            raise self.fail(f"unknown phase {found[2][:40]!r}; known are {', '.join(PHASES)}")
        programs = self.programs.setdefault((self.unquote(found[1]), found[2]), {})
        if self.in_rank() in programs:
            raise self.fail(f"a second program {rest} of rank {self.rank}")
        self.program = programs[self.rank] = _Program()

    def in_program(self) -> _Program:
        if self.program is None:
            raise self.fail("stands before the rank's first 'program' line")
        return self.program

    def read_arenas(self, rest: str) -> None:
        found = [
            self.match(_ARENA, item, "'tensor rows x heads', as in 'KV 8x2'") for item in _split(rest, ",")
        ]
        self.in_program().arenas = [(self.tensor(item[1]), int(item[2]), int(item[3])) for item in found]

    def tensor(self, name: str) -> int:
        if name not in _TENSORS or name == "none":
            raise self.fail(f"unknown tensor {name[:40]!r}; known are {', '.join(_TENSORS)}")
        return _TENSORS[name]

    def read_operands(self, rest: str) -> None:
        program = self.in_program()
        if any(program.rows.values()):
            raise self.fail("operands must stand before the first instruction")
        program.set_operands([self.operand(item.strip())[0] for item in _split(rest, ",")])

    def operand(self, text: str) -> tuple[Operand, int | None]:
        """The operand and, after `~`, its index."""
        if text == "none":
            return NONE, None
        found = self.match(_OPERAND, text, "an operand, as in 'KV.work[0:8)'")
        space, row, end, heads, col, index = found.groups()[1:]
        rows = int(end) - int(row)
        if rows <= 0:
            raise self.fail(f"operand {text} has no rows")
        operand = (self.tensor(found[1]), _SPACES[space], int(row), rows, int(col or 0), int(heads or 0))
        return operand, None if index is None else int(index)

    def index(self, text: str) -> int:
        operand, index = self.operand(text)
        program = self.in_program()
        if index is None:
            return program.index(operand)
        if index >= len(program.operands) or program.operands[index] != operand:
            raise self.fail(f"operand {text} is not at {index} of the operands line")
        return index

    def add(self, op: Op, round: int, channel: int, mode: int, rows: list[Row]) -> None:
        program, name = self.in_program(), OP_LIST[op]
        program.rows["instructions"].append((int(op), round, channel, mode, len(rows)))
        if name:
            program.rows[name].extend(rows)

    def read_launch(self, rest: str) -> None:
        found = self.match(
            _LAUNCH, rest, "'launch round: send operand to peer, receive operand from peer, …'"
        )
        rows: list[Row] = []
        for item in _split(found[4] or "", ","):
            way, operand, word, peer = self.match(
                _TRANSFER, item, "'send … to …' or 'receive … from …'"
            ).groups()
            if (way == "send") != (word == "to"):
                raise self.fail("write 'send … to …' and 'receive … from …'")
            rows.append((int(way == "send"), int(peer), self.index(operand)))
        self.add(Op.LAUNCH, int(found[1]), int(found[2] or 0), ALL_TO_ALL if found[3] else 0, rows)

    def read_wait(self, rest: str) -> None:
        self.add(Op.WAIT, int(self.match(re.compile(_INT, re.ASCII), rest, "'wait round'")[1]), 0, 0, [])

    def read_instruction(self, op: Op, rest: str) -> None:
        self.add(op, 0, 0, 0, [self.row(op, item) for item in _split(rest, ",")])

    def row(self, op: Op, text: str) -> Row:
        form, columns = _FORMS[op], TABLES[OP_LIST[op] or ""]
        words = re.sub(r"\[\s*(-?\d+)\s*,\s*(-?\d+)\s*\]", r"[\1,\2]", text).split()
        expected = [*form.reads, *(["->"] if form.reads else []), *form.writes]
        if len(words) < len(expected) or (form.reads and words[len(form.reads)] != "->"):
            raise self.fail(f"expected '{OP_NAMES[op]} {' '.join(expected)} …', found {text.strip()[:80]!r}")
        value = dict.fromkeys(columns, 0)
        for slot, word in zip(expected, words, strict=False):
            if slot != "->":
                value[slot] = self.index(word)
        rest = words[len(expected) :]
        if "dmin" in value:
            value["dmin"], value["dmax"] = self.bounds(rest.pop(0) if rest else "", value)
        for word in rest:
            self.extra(op, form, value, word)
        return tuple(value.values())

    def bounds(self, word: str, value: Mapping[str, int]) -> tuple[int, int]:
        operands = self.in_program().operands
        q_rows, kv_rows = operands[value["q"]][3], operands[value["kv"]][3]
        if word in ("causal", "full"):
            return (0 if word == "causal" else 1 - kv_rows), q_rows - 1
        found = self.match(_BOUNDS, word, "'causal', 'full' or '[dmin,dmax]'")
        return int(found[1]), int(found[2])

    def extra(self, op: Op, form: _Form, value: dict[str, int], word: str) -> None:
        """A flag, or an operand in a column that the op has no place for."""
        slot, equals, operand = word.partition("=")
        if word in form.flags:
            value["first"] |= form.flags[word]
        elif equals and slot in structure.OPERAND_COLUMNS[OP_LIST[op] or ""]:
            value[slot] = self.index(operand)
        else:
            raise self.fail(f"{OP_NAMES[op]}: unexpected {word[:40]!r}; flags are {', '.join(form.flags)}")

    # ------------------------------------------------------------------------------------------ assemble

    def plan(self) -> Plan:
        request = self.request()
        header = self.header(request)
        ranks = header.ranks
        if self.ranks and max(self.ranks) >= ranks:
            raise DecodeError(f"rank {max(self.ranks)}: the plan has {ranks} ranks")
        layouts = {
            name: Layout(name, _table(self.spans.get(name, {}), SPAN_COLUMNS, ranks))
            for name in header.layouts
        }
        programs = {key: self.program_set(key, header) for key in self.program_keys(header)}
        moves = tuple(
            Move(*pair, _table(self.moves.get(pair, {}), MOVE_COLUMNS, ranks))
            for pair in self.move_pairs(header)
        )
        structure.check(
            header,
            dict.fromkeys(header.layouts, request.batch.tokens),
            {name: layout.spans for name, layout in layouts.items()},
            {key: program.tables for key, program in programs.items()},
            {(move.source, move.target): move.table for move in moves},
        )
        return self.seal(Plan(header, request, layouts, programs, moves, self.report()))

    def request(self) -> Request:
        if "request" not in self.json:
            raise DecodeError("request: the text has none")
        wire.check_plain(self.json["request"], "request")
        return sections.request_from_data(self.json["request"])

    def header(self, request: Request) -> Header:
        """The header as written, completed from the request and the lines read."""
        model = request.model
        given = self.json.get("header", {})
        if not isinstance(given, dict) or "version" in given:
            raise DecodeError("header: expected an object without a version (the first line gives it)")
        unknown = set(given) - {item.name for item in fields(Header)}
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
            "q_heads": model.q_heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "v_head_dim": model.head_dim if model.v_head_dim is None else model.v_head_dim,
            "dtype": model.dtype,
        }
        try:
            header = msgspec.convert(implied | given | {"version": VERSION}, Header)
        except msgspec.ValidationError as error:
            raise DecodeError(f"header: {error}") from None
        structure.check_header(header)
        sections.check_facts(header, request)
        return header

    def program_keys(self, header: Header) -> list[tuple[str, str]]:
        for kind, phase in self.programs:
            if kind not in header.kinds:
                raise DecodeError(f"program {kind} {phase}: the header names no such kind")
        for kind in header.kinds:
            if not any((kind, phase) in self.programs for phase in PHASES):
                raise DecodeError(f"header: kind {kind} has no program")
        return [(kind, phase) for kind in header.kinds for phase in PHASES if (kind, phase) in self.programs]

    def program_set(self, key: tuple[str, str], header: Header) -> ProgramSet:
        found = self.programs[key]
        programs = [found.get(rank) or _Program() for rank in range(header.ranks)]
        return ProgramSet(
            {
                name: _table(
                    {rank: program.table(name, header) for rank, program in enumerate(programs)},
                    columns,
                    header.ranks,
                )
                for name, columns in TABLES.items()
            }
        )

    def move_pairs(self, header: Header) -> list[tuple[str, str]]:
        given = self.json.get("moves")
        try:
            pairs = list(self.moves) if given is None else msgspec.convert(given, list[tuple[str, str]])
        except msgspec.ValidationError as error:
            raise DecodeError(f"moves: {error}") from None
        if not set(self.moves) <= set(pairs):
            raise DecodeError("moves: the line does not name every move of the ranks")
        sections.check_pairs(pairs, header)
        return pairs

    def report(self) -> dict[str, Any]:
        report = self.json.get("report", {})
        wire.check_plain(report, "report")
        if not isinstance(report, dict):
            raise DecodeError("report: expected an object")
        return report

    def seal(self, plan: Plan) -> Plan:
        """Text with an id is kept to the letter; in text without one the request gains its defaults."""
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
    columns = np.array(rows, np.int64).reshape(len(rows), len(names)).T
    return Table(
        ptr, {name: np.ascontiguousarray(column) for name, column in zip(names, columns, strict=True)}
    )


def _split(text: str, separator: str) -> list[str]:
    if not text.strip():
        return []
    return _COMMAS.split(text) if separator == "," else text.split(separator)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key appears twice")
    return value


def _finite(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite)
