"""A projection inside a plan's program, for the numpy executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Heads = Sequence[int]


@dataclass(frozen=True)
class Weights:
    """A projection that depends on positions: (1 + position / 8) * x @ w, per head."""

    q: Array  # [Hq, E, D]
    k: Array  # [Hk, E, D]
    v: Array  # [Hk, E, Dv]

    def project(self, hidden: Array, positions: Array, q: Heads, kv: Heads) -> tuple[Array, ...]:
        scaled = hidden * (1 + positions / 8)[:, None]
        return tuple(np.einsum("ne,hed->nhd", scaled, w) for w in self._of(q, kv))

    def gradient(self, hidden: Array, positions: Array, q: Heads, kv: Heads, grads: Sequence[Array]) -> Array:
        """The gradient of the hidden states, which it does not read."""
        pairs = zip(grads, self._of(q, kv), strict=True)
        return sum(np.einsum("nhd,hed->ne", g, w) for g, w in pairs) * (1 + positions / 8)[:, None]

    def _of(self, q: Heads, kv: Heads) -> list[Array]:
        return [w[list(heads)] for w, heads in ((self.q, q), (self.k, kv), (self.v, kv))]
