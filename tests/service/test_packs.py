"""Packs: one rank's slice is read without the others, and changed bytes are refused."""

from __future__ import annotations

import random

import pytest

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.transport import decompress
from apportion.ir.errors import DecodeError
from apportion.service.pack import Pack, Read, read_slice
from tests.service.requests import RANKS, Request

REQUEST = Request(1)


@pytest.fixture(scope="module")
def pack() -> Pack:
    return REQUEST.pack()


def reader_of(data: bytes, read_sizes: list[int] | None = None) -> Read:
    def read(offset: int, size: int) -> bytes:
        part = data[offset : offset + size]
        if read_sizes is not None:
            read_sizes.append(len(part))
        return part

    return read


def test_a_pack_has_the_slices_of_all_ranks_and_the_request(pack: Pack) -> None:
    assert [decompress(pack.slice(rank)) for rank in range(RANKS)] == REQUEST.slices()
    assert (pack.request, pack.key, pack.ranks) == (REQUEST.data, REQUEST.key, RANKS)
    assert pack.report["ranks"] == RANKS
    assert Pack.decode(pack.data).data == pack.data
    assert REQUEST.pack().data == pack.data  # equal requests, equal bytes


def test_a_pack_without_ranks_is_refused() -> None:
    data = Pack.encode(REQUEST.key, bytes(32), {}, REQUEST.data, []).data
    with pytest.raises(DecodeError, match="1 sizes and 1 digests"):
        Pack.decode(data)


def test_a_slice_is_read_without_the_others(pack: Pack) -> None:
    read_sizes: list[int] = []
    big = pack.data + bytes(1 << 20)  # bytes after the pack are not read either
    decoded = read_slice(reader_of(big, read_sizes), REQUEST.key, 2)
    assert decoded.encode() == REQUEST.slices()[2]
    assert sum(read_sizes) <= (64 << 10) + len(pack.slice(2))


def test_a_pack_with_any_changed_byte_is_refused(pack: Pack) -> None:
    rng, slices = random.Random(5), REQUEST.slices()
    for _ in range(300):
        data = bytearray(pack.data)
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        with pytest.raises(DecodeError):
            Pack.decode(bytes(data), REQUEST.key)
        for rank in range(RANKS):  # the change may be in another rank's slice
            try:
                decoded = read_slice(reader_of(bytes(data)), REQUEST.key, rank)
            except DecodeError:
                continue
            assert isinstance(decoded, IterationSlice)
            assert decoded.encode() == slices[rank]
        with pytest.raises(DecodeError):
            Pack.decode(pack.data[: rng.randrange(len(pack.data))])
    with pytest.raises(DecodeError, match="renamed"):
        Pack.decode(pack.data, bytes(32))
    with pytest.raises(DecodeError, match="extended"):
        Pack.decode(pack.data + b"a")
