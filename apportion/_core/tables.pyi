from collections.abc import Sequence

from apportion.ir.arrays import Ints

MAX_ROWS: int

class Malformed(ValueError):
    args: tuple[int, int, int, str]

def encode(tables: list[tuple[Ints, Ints]], first: int, end: int, /) -> list[bytes]: ...
def decode(
    parts: Sequence[bytes], columns: Sequence[int], narrow: Sequence[bool], /
) -> list[tuple[Ints, Ints]]: ...
