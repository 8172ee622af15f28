from apportion.ir.arrays import Ints

Ranges = tuple[Ints, Ints, Ints]

def fuse(
    programs: tuple[tuple[Ints, Ints], ...], /
) -> tuple[tuple[tuple[Ranges, ...], ...], Ranges, Ranges]: ...
