"""Frames of a stream of slices: `kind u8 · length u32, little endian · payload`.

SLICE          an encoded `IterationSlice` as a zstd frame
PROBLEM_FRAME  problem+json: the reason why there is no slice for this key
ALIVE          empty: the slice is still being planned
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<BI")
SLICE, PROBLEM_FRAME, ALIVE = 0, 1, 2


def frame(kind: int, payload: bytes) -> bytes:
    """Encodes one frame."""
    return HEAD.pack(kind, len(payload)) + payload
