from apportion.ir.arrays import Ints

def row_bytes(op: Ints, count: Ints, of: Ints, rows: Ints, bytes: Ints, passes: Ints, /) -> Ints: ...
def add_rows(
    moved: Ints,
    task: Ints,
    row0: Ints,
    row1: Ints,
    instruction: Ints,
    lane: Ints,
    heads: Ints,
    size: int,
    /,
) -> None: ...
