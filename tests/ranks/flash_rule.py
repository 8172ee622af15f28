"""FlashAttention-2's interpretation of a window, independent of the cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def visible(rows: int, keys: int, left: int, right: int) -> NDArray[Any]:
    """[rows, keys] bool: the pairs that a call with these window sizes sees.

    A negative size means "no bound", but with a bound on the other side it is read as `keys`
    (flash_api.cpp, `set_params_fprop`; mask.h, `apply_mask`): if rows > keys + 1 that hides keys."""
    left, right = (-1 if size >= keys else size for size in (left, right))
    if left < 0 and right < 0:
        return np.ones((rows, keys), bool)
    left, right = (keys if size < 0 else size for size in (left, right))
    column, corner = np.arange(keys), np.arange(rows)[:, None] + keys - rows
    return (column < np.minimum(keys, corner + 1 + right)) & (column >= np.maximum(0, corner - left))
