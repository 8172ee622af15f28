from apportion.ir.arrays import Floats, Ints

def first_fit(
    times: Floats,
    sizes: Ints,
    order: Ints,
    need: Ints,
    degrees: Ints,
    rooms: Ints,
    ranks: int,
    limit: float,
    /,
) -> tuple[Ints, Ints]: ...
def list_schedule(times: Floats, sizes: Ints, column: Ints, rooms: Ints, /) -> Ints | None: ...
def descend(times: Floats, sizes: Ints, column: Ints, rooms: Ints, group: Ints, time: Floats, /) -> None: ...
def anneal(
    times: Floats,
    sizes: Ints,
    moved: Ints,
    to: Ints,
    bar: Floats,
    goal: float,
    above: float,
    load: Floats,
    left: Ints,
    group: Ints,
    /,
) -> None: ...
