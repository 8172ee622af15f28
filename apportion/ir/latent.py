"""Latent rows: what travels of a layer whose keys and values are products of a short row (multi-head latent attention,
DeepSeek-V2, arXiv 2405.04434, section 2.1).

    latent row   [rope | rank]          of a token: one head of KV, the rotated numbers as k, the compressed ones as v
    of a head    k = [own | rope],  v   own and v are products of the compressed numbers with weights of the layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

_Size = Annotated[int, Meta(ge=1, le=2**16)]


@dataclass(frozen=True)
class Latent:
    """rank: compressed numbers of a row; rope: the numbers of k that all heads share, rotated by position."""

    rank: _Size
    rope: _Size

    @property
    def widths(self) -> tuple[int, int]:
        """Of k and of v in a row of KV."""
        return self.rope, self.rank
