"""Frames of compressed plans: round trips and refusals."""

from __future__ import annotations

import pytest

from apportion.ir.bytes.transport import compress, decompress
from apportion.ir.errors import DecodeError

DATA = b"plan" * 1000
FRAME = compress(DATA)


def test_frames_round_trip_and_other_bytes_are_unchanged() -> None:
    for data in (b"", b"x", DATA):
        assert decompress(compress(data)) == data
    assert decompress(DATA) == DATA


@pytest.mark.parametrize("frame", [FRAME[:-1], FRAME[:5], FRAME + b"x", FRAME + FRAME])
def test_a_damaged_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError, match="a compressed body"):
        decompress(frame)


def test_a_frame_above_the_size_limit_is_refused_before_expansion() -> None:
    with pytest.raises(DecodeError, match="4000 bytes; the limit is 3999"):
        decompress(FRAME, 3999)
