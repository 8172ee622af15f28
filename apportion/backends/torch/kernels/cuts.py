"""Cuts a band into calls that a kernel accepts. Integer arithmetic only, testable on any machine.

A call is itself a band (q0, q1, k0, k1, dmin, dmax) inside the task's; calls of a task are disjoint and cover
it. In every call **each row sees a key and each key is seen**. So no kernel ever meets an empty operand, a
row without keys (whose LSE is +inf in FlashAttention-2), or a merged LSE of -inf: the cuts avoid the traps
of flash kernels, and no kernel is patched.

    dmin only ("causal")                       both diagonals (a window), in strips of rows
        k0        k1                               k0            k1
    q0  ppppC                                  q0  mmmm
        ppppCC      p  plain                       .mmmm            m  masked, or plain where neither
        ppppCCC     C  causal square               ...mmmm             diagonal crosses the call
        ppppppp     q1 - k1 rows see all keys  q1  ....mmmm
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Rows of a masked strip and keys of a masked call: the mask costs rows x keys floats, so both are bounded;
# calls of this size run at the speed of long ones (a call costs 16 us forward and 30 us backward on a CPU).
STRIP_ROWS = 256
STRIP_KEYS = 2048


class Call(NamedTuple):
    """Query rows [q0, q1) against key rows [k0, k1) where dmin <= q - k <= dmax, in the rows of the task."""

    q0: int
    q1: int
    k0: int
    k1: int
    dmin: int
    dmax: int

    @property
    def is_empty(self) -> bool:
        return self.q0 >= self.q1 or self.k0 >= self.k1 or self.dmin > self.dmax

    @property
    def is_cut_above(self) -> bool:
        """True if dmin hides the last key from the first row."""
        return self.q0 - (self.k1 - 1) < self.dmin

    @property
    def is_cut_below(self) -> bool:
        """True if dmax hides the first key from the last row."""
        return self.q1 - 1 - self.k0 > self.dmax

    @property
    def is_plain(self) -> bool:
        return not (self.is_cut_above or self.is_cut_below)

    @property
    def is_causal_square(self) -> bool:
        """True if there are as many rows as keys and row i sees exactly keys 0..i of the call: causal kernels of either
        alignment compute it."""
        return (
            self.q1 - self.q0 == self.k1 - self.k0
            and self.q0 - self.k0 == self.dmin
            and not self.is_cut_below
        )

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) of a window aligned at the bottom right corner, as in FlashAttention; -1: no bound.
        A right of -1 with a left bound is valid only for calls of at most keys + 1 rows."""
        corner = self.q1 - self.k1
        left = self.dmax - corner if self.is_cut_below else -1
        right = corner - self.dmin if self.is_cut_above else -1
        return left, right


def trim(call: Call) -> Call:
    """Trims rows that see no key and keys that no row sees; the call is empty if no pair is allowed."""
    q0 = max(call.q0, call.k0 + call.dmin)
    q1 = min(call.q1, call.k1 + call.dmax)
    k0 = max(call.k0, q0 - call.dmax)
    k1 = min(call.k1, q1 - call.dmin)
    return Call(q0, q1, k0, k1, call.dmin, call.dmax)


def cut_strips(band: Call) -> Iterator[Call]:
    """Calls of at most STRIP_ROWS x STRIP_KEYS, each with an explicit mask or unmasked."""
    band = trim(band)
    for q0 in range(band.q0, band.q1, STRIP_ROWS):
        strip = trim(band._replace(q0=q0, q1=min(q0 + STRIP_ROWS, band.q1)))
        for k0 in range(strip.k0, strip.k1, STRIP_KEYS):
            call = trim(strip._replace(k0=k0, k1=min(k0 + STRIP_KEYS, strip.k1)))
            if not call.is_empty:
                yield call


def cut_squares(band: Call) -> Iterator[Call]:
    """Plain calls, causal squares of any size, and masked strips where dmax cuts: for CPU flash kernels."""
    band = trim(band)
    if band.is_empty:
        return
    if band.is_cut_below:
        yield from cut_strips(band)
        return
    split = min(band.q1, max(band.q0, band.k1 + band.dmin))  # rows from here on see all keys
    diagonal = band.q0 - band.dmin  # keys before this one are seen by all rows
    parts = (
        band._replace(q1=split, k1=diagonal),
        band._replace(q1=split, k0=diagonal),
        band._replace(q0=split),
    )
    yield from (call for call in map(trim, parts) if not call.is_empty)


def cut_windows(band: Call) -> Iterator[Call]:
    """At most three calls with native windows, aligned at the bottom right: for CUDA flash kernels.

    In the head, whose last row's diagonal reaches the last key, windows align at that corner; for later rows only
    dmax cuts. There FlashAttention-2 replaces a missing right bound with `keys` (flash_api.cpp), which hides keys
    if rows > keys + 1: such calls are cut again, into rows that see all keys and rows that dmax cuts.

        ppppC          head    both diagonals, right = 0
        ppppCC
        ppppppp        plain   no window
        ppppppp
         pppppp        corner  fewer rows than keys, left only
          ppppp
    """
    band = trim(band)
    split = min(band.q1, max(band.q0, band.k1 + band.dmin))
    tail = trim(band._replace(q0=split))
    corner = _first_cut_row(tail) if tail.q1 - tail.q0 > tail.k1 - tail.k0 + 1 else tail.q0
    parts = band._replace(q1=split), tail._replace(q1=corner), tail._replace(q0=corner)
    yield from (call for call in map(trim, parts) if not call.is_empty)


def _first_cut_row(call: Call) -> int:
    """The first row from which dmax hides the first key; the end if there is no such row."""
    return min(call.q1, max(call.q0, call.k0 + call.dmax + 1))
