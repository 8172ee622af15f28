from typing import Any

from apportion.ir.arrays import Floats, Ints

def prepare(
    programs: tuple[Ints, ...],
    memory: tuple[Any, ...],
    alignment: int,
    sizes: Ints,
    ops: tuple[Ints, ...],
    ranks_per_node: int,
    nics_per_node: int,
    rate: Floats,
    latency_us: Floats,
    post_us: float,
    home_rows: Ints,
    is_backward: bool,
    /,
) -> tuple[tuple[Any, ...], ...]: ...
def link_channels(rank: Ints, channel: Ints, /) -> tuple[Ints, Ints]: ...
def list_ends(sender: Ints, receiver: Ints, launches: int, /) -> tuple[Ints, Ints]: ...
