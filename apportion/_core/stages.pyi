from apportion.ir.arrays import Floats, Ints

def fill(
    stage: Ints,
    rank: Ints,
    edge: Ints,
    work: Ints,
    ranks: int,
    filling: tuple[Floats, Ints, int],
    order: Ints,
    /,
) -> None: ...
def cut(tasks: tuple[Ints, ...], parts: Ints, tails: Ints, /) -> Ints: ...
def merge(
    tasks: tuple[Ints, ...],
    stage: Ints,
    stages: int,
    ranks: int,
    query: Ints,
    shift: Ints,
    edges: tuple[Ints, ...],
    /,
) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints], Ints]: ...
