from apportion.ir.arrays import Bools, Floats, Ints

def area_of(q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int, /) -> int: ...
def pairs(
    q: Ints, kv: Ints, dmin: Ints, dmax: Ints, ptr: Ints, first: Ints, rows: Ints, heads: Ints, sizes: Ints, /
) -> Floats: ...
def move(
    until: Ints,
    results: Bools,
    send: Ints,
    peer: Ints,
    operand: Ints,
    tensor: Ints,
    rows: Ints,
    heads: Ints,
    ptr: Ints,
    first: Ints,
    row_bytes: Ints,
    result_bytes: Ints,
    node: Ints,
    sent: Ints,
    received: Ints,
    /,
) -> int: ...
