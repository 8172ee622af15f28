from apportion.ir.arrays import Ints

def two_level(
    surplus: Ints, width: int, intra: float, inter: float, level_givers: bool, level_takers: bool, /
) -> tuple[Ints, Ints, Ints]: ...
