from apportion.ir.arrays import Floats, Ints

#: times, sizes
Sequences = tuple[Floats, Ints]
#: column, rooms
Groups = tuple[Ints, Ints]

def first_fit(
    sequences: Sequences, order: Ints, need: Ints, degrees: Ints, rooms: Ints, ranks: int, limit: float, /
) -> tuple[Ints, Ints]: ...
def list_schedule(sequences: Sequences, groups: Groups, /) -> Ints | None: ...
def descend(sequences: Sequences, groups: Groups, group: Ints, time: Floats, /) -> None: ...
def anneal(
    sequences: Sequences,
    steps: tuple[Ints, Ints, Floats],
    goal: float,
    above: float,
    load: Floats,
    left: Ints,
    group: Ints,
    /,
) -> None: ...
