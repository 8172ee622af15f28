from typing import Any

from apportion.ir.arrays import Bools, Ints

def group(
    lists: tuple[Any, ...], memory: tuple[Any, ...], ranks: int, alignment: int, /
) -> tuple[Ints, Ints, Bools]: ...
