"""Formats plans and single instructions as text, in the form of `ir.text`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from apportion.ir.isa import (
    ALL_TO_ALL,
    FORMAT,
    MOVE_COLUMNS,
    OP_NAMES,
    OPERAND_COLUMNS,
    RESULTS,
    SPAN_COLUMNS,
    TABLES,
    Op,
)
from apportion.ir.plan import plain
from apportion.ir.plan.ops import starts_of
from apportion.ir.plan.tables import PlanTables, ProgramSet, Table, checked_rank
from apportion.ir.tensors import TENSOR_NAMES, Space, Tensor
from apportion.ir.text.words import FORMS, NONE, SPACE_NAMES, Operand, Row


def format_plan(plan: PlanTables, id: bytes, request: Any, report: Any, rank: int | None = None) -> str:
    """Formats the plan, or one rank of it. id, request, report: of the encoded plan, the latter two as plain data.

    Raises ConfigError if the plan has no such rank.
    """
    if rank is None:
        blocks = [_head_lines(plan, id, request, report)]
        blocks += [list(_rank_lines(plan, number)) for number in range(plan.header.ranks)]
    else:
        blocks = [list(_rank_lines(plan, checked_rank(rank, plan.header.ranks)))]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def format_instruction(program: ProgramSet, index: int) -> str:
    """Formats one instruction of a one-rank program as a line of text."""
    table = program["instructions"]
    start = int(starts_of(table.wide("op"), table.wide("count"))[index])
    return _Writer(program).instruction(index, start)


def instruction_lines(program: ProgramSet) -> list[str]:
    """Formats the instructions of a one-rank program, one line each."""
    return list(_Writer(program).lines())


def excerpt(program: ProgramSet, index: int, context: int = 2) -> str:
    """Numbered lines around an instruction of a one-rank program, marked with `>`."""
    lines = instruction_lines(program)
    indexes = range(max(0, index - context), min(len(lines), index + context + 1))
    return "\n".join(f"{'>' if number == index else ' '} {number:4d}  {lines[number]}" for number in indexes)


def _head_lines(plan: PlanTables, id: bytes, request: Any, report: Any) -> list[str]:
    header = {name: value for name, value in plain.header_data(plan.header).items() if name != "version"}
    lines = [
        "{} {}.{}".format(FORMAT, *plan.header.version),
        f"id {id.hex()}",
        f"header {_json(header)}",
        f"request {_json(request)}",
    ]
    if plan.moves:
        lines.append(f"moves {_json([[move.source, move.target] for move in plan.moves])}")
    if report:
        lines.append(f"report {_json(report)}")
    return lines


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _rank_lines(plan: PlanTables, rank: int) -> Iterator[str]:
    yield f"rank {rank}"
    for name, layout in plan.layouts.items():
        rows = _pairs(layout.spans.rank(rank), SPAN_COLUMNS)
        if rows:
            yield f"layout {_name(name)}: {'; '.join(rows)}"
    for move in plan.moves:
        rows = _move_rows(move.table.rank(rank))
        if rows:
            yield f"move {_name(move.source)} -> {_name(move.target)}: {'; '.join(rows)}"
    for name, table in ({} if plan.recurrence is None else plan.recurrence.rank(rank).tables).items():
        if len(table):
            yield f"recurrent {name}: {'; '.join(_pairs(table, table.names))}"
    for (kind, phase), programs in plan.programs.items():
        yield f"program {_name(kind)} {phase}"
        yield from ("  " + line for line in _program_lines(programs.rank(rank)))


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
    """The name, quoted if it contains anything but letters, digits, '_', '.' and '-'."""
    plain = re.fullmatch(r"[\w.-]+", name, re.ASCII)
    return name if plain else json.dumps(name).replace("#", "\\u0023")  # a name must not start a comment


def _operand(operand: Operand) -> str:
    if operand == NONE:
        return "none"
    tensor, space, row, rows, col, heads = operand
    text = f"{TENSOR_NAMES[Tensor(tensor)]}.{SPACE_NAMES[Space(space)]}[{row}:{row + rows})"
    return text + (f".h{heads}" if heads else "") + (f".c{col}" if col else "")


def _bounds(dmin: int, dmax: int, q_rows: int, kv_rows: int) -> str:
    if dmax == q_rows - 1 and dmin in (0, 1 - kv_rows):
        return "causal" if dmin == 0 else "full"
    return f"[{dmin},{dmax}]"


class _Writer:
    """Formats the instructions of a one-rank program and records operands in order of first use."""

    def __init__(self, program: ProgramSet) -> None:
        self.instructions = _rows(program["instructions"], TABLES["instructions"])
        self.lists = {name: _rows(program[name], TABLES[name]) for name in OPERAND_COLUMNS}
        self.operands: list[Operand] = _rows(program["operands"], TABLES["operands"])  # type: ignore[assignment]
        self.place = {operand: i for i, operand in reversed(list(enumerate(self.operands)))}
        self.used: list[Operand] = [NONE]
        self._seen = {0}

    def lines(self) -> Iterator[str]:
        start = dict.fromkeys(self.lists, 0)
        for index, (op, *_, count) in enumerate(self.instructions):
            name = Op(op).rule.list
            yield self.instruction(index, start[name] if name else 0)
            if name:
                start[name] += count

    def instruction(self, index: int, start: int) -> str:
        """Formats the instruction whose list rows begin at `start`."""
        number, round, channel, mode, count = self.instructions[index]
        op = Op(number)
        name = op.rule.list
        rows = self.lists[name][start : start + count] if name else []
        if op is Op.LAUNCH:
            text = f"launch {round}" + (f" channel {channel}" if channel else "")
            text += " all_to_all" if mode & ALL_TO_ALL else ""
            text += " results" if mode & RESULTS else ""
            return f"{text}: {', '.join(map(self.transfer, rows))}" if rows else text
        if op is Op.WAIT:
            return f"wait {round}"
        return f"{OP_NAMES[op]} {', '.join(self.row(op, row) for row in rows)}".rstrip()

    def transfer(self, row: Row) -> str:
        send, peer, operand = row
        return f"send {self.name(operand)} to {peer}" if send else f"receive {self.name(operand)} from {peer}"

    def row(self, op: Op, row: Row) -> str:
        form = FORMS[op]
        value = dict(zip(TABLES[op.rule.list or ""], row, strict=True))
        parts = [self.name(value[slot]) for slot in form.reads]
        parts += ["->"] if form.reads else []
        parts += [self.name(value[slot]) for slot in form.writes]
        if "dmin" in value:
            q, kv = self.operands[value["q"]], self.operands[value["kv"]]
            parts.append(_bounds(value["dmin"], value["dmax"], q[3], kv[3]))
        parts += [flag for flag, bit in form.flags.items() if value["first"] & bit]
        extra = [slot for slot in op.rule.columns if value[slot] and slot not in form.reads + form.writes]
        return " ".join(parts + [f"{slot}={self.name(value[slot])}" for slot in extra])

    def name(self, index: int) -> str:
        operand = self.operands[index]
        if index not in self._seen:
            self._seen.add(index)
            self.used.append(operand)
        return _operand(operand) + ("" if self.place[operand] == index else f"~{index}")
