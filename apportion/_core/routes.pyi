from apportion.ir.arrays import Ints

def through_gateways(
    star: tuple[Ints, ...], nodes: tuple[int, int], proxies: bool, /
) -> tuple[Ints, Ints]: ...
def chains(
    star: tuple[Ints, ...],
    tile: Ints,
    ring: Ints,
    parts: int,
    rings: tuple[Ints, Ints],
    ranks_per_node: int,
    /,
) -> tuple[Ints, Ints]: ...
def depths(parent: Ints, /) -> Ints: ...
