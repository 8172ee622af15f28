"""Compression of plans for files and the network, as zstd frames. Ids and digests are of the uncompressed bytes."""

from __future__ import annotations

from backports import zstd

from apportion.ir.errors import DecodeError

MAX_EXPANDED = 1 << 30  # limit of a frame's uncompressed bytes
_MAGIC = b"\x28\xb5\x2f\xfd"


def compress(data: bytes) -> bytes:
    """Compresses `data` to a zstd frame, the same for equal bytes."""
    return zstd.compress(data, 3)


def decompress(data: bytes, limit: int = MAX_EXPANDED) -> bytes:
    """Decompresses a zstd frame that states its size, `limit` bytes at most; returns other bytes unchanged. Raises
    DecodeError, also for trailing bytes."""
    if not data.startswith(_MAGIC):
        return data
    try:
        size = zstd.get_frame_info(data).decompressed_size
        if size is None or size > limit:
            raise DecodeError(f"a compressed body of {size} bytes; the limit is {limit}")
        reader = zstd.ZstdDecompressor()
        body = reader.decompress(data, size + 1)
    except zstd.ZstdError as error:
        raise DecodeError(f"a compressed body: {error}") from None
    if not reader.eof or reader.unused_data:
        raise DecodeError("a compressed body: truncated, or followed by other bytes")
    return body
