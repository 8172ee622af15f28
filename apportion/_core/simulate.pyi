from typing import Any

from apportion.ir.arrays import Floats, Ints

NONE: int
NOT_YET: float

def run(
    script: tuple[Any, ...], traffic: tuple[Any, ...], ports: int, contention: float, /
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats, Ints, Ints, Floats, Ints]: ...
