"""Numbers of pairs inside compiled loops: `bands.area`, whose formula this is, one band at a time.

`bands` itself is read by executors, which load no numba.
"""

from __future__ import annotations

from apportion.ir.loops.jit import lean


@lean
def area_of(q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int) -> int:
    """Pairs of a band, 0 where it is empty."""
    q, k, offset = max(q1 - q0, 0), max(k1 - k0, 0), k1 - q0
    return max(pairs_below(q, k, dmax + offset) - pairs_below(q, k, dmin - 1 + offset), 0)


@lean
def pairs_below(q: int, k: int, m: int) -> int:
    """Pairs (a, b) in [0, q) x [0, k) with a + b < m."""
    m = min(max(m, 0), q + k)
    return _triangle(m) - _triangle(m - q) - _triangle(m - k)


@lean
def _triangle(side: int) -> int:
    side = max(side, 0)
    return (side + 1) // 2 * (side | 1)  # halved first: side may be 2**32 - 2
