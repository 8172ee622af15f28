from typing import Any

from apportion.ir.arrays import Ints

def tables(lowering: Any, phase: str, network: Any, /) -> tuple[int, int, list[tuple[Ints, Ints]]]: ...
