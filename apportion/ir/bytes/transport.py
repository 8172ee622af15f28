"""Compression of plans for files and the network, as zstd frames. Ids and digests are of the uncompressed bytes."""

from __future__ import annotations

import zstandard

from apportion.ir.errors import DecodeError

MAX_EXPANDED = 1 << 30  # bytes that a frame may hold
_MAGIC = b"\x28\xb5\x2f\xfd"


def compressed(data: bytes) -> bytes:
    """`data` as a zstd frame, the same for equal bytes."""
    return zstandard.ZstdCompressor(level=3).compress(data)


def expanded(data: bytes, most: int = MAX_EXPANDED) -> bytes:
    """Decompresses a zstd frame that states its size, `most` bytes at most; returns other bytes unchanged. Raises
    DecodeError."""
    if not data.startswith(_MAGIC):
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise DecodeError(f"a compressed body of {size} bytes, at most {most} are read")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
    except zstandard.ZstdError as error:
        raise DecodeError(f"a compressed body: {error}") from None
