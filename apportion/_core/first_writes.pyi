from apportion.ir.arrays import Bools, Ints

def find(
    task: Ints, lane: Ints, row: Ints, rows: Ints, may: Bools, held: Ints, tasks: int, /
) -> tuple[Ints, Ints, Ints, Ints]: ...
def stay_put(
    rank: Ints, row: Ints, rows: Ints, home: Ints, first: Ints, size: Ints, leave: Bools, ranks: int, /
) -> Bools: ...
