from typing import Any

from apportion.ir.arrays import Bools, Floats, Ints

def meet(
    tiles: tuple[Any, ...], mate: Ints, ranks: int, links: tuple[Any, ...], post_us: Floats, /
) -> tuple[Ints, Ints, Ints, Ints, Floats, Floats, Ints, Ints]: ...
def posted(
    tiles: tuple[Any, ...], message: Ints, first: Ints, staged: Bools, rows: Ints, in_place: Ints, /
) -> tuple[Ints, Ints, Ints]: ...
