from apportion.ir.arrays import Ints

def through_gateways(
    star: tuple[Ints, ...], ranks: int, ranks_per_node: int, proxies: bool, /
) -> tuple[Ints, Ints]: ...
def chains(
    star: tuple[Ints, ...],
    tile: Ints,
    ring: Ints,
    parts: int,
    flat: Ints,
    first: Ints,
    ranks_per_node: int,
    /,
) -> tuple[Ints, Ints]: ...
def places_on_rings(flat: Ints, base: Ints, size: Ints, rank: Ints, /) -> Ints: ...
def depths(parent: Ints, /) -> Ints: ...
