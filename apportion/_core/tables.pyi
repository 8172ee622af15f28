from collections.abc import Sequence

from apportion.ir.arrays import Bools, Ints

MAX_ROWS: int

class Malformed(ValueError):
    args: tuple[int, int, int, str]

def encode(tables: list[tuple[Ints, Ints]], first: int, end: int, /) -> list[bytes]: ...
def decode(
    parts: Sequence[bytes], columns: Sequence[int], narrow: Sequence[bool], /
) -> list[tuple[Ints, Ints]]: ...
def out_of_range(table: tuple[Ints, Ints], ranges: Ints, /) -> tuple[str, int, int, int, int] | None: ...
def refusal(
    tables: list[tuple[Ints, Ints]], ranges: Ints, foreign: Bools, /
) -> tuple[str, int, int, int, int] | None:
    """The broken rule, table, row, column, and the rows that are consumed."""
