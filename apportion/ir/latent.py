"""Latent rows: the communicated rows of layers whose keys and values are projections of a short row (multi-head latent
attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    latent row   [rope | rank]          one per token, stored as one KV head: rotated numbers as k, compressed ones as v
    head         k = [own | rope],  v   own and v are projections of the compressed numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

_Size = Annotated[int, Meta(ge=1, le=2**16)]


@dataclass(frozen=True)
class Latent:
    """rank: compressed values per row; rope: width of the part of k that all heads share, rotated by position."""

    rank: _Size
    rope: _Size

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of k and v in a row of KV."""
        return self.rope, self.rank
