from typing import Any

from apportion.ir.arrays import Ints

def group(programs: tuple[tuple[Ints, Ints], ...], sizes: tuple[Any, ...], /) -> tuple[Ints, Ints, Ints]: ...
