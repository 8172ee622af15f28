import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Ints

def colours(src: Ints, dst: Ints, ranks: int, count: int, /) -> NDArray[np.int32]: ...
