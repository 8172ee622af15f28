"""Optional compilation of hot loops.

A function under `jit` is plain Python on integers and numpy columns. With numba it is compiled on first use and
cached on disk; without, it runs as written. Results are equal by construction: one source, integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba
except ImportError:
    numba = None

HAS_NUMBA = numba is not None


def jit(function: F) -> F:
    """Compile `function` with numba where it is installed, else return it unchanged."""
    if numba is None:
        return function
    return numba.njit(cache=True)(function)  # type: ignore[no-any-return]


def lean(function: F) -> F:
    """As `jit`, for a function that allocates no arrays, for use by others of its kind: it counts no references to
    its arguments, which would cost more than the work of a small function."""
    if numba is None:
        return function
    return numba.njit(cache=True, _nrt=False)(function)  # type: ignore[no-any-return]
