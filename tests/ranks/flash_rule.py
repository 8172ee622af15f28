"""FlashAttention-2's interpretation of a window, independent of the code that cuts tasks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def visible(rows: int, keys: int, left: int, right: int) -> NDArray[Any]:
    """bool [rows, keys]: the pairs that are visible in a call with these window sizes.

    A negative size means "no bound", but is treated as `keys` if the other side has a bound (flash_api.cpp,
    `set_params_fprop`; mask.h, `apply_mask`), which hides keys if rows > keys + 1."""
    left, right = (-1 if size >= keys else size for size in (left, right))
    if left < 0 and right < 0:
        return np.ones((rows, keys), bool)
    left, right = (keys if size < 0 else size for size in (left, right))
    column, diagonal = np.arange(keys), np.arange(rows)[:, None] + keys - rows
    return (column < np.minimum(keys, diagonal + 1 + right)) & (column >= np.maximum(0, diagonal - left))
