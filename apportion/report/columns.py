"""Columns of numbers as text for pages: base64 of deflated little-endian arrays in the narrowest dtype."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: dtypes with a typed array in JavaScript, narrowest first
_INTEGERS = ("u1", "u2", "u4", "i4")
_LEVEL = 9


def pack(columns: Mapping[str, NDArray[Any]]) -> dict[str, list[str]]:
    """Packs columns: name -> [dtype, text]. Integers keep their values, floats become float32."""
    return {name: _pack_column(column) for name, column in columns.items()}


def _pack_column(column: NDArray[Any]) -> list[str]:
    dtype = _narrowest(column)
    return [dtype, b64encode(zlib.compress(column.astype("<" + dtype).tobytes(), _LEVEL)).decode()]


def _narrowest(column: NDArray[Any]) -> str:
    """The narrowest dtype for all values; float64 for integers beyond 32 bits, exact to 2^53."""
    if column.dtype.kind == "f":
        return "f4"
    if not len(column):
        return _INTEGERS[0]
    low, high = int(column.min()), int(column.max())
    for dtype in _INTEGERS:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return dtype
    return "f8"
