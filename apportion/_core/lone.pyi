from apportion.ir.arrays import Floats, Ints

def deal(
    sequences: tuple[Ints, Ints], first: Ints, speeds: Floats, load: Floats, room: Ints, /
) -> tuple[Ints, Floats]: ...
