from typing import Any

from apportion.ir.arrays import Ints

def group(
    programs: tuple[Ints, ...], memory: tuple[Any, ...], alignment: int, /
) -> tuple[Ints, Ints, Ints]: ...
