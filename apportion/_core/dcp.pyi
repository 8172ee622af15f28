from typing import Any

from apportion.ir.arrays import Bools, Floats, Ints

def exchange(
    placed: list[tuple[Any, ...]],
    free: Bools,
    tokens: Ints,
    caps: Ints,
    per_node: int,
    within: float,
    between: float,
    /,
) -> tuple[Ints, Floats]: ...
def divide(
    q: Ints,
    k: Ints,
    rank: Ints,
    home: Ints,
    lengths: Ints,
    groups: int,
    key_sets: int,
    q_bytes: int,
    k_bytes: int,
    divisions: int,
    /,
) -> Ints: ...
