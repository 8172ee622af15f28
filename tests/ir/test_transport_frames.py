"""Frames of compressed plans: round trips and refusals."""

from __future__ import annotations

import pytest

from apportion.ir.bytes.transport import compressed, expanded
from apportion.ir.errors import DecodeError

DATA = b"plan" * 1000
FRAME = compressed(DATA)


def test_frames_round_trip_and_other_bytes_are_unchanged() -> None:
    for data in (b"", b"x", DATA):
        assert expanded(compressed(data)) == data
    assert expanded(DATA) == DATA


@pytest.mark.parametrize("frame", [FRAME[:-1], FRAME[:5], FRAME + b"x", FRAME + FRAME])
def test_a_damaged_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError, match="a compressed body"):
        expanded(frame)


def test_a_frame_above_the_size_limit_is_refused_before_expansion() -> None:
    with pytest.raises(DecodeError, match="4000 bytes; the limit is 3999"):
        expanded(FRAME, 3999)
