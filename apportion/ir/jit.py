"""Optional compilation of hot loops.

A function under `jit` is plain Python on integers and numpy columns. With numba it is compiled on first use and
cached on disk; without, it runs as written. Results are equal by construction: one source, integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def _numba() -> Any:
    try:
        import numba
    except ImportError:
        return None
    return numba


_NUMBA = _numba()
HAS_NUMBA = _NUMBA is not None


def jit(function: F) -> F:
    """Compile `function` with numba where it is installed, else return it unchanged."""
    return cast(F, _NUMBA.njit(cache=True)(function)) if HAS_NUMBA else function


def lean(function: F) -> F:
    """As `jit`, for a function that allocates no arrays, for use by others of its kind: it counts no references to
    its arguments, which would cost more than the work of a small function."""
    return cast(F, _NUMBA.njit(cache=True, _nrt=False)(function)) if HAS_NUMBA else function


def inlined(function: F) -> F:
    """As `lean`, for a function with one caller, which takes many columns: passing them costs more than its work."""
    return cast(F, _NUMBA.njit(cache=True, _nrt=False, forceinline=True)(function)) if HAS_NUMBA else function
