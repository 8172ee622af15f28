from apportion.ir.arrays import Floats, Ints

def mix(
    documents: Ints,
    at: Ints,
    value: Ints,
    slope: Ints,
    below: Ints,
    tokens: Ints,
    speeds: Floats,
    wanted: Floats,
    widest: float,
    head: float,
    tolerance: float,
    /,
) -> Ints: ...
