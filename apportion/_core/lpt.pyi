from typing import Any

from apportion.ir.arrays import Floats, Ints

def assign(
    order: Ints,
    weights: Ints,
    sizes: Ints,
    speeds: Floats,
    caps: Ints,
    group: Ints,
    group_ptr: Ints,
    bins: Ints,
    near: tuple[Any, ...],
    /,
) -> tuple[Ints, Ints]: ...
