from typing import Any

from apportion.ir.arrays import Bools, Ints

def write(
    lists: list[tuple[list[int], list[int], list[Any]]],
    steps: Ints,
    launch: Ints,
    all_to_all: int,
    heads: Ints,
    of_keys: Bools,
    /,
) -> list[Ints]: ...
