from typing import Any

from apportion.ir.arrays import Floats, Ints

def migrate(
    pairs: tuple[Any, ...],
    home: Ints,
    origin: Ints,
    speeds: Floats,
    speed: float,
    limits: tuple[Any, ...],
    exhaustive: bool,
    /,
) -> tuple[Ints, Ints, tuple[int, int, int, int, float, int]]: ...
