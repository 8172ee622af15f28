from collections.abc import Sequence
from enum import Enum

from apportion.ir.arrays import Bools, Ints

MAX_ROWS: int

class Malformed(ValueError):
    args: tuple[int, int, int, str]

def encode(tables: list[tuple[Ints, Ints]], first: int, end: int, /) -> list[bytes]: ...
def decode(
    parts: Sequence[bytes], columns: Sequence[int], narrow: Sequence[bool], /
) -> list[tuple[Ints, Ints]]: ...

class Flaw(Enum):
    RANGE = 0
    SECOND_ARENA = 1
    OPERAND_ZERO = 2
    EMPTY_OPERAND = 3
    FOREIGN_HEADS = 4
    UNKNOWN_OPERAND = 5
    STRAY_FIELD = 6
    WAIT_WITH_ROWS = 7
    COUNT = 8
    SUM = 9

#: flaw, table, row, column, rows that are consumed
Refusal = tuple[Flaw, int, int, int, int]

def out_of_range(ptr: Ints, values: Ints, ranges: Ints, /) -> Refusal | None: ...
def refusal(tables: list[tuple[Ints, Ints]], ranges: Ints, foreign: Bools, /) -> Refusal | None: ...
