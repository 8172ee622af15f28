from collections.abc import Sequence
from typing import Any

from apportion.ir.arrays import Floats, Ints

def task_us(
    phase: tuple[Any, ...], scale: float, q_row_us: float, kv_row_us: float, columns: Sequence[Ints], /
) -> Floats: ...
