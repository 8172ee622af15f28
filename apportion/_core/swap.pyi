from apportion.ir.arrays import Bools, Floats, Ints

def improve(
    assigned: Ints,
    order: Ints,
    weights: Ints,
    sizes: Ints,
    caps: Ints,
    speeds: Floats,
    allowed: Bools,
    goal: float,
    /,
) -> None: ...
