from typing import Any

from apportion.ir.arrays import Floats, Ints

def assign(
    items: tuple[Ints, ...], near: tuple[Any, ...], speeds: Floats, caps: Ints, /
) -> tuple[Ints, Ints]: ...
