"""Text forms of instructions: keywords, and the row syntax of each op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from apportion.ir.isa import Op, Rule, Use
from apportion.ir.tensors import Space

Row = tuple[int, ...]
Operand = tuple[int, int, int, int, int, int]  # tensor, space, row, rows, col, heads

NONE: Operand = (0, 0, 0, 0, 0, 0)
SPACE_NAMES = MappingProxyType({Space.HOME: "home", Space.WORK: "work"})


@dataclass(frozen=True)
class Form:
    """Syntax of a row of an op's list: `reads -> writes bounds flags`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flags: Mapping[str, int]  # word -> bit of `first`


def form_of(rule: Rule) -> Form:
    """Derives the form of a rule: inputs precede the arrow; each sum has its own flag if a row has several."""
    reads = tuple(argument.column for argument in rule.arguments if argument.use.reads)
    writes = tuple(argument.column for argument in rule.arguments if not argument.use.reads)
    sums = [argument for argument in rule.arguments if argument.use is Use.ADD]
    flags = {f"first_{argument.column}": argument.flag for argument in sums}
    return Form(reads, writes, flags if len(sums) > 1 else {"first": 1})


#: ops written as rows; launch and wait have forms of their own
FORMS: Mapping[Op, Form] = MappingProxyType(
    {op: form_of(op.rule) for op in Op if op.rule.list not in (None, "transfers")}
)
