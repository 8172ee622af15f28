"""Violations: rule, rank, instruction, numbers and an excerpt of the program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from apportion.ir.tensors import HEADLESS, TENSOR_NAMES, Tensor

if TYPE_CHECKING:
    from apportion.ir.verify.view import Program

#: reported violations per rule; the last one states that there are more
MAX_PER_RULE = 8


@dataclass(frozen=True)
class Violation:
    """One violation of a rule.

    rule: its name in `verify.RULES`. rank, kind, phase, instruction: its place; None if the place is less specific.
    message: one sentence with the numbers. excerpt: lines of the rank's program around the instruction. order: time of
    the fault, for sorting among related rules. cause: a rule whose violation would explain it.
    """

    rule: str
    rank: int | None
    kind: str | None
    phase: str | None
    instruction: int | None
    message: str
    excerpt: str = ""
    order: int = 0
    cause: str = ""

    @property
    def place(self) -> str:
        """The place, such as `rank 3, causal forward, instruction 14`."""
        program = " ".join(part for part in (self.kind, self.phase) if part is not None)
        parts = (("rank ", self.rank), ("", program or None), ("instruction ", self.instruction))
        return ", ".join(f"{name}{value}" for name, value in parts if value is not None)

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}" if self.place else self.message
        lines = "".join(f"\n      {line}" for line in self.excerpt.splitlines())
        return f"[{self.rule}] {head}{lines}"


def first_few(violations: Iterator[Violation], limit: int = MAX_PER_RULE) -> tuple[Violation, ...]:
    """At most `limit` violations; the last one states that there are more. Rules yield them one by one."""
    result = list(islice(violations, limit + 1))
    if len(result) > limit:
        result = result[:limit]
        result[-1] = replace(result[-1], message=f"{result[-1].message} (and more of this rule)")
    return tuple(result)


def at_instruction(rule: str, program: Program, instruction: int, message: str) -> Violation:
    """A violation at an instruction, numbered over all ranks."""
    table = program["instructions"]
    rank, local = table.rank_and_row(instruction)
    return Violation(rule, rank, program.kind, program.phase, local, message)


def span(start: int, rows: int) -> str:
    """Formats a half-open range."""
    return f"[{start}, {start + rows})"


def describe_operand(operand: dict[str, int]) -> str:
    """Formats an operand: `KV work rows [4096, 8192)`, with the head set if it does not have all heads."""
    tensor = Tensor(operand["tensor"])
    space = "work" if operand["space"] else "home"
    heads = "" if tensor in HEADLESS or not operand["heads"] else f" of head set {operand['heads']}"
    return f"{TENSOR_NAMES[tensor]} {space} rows {span(operand['row'], operand['rows'])}{heads}"
