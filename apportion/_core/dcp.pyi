from typing import Any

from apportion.ir.arrays import Bools, Floats, Ints

def exchange(
    placed: list[tuple[Any, ...]],
    free: Bools,
    tokens: Ints,
    caps: Ints,
    per_node: int,
    gbs: tuple[float, ...],
    /,
) -> tuple[Ints, Floats]: ...
def divide(
    q: Ints,
    k: Ints,
    rank: Ints,
    home: Ints,
    lengths: Ints,
    tiles: tuple[int, int, int, int],
    divisions: int,
    /,
) -> Ints: ...
