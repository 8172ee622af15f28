"""Parses the text format of `ir.text` into plans, for tests; each line is parsed by its first word."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from apportion import DecodeError, Plan, VersionError
from apportion.ir import isa
from apportion.ir.isa import OP_NAMES, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES, Op
from apportion.ir.tensors import PHASES, TENSOR_NAMES
from apportion.ir.text.words import FORMS, NONE, SPACE_NAMES, Form, Operand, Row
from tests.support.text_draft import DraftProgram, TextDraft

FORMAT, VERSION = isa.FORMAT, isa.VERSION
TENSORS = {name: int(tensor) for tensor, name in TENSOR_NAMES.items()}
SPACES = {name: int(space) for space, name in SPACE_NAMES.items()}
OPS = {name: op for op, name in OP_NAMES.items()}

_INT = r"(\d{1,15})"
_NAME = r'("(?:[^"\\]|\\.)*"|[\w.-]+)'
_OPERAND = re.compile(
    rf"(\w+)\.(home|work)\[{_INT}:{_INT}\)(?:\.h{_INT})?(?:\.c{_INT})?(?:~{_INT})?", re.ASCII
)
_BOUNDS = re.compile(r"\[(-?\d{1,15}),(-?\d{1,15})\]", re.ASCII)
_COMMAS = re.compile(r",(?![^\[\]()]*\])")  # commas outside of [dmin,dmax]
_TRANSFER = re.compile(rf"(send|receive)\s+(\S+)\s+(to|from)\s+{_INT}", re.ASCII)
_LAUNCH = re.compile(rf"{_INT}(?:\s+channel\s+{_INT})?(\s+all_to_all)?(\s+results)?\s*(?::(.*))?", re.ASCII)
_ARENA = re.compile(rf"(\w+)\s+{_INT}x{_INT}", re.ASCII)
_MOVE_ROW = re.compile(rf"(send|receive)\s+{_INT}\s+row={_INT}\s+rows={_INT}", re.ASCII)
_LAYOUT = re.compile(rf"{_NAME}\s*:(.*)", re.ASCII)
_MOVE = re.compile(rf"{_NAME}\s*->\s*{_NAME}\s*:(.*)", re.ASCII)
_PROGRAM = re.compile(rf"{_NAME}\s+(\w+)", re.ASCII)
_SPAN = re.compile(r"\s+".join(f"{name}={_INT}" for name in SPAN_COLUMNS), re.ASCII)
_RECURRENT = re.compile(rf"({'|'.join(RECURRENCE_TABLES)})\s*:(.*)", re.ASCII)
_RECURRENT_ROWS = {
    name: re.compile(r"\s+".join(rf"{column}=(-?\d{{1,15}})" for column in columns), re.ASCII)
    for name, columns in RECURRENCE_TABLES.items()
}
_COMMENT = re.compile(r"(^|\s)#.*")


def parse(text: str) -> Plan:
    """The sealed plan that `text` describes. Raises DecodeError with the line number.

    Optional in hand-written text, with their defaults: `id` (computed), `report` (empty), header fields (from the
    request and the lines), `operands` (in order of first use) and `arenas` (largest extents in use).
    """
    reader = _Reader(text)
    reader.read()
    return reader.draft.plan()


class _Reader:
    """Reads line by line, with one method per first word."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = 0
        self.draft = TextDraft()
        self.rank = -1
        self.program: DraftProgram | None = None
        names = (
            "id",
            "rank",
            "layout",
            "move",
            "recurrent",
            "program",
            "arenas",
            "operands",
            "launch",
            "wait",
        )
        self.words: dict[str, Callable[[str], None]] = {name: getattr(self, f"read_{name}") for name in names}

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
        expected = f"'{FORMAT} {VERSION[0]}.{VERSION[1]}'"
        found = self.match(re.compile(rf"{re.escape(FORMAT)} {_INT}\.{_INT}"), line, expected)
        version = int(found[1]), int(found[2])
        if version[0] != VERSION[0]:
            what = f"plan of format version {version[0]}.{version[1]}"
            raise VersionError(f"{what}; this release reads {VERSION[0]}.x")
        if version > VERSION:
            raise self.fail(f"this release reads texts up to version {VERSION[0]}.{VERSION[1]}")
        self.draft.version = version

    def read_json(self, word: str, at: int) -> int:
        """Reads the JSON value after `word`, which may span lines; returns the end of its last line."""
        if word in self.draft.json:
            raise self.fail(f"a second {word}")
        try:
            at = len(self.text) - len(self.text[at:].lstrip())
            self.draft.json[word], stop = _JSON.raw_decode(self.text, at)
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
        elif word in OPS:
            self.read_instruction(OPS[word], rest)
        else:
            known = ", ".join([*self.words, *(name for name in OPS if name not in self.words)])
            raise self.fail(f"unknown word {word[:40]!r}; known are header, request, report, moves, {known}")

    def read_id(self, rest: str) -> None:
        self.draft.id = self.match(re.compile("[0-9a-f]{64}"), rest, "64 hexadecimal digits")[0]

    def read_rank(self, rest: str) -> None:
        self.rank = int(self.match(re.compile(_INT, re.ASCII), rest, "a rank")[1])
        if self.rank in self.draft.ranks:
            raise self.fail(f"a second section of rank {self.rank}")
        self.draft.ranks.add(self.rank)
        self.program = None

    def in_rank(self) -> int:
        if self.rank < 0:
            raise self.fail("stands before the first 'rank' line")
        return self.rank

    def read_layout(self, rest: str) -> None:
        found = self.match(_LAYOUT, rest, "'layout name: row=… token=… length=… sequence=… position=…; …'")
        expected = " ".join(f"{name}=…" for name in SPAN_COLUMNS)
        rows = [tuple(map(int, self.match(_SPAN, row, expected).groups())) for row in _split(found[2], ";")]
        self.draft.spans.setdefault(self.unquote(found[1]), {}).setdefault(self.in_rank(), []).extend(rows)

    def read_move(self, rest: str) -> None:
        found = self.match(_MOVE, rest, "'move source -> target: send peer row=… rows=…; …'")
        rows = []
        for row in _split(found[3], ";"):
            direction, *numbers = self.match(_MOVE_ROW, row, "'send|receive peer row=… rows=…'").groups()
            rows.append((int(direction == "send"), *map(int, numbers)))
        pair = self.unquote(found[1]), self.unquote(found[2])
        self.draft.moves.setdefault(pair, {}).setdefault(self.in_rank(), []).extend(rows)

    def read_recurrent(self, rest: str) -> None:
        found = self.match(_RECURRENT, rest, "'recurrent table: column=… column=…; …'")
        pattern = _RECURRENT_ROWS[found[1]]
        expected = " ".join(f"{one}=…" for one in RECURRENCE_TABLES[found[1]])
        rows = [tuple(map(int, self.match(pattern, row, expected).groups())) for row in _split(found[2], ";")]
        self.draft.recurrent[found[1]].setdefault(self.in_rank(), []).extend(rows)

    def unquote(self, name: str) -> str:
        try:
            return str(json.loads(name)) if name.startswith('"') else name
        except ValueError as error:
            raise self.fail(f"name {name[:40]}: {error}") from None

    def read_program(self, rest: str) -> None:
        found = self.match(_PROGRAM, rest, "'program kind phase'")
        if found[2] not in PHASES:
            raise self.fail(f"unknown phase {found[2][:40]!r}; known are {', '.join(PHASES)}")
        programs = self.draft.programs.setdefault((self.unquote(found[1]), found[2]), {})
        if self.in_rank() in programs:
            raise self.fail(f"a second program {rest} of rank {self.rank}")
        self.program = programs[self.rank] = DraftProgram()

    def in_program(self) -> DraftProgram:
        if self.program is None:
            raise self.fail("stands before the rank's first 'program' line")
        return self.program

    def read_arenas(self, rest: str) -> None:
        expected = "'tensor rows x heads', as in 'KV 8x2'"
        found = [self.match(_ARENA, item, expected) for item in _split(rest, ",")]
        self.in_program().arenas = [(self.tensor(item[1]), int(item[2]), int(item[3])) for item in found]

    def tensor(self, name: str) -> int:
        if name not in TENSORS or name == "none":
            raise self.fail(f"unknown tensor {name[:40]!r}; known are {', '.join(TENSORS)}")
        return TENSORS[name]

    def read_operands(self, rest: str) -> None:
        program = self.in_program()
        if any(program.rows.values()):
            raise self.fail("operands must stand before the first instruction")
        program.set_operands([self.operand(item.strip())[0] for item in _split(rest, ",")])

    def operand(self, text: str) -> tuple[Operand, int | None]:
        """The operand, and its index if `~` and an index follow it."""
        if text == "none":
            return NONE, None
        found = self.match(_OPERAND, text, "an operand, as in 'KV.work[0:8)'")
        space, row, end, heads, col, index = found.groups()[1:]
        rows = int(end) - int(row)
        if rows <= 0:
            raise self.fail(f"operand {text} has no rows")
        operand = (self.tensor(found[1]), SPACES[space], int(row), rows, int(col or 0), int(heads or 0))
        return operand, None if index is None else int(index)

    def index(self, text: str) -> int:
        operand, index = self.operand(text)
        program = self.in_program()
        if index is None:
            return program.index(operand)
        if index >= len(program.operands) or program.operands[index] != operand:
            raise self.fail(f"operand {text} is not at index {index} of the operands line")
        return index

    def add(self, op: Op, round: int, channel: int, mode: int, rows: list[Row]) -> None:
        program, name = self.in_program(), op.rule.list
        program.rows["instructions"].append((int(op), round, channel, mode, len(rows)))
        if name:
            program.rows[name].extend(rows)

    def read_launch(self, rest: str) -> None:
        expected = "'launch round: send operand to peer, receive operand from peer, …'"
        found = self.match(_LAUNCH, rest, expected)
        rows: list[Row] = []
        for item in _split(found[5] or "", ","):
            transfer = self.match(_TRANSFER, item, "'send … to …' or 'receive … from …'")
            direction, operand, word, peer = transfer.groups()
            if (direction == "send") != (word == "to"):
                raise self.fail("write 'send … to …' and 'receive … from …'")
            rows.append((int(direction == "send"), int(peer), self.index(operand)))
        mode = isa.ALL_TO_ALL * bool(found[3]) | isa.RESULTS * bool(found[4])
        self.add(Op.LAUNCH, int(found[1]), int(found[2] or 0), mode, rows)

    def read_wait(self, rest: str) -> None:
        self.add(Op.WAIT, int(self.match(re.compile(_INT, re.ASCII), rest, "'wait round'")[1]), 0, 0, [])

    def read_instruction(self, op: Op, rest: str) -> None:
        self.add(op, 0, 0, 0, [self.row(op, item) for item in _split(rest, ",")])

    def row(self, op: Op, text: str) -> Row:
        form, columns = FORMS[op], TABLES[op.rule.list or ""]
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

    def extra(self, op: Op, form: Form, value: dict[str, int], word: str) -> None:
        """Reads a flag, or an operand for a column that the op does not use."""
        slot, equals, operand = word.partition("=")
        if word in form.flags:
            value["first"] |= form.flags[word]
        elif equals and slot in op.rule.columns:
            value[slot] = self.index(operand)
        else:
            raise self.fail(f"{OP_NAMES[op]}: unexpected {word[:40]!r}; flags are {', '.join(form.flags)}")


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
