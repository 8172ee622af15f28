from apportion.ir.arrays import Bools, Ints

def match(
    order: Ints,
    ptr: Ints,
    starts: Ints,
    counts: Ints,
    rank_of: Ints,
    send: Ints,
    peer: Ints,
    operand: Ints,
    transfer_ptr: Ints,
    bases: Ints,
    tile: Ints,
    /,
) -> tuple[Ints, Bools]: ...
