from apportion.ir.arrays import Floats, Ints

def mix(
    documents: Ints,
    rows: tuple[Ints, Ints, Ints, Ints],
    tokens: Ints,
    speeds: Floats,
    wanted: Floats,
    widest: float,
    head: float,
    tolerance: float,
    /,
) -> Ints: ...
