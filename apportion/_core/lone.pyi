from apportion.ir.arrays import Floats, Ints

def deal(
    times: Ints, sizes: Ints, first: Ints, speeds: Floats, load: Floats, room: Ints, /
) -> tuple[Ints, Floats]: ...
