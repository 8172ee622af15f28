from typing import Any

from apportion.ir.arrays import Floats, Ints

def task_us(
    grids: tuple[Any, ...],
    tile: int,
    pair_us: float,
    most_causal: float,
    window_us: float,
    scale: float,
    q_row_us: float,
    kv_row_us: float,
    q_rows: Ints,
    kv_rows: Ints,
    pairs: Ints,
    q_heads: Ints,
    kv_heads: Ints,
    /,
) -> Floats: ...
