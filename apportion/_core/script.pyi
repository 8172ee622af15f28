from typing import Any

from apportion.ir.arrays import Ints

def prepare(
    programs: tuple[tuple[Ints, Ints], ...],
    sizes: tuple[Any, ...],
    bytes: Ints,
    ops: tuple[Ints, ...],
    links: tuple[Any, ...],
    post_us: float,
    home_rows: Ints,
    is_backward: bool,
    /,
) -> tuple[tuple[Any, ...], ...]: ...
def link_channels(rank: Ints, channel: Ints, /) -> tuple[Ints, Ints]: ...
def list_ends(sender: Ints, receiver: Ints, launches: int, /) -> tuple[Ints, Ints]: ...
