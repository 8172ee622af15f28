"""Differences of two plans: fields of header, request and report, instruction counts, first lines that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import OP_NAMES, RECURRENCE_TABLES, TABLES, Op
from apportion.ir.plan.plain import header_data, request_data
from apportion.ir.plan.tables import ProgramSet, Table, empty_programs
from apportion.ir.text.listing import instruction_lines


@dataclass(frozen=True)
class Change:
    """A differing value of header, request or report; None if a plan lacks it."""

    field: str  # dotted path
    a: Any
    b: Any


@dataclass(frozen=True)
class ProgramChange:
    """A differing program of a rank: instructions per op in each plan, and the first different line."""

    rank: int
    kind: str
    phase: str
    counts: Mapping[str, tuple[int, int]]  # op -> instructions in a and b, if different
    instruction: int | None  # None if the lines agree and only operands or arenas differ
    a: str | None
    b: str | None


@dataclass(frozen=True)
class PlanDiff:
    """All differences; empty for equal plans."""

    ids: tuple[str, str]
    values: tuple[Change, ...]
    layouts: tuple[str, ...]  # layouts that differ or that one plan lacks
    moves: bool
    recurrent: tuple[str, ...]  # tables of recurrent layers that differ or that one plan lacks
    programs: tuple[ProgramChange, ...]

    @property
    def equal(self) -> bool:
        return self.ids[0] == self.ids[1]

    def to_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"equal": self.equal} | asdict(self)

    def lines(self, programs: int = 8) -> list[str]:
        """The differences as text; only the first `programs` programs in full."""
        if self.equal:
            return [f"the plans are equal: {self.ids[0]}"]
        lines = [f"id {self.ids[0]} | {self.ids[1]}"]
        lines += [f"{change.field}: {change.a!r} | {change.b!r}" for change in self.values]
        lines += [f"layout {name} differs" for name in self.layouts]
        lines += ["moves differ"] if self.moves else []
        lines += [f"recurrent {name} differ" for name in self.recurrent]
        for change in self.programs[:programs]:
            lines += _program_lines(change)
        if len(self.programs) > programs:
            lines.append(f"… and {len(self.programs) - programs} more programs differ")
        return lines


def _program_lines(change: ProgramChange) -> list[str]:
    lines = [f"rank {change.rank}, {change.kind} {change.phase}:"]
    if change.counts:
        lines.append("  " + ", ".join(f"{op} {a} | {b}" for op, (a, b) in change.counts.items()))
    if change.instruction is None:
        return [*lines, "  operands or arenas differ, the instructions agree"]
    return [
        *lines,
        f"  instruction {change.instruction}:",
        f"  - {change.a or '(none)'}",
        f"  + {change.b or '(none)'}",
    ]


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Finds the differences between plans `a` and `b`."""
    names = list(dict.fromkeys([*a.layouts, *b.layouts]))
    return PlanDiff(
        ids=(a.id.hex(), b.id.hex()),
        values=tuple(_changes("", _values(a), _values(b))),
        layouts=tuple(name for name in names if not _same_layout(a, b, name)),
        moves=not _same_moves(a, b),
        recurrent=tuple(name for name in RECURRENCE_TABLES if not _same_recurrent(a, b, name)),
        programs=tuple(_program_changes(a, b)),
    )


def _values(plan: Plan) -> dict[str, Any]:
    return {
        "header": header_data(plan.header),
        "request": request_data(plan.request),
        "report": dict(plan.report),
    }


def _changes(path: str, a: Any, b: Any) -> Iterator[Change]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _changes(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
    elif _plain(a) != _plain(b):
        yield Change(path, _plain(a), _plain(b))


def _plain(value: Any) -> Any:
    """Converts tuples to lists, so that a decoded plan compares equal to the original."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _same_layout(a: Plan, b: Plan, name: str) -> bool:
    return name in a.layouts and name in b.layouts and _is_same(a.layouts[name].spans, b.layouts[name].spans)


def _same_moves(a: Plan, b: Plan) -> bool:
    pairs = zip_longest(a.moves, b.moves)
    return all(
        x and y and (x.source, x.target) == (y.source, y.target) and _is_same(x.table, y.table)
        for x, y in pairs
    )


def _same_recurrent(a: Plan, b: Plan, name: str) -> bool:
    if a.recurrence is None or b.recurrence is None:
        return a.recurrence is b.recurrence
    return _is_same(a.recurrence[name], b.recurrence[name])


def _is_same(a: Table, b: Table) -> bool:
    return a.ranks == b.ranks and a.equal(b)


def _program_changes(a: Plan, b: Plan) -> Iterator[ProgramChange]:
    for kind, phase in dict.fromkeys([*a.programs, *b.programs]):
        for rank in range(max(a.header.ranks, b.header.ranks)):
            first, second = _program(a, rank, kind, phase), _program(b, rank, kind, phase)
            if not all(_is_same(first[name], second[name]) for name in TABLES):
                yield _program_change(rank, kind, phase, first, second)


def _program(plan: Plan, rank: int, kind: str, phase: str) -> ProgramSet:
    if rank >= plan.header.ranks or (kind, phase) not in plan.programs:
        return empty_programs(1)
    return plan.program(rank, kind, phase)


def _program_change(rank: int, kind: str, phase: str, a: ProgramSet, b: ProgramSet) -> ProgramChange:
    lines = zip_longest(instruction_lines(a), instruction_lines(b))
    line, x, y = next(((i, x, y) for i, (x, y) in enumerate(lines) if x != y), (None, None, None))
    return ProgramChange(rank, kind, phase, _count_changes(a, b), line, x, y)


def _count_changes(a: ProgramSet, b: ProgramSet) -> dict[str, tuple[int, int]]:
    counts = {
        OP_NAMES[op]: (int((a["instructions"]["op"] == op).sum()), int((b["instructions"]["op"] == op).sum()))
        for op in Op
    }
    return {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
