from apportion.ir.arrays import Ints

def two_level(
    surplus: Ints, width: int, price: tuple[float, float], level_givers: bool, level_takers: bool, /
) -> Ints: ...
