from apportion.ir.arrays import Ints

Ranges = tuple[Ints, Ints, Ints]

def fuse(programs: tuple[Ints, ...], /) -> tuple[list[tuple[Ranges, ...]], Ranges, Ranges]: ...
