"""How instructions are written: the words shared by printing and parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from apportion.ir.isa import OP_NAMES, TENSOR_NAMES, Op, Space

Row = tuple[int, ...]
Operand = tuple[int, int, int, int, int, int]  # tensor, space, row, rows, col, heads

NONE: Operand = (0, 0, 0, 0, 0, 0)
SPACE_NAMES = MappingProxyType({Space.HOME: "home", Space.WORK: "work"})
TENSORS = MappingProxyType({name: int(tensor) for tensor, name in TENSOR_NAMES.items()})
SPACES = MappingProxyType({name: int(space) for space, name in SPACE_NAMES.items()})
OPS = MappingProxyType({name: op for op, name in OP_NAMES.items()})


@dataclass(frozen=True)
class Form:
    """How a row of an op's list is written: `reads -> writes bounds flags`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flags: Mapping[str, int]  # word -> bit of `first`


_FIRST = MappingProxyType({"first": 1})
FORMS: Mapping[Op, Form] = MappingProxyType(
    {
        Op.ATTEND: Form(("q", "kv"), ("o",), _FIRST),
        Op.ATTEND_GRAD: Form(("q", "kv", "do", "delta"), ("dq", "dkv"), {"first_dq": 1, "first_dkv": 2}),
        Op.DELTA: Form(("a", "b"), ("c",), _FIRST),
        Op.MERGE: Form(("a",), ("c",), _FIRST),
        Op.ADD: Form(("a",), ("c",), _FIRST),
        Op.COPY: Form(("a",), ("c",), _FIRST),
        Op.CLEAR: Form((), ("c",), _FIRST),
        Op.PROJECT: Form(("a",), ("b", "c"), _FIRST),
        Op.PROJECT_GRAD: Form(("a", "b", "c"), ("d",), _FIRST),
        Op.FINISH: Form((), ("c",), _FIRST),
    }
)
