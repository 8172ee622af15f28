"""Frames: what was sent comes out, however it is sliced; what was changed or cut does not."""

from __future__ import annotations

import random
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import pytest

from apportion.ir.errors import DecodeError
from apportion.ir.hashing import digest
from apportion.service.client import ClientError
from apportion.service.client.answers import Received, problem
from apportion.service.client.waits import TransientError
from apportion.service.frames import HEAD, Frame, FrameError, FrameReader, Kind, encode_frame, encode_head
from tests.service.small_server import bodies

PROBLEM = b'{"type": "urn:apportion:problem:gone", "status": 410, "detail": "a later epoch has begun"}'
FRAMES = [
    encode_frame(Kind.HEARTBEAT, 5),
    encode_frame(Kind.PLAN, 5, b"five" * 100),
    encode_frame(Kind.PLAN, 2**64 - 1, b"x"),
    encode_frame(Kind.PROBLEM, 6, PROBLEM),
    encode_frame(Kind.END, 7),
]


def read(data: bytes, step: int = 1 << 20) -> list[Frame]:
    reader = FrameReader()
    found = [frame for at in range(0, len(data), step) for frame in reader.feed(data[at : at + step])]
    reader.close()
    return found


def test_bytes_are_as_documented() -> None:
    fields = "41504631 01 000000 0700000000000000 02000000"
    b2sum = "f65a5e77ff5e2690ad316b7b9fc28dd90cc5c9a37e617ac3eee1403de3cf9a55"  # of "ab", -l 256
    assert encode_frame(Kind.PLAN, 7, b"ab") == bytes.fromhex(f"{fields} {b2sum} 9deda6e4") + b"ab"


def test_a_known_digest_is_not_computed_again() -> None:
    body = b"body"
    assert encode_head(Kind.PLAN, 3, len(body), digest(body)) + body == encode_frame(Kind.PLAN, 3, body)


@pytest.mark.parametrize("step", [1, 2, 55, 56, 57, 100, 1 << 20])
def test_slicing_does_not_matter(step: int) -> None:
    found = read(b"".join(FRAMES), step)
    assert [(frame.kind, frame.iteration) for frame in found] == [
        (Kind.HEARTBEAT, 5),
        (Kind.PLAN, 5),
        (Kind.PLAN, 2**64 - 1),
        (Kind.PROBLEM, 6),
        (Kind.END, 7),
    ]
    assert found[1].body == b"five" * 100
    assert found[1].digest == digest(found[1].body)


def test_no_changed_bit_goes_unnoticed() -> None:
    whole = encode_frame(Kind.PLAN, 5, b"five")
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            read(bytes(changed))


def test_no_cut_goes_unnoticed() -> None:
    whole = encode_frame(Kind.PLAN, 5, b"five")
    for size in range(1, len(whole)):
        reader = FrameReader()
        assert reader.feed(whole[:size]) == []
        with pytest.raises(FrameError, match=f"cut after {size if size < HEAD else size - HEAD} of"):
            reader.close()


def test_frames_before_a_fault_are_given_and_nothing_after_it() -> None:
    reader = FrameReader()
    broken = bytearray(FRAMES[1])
    broken[-1] ^= 1
    assert len(reader.feed(FRAMES[0] + bytes(broken) + FRAMES[2])) == 1
    for _ in range(2):
        with pytest.raises(FrameError, match="changed on the way"):
            reader.feed(FRAMES[3])
    with pytest.raises(FrameError):
        reader.close()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (encode_head(Kind.PLAN, 0, 11, bytes(32)), "11 bytes, at most 10"),
        (encode_head(Kind.END, 0, 1, bytes(32)), "1 bytes, at most 0"),
        (encode_head(9, 0, 0, bytes(32)), "kind 9"),
        (b"HTTP/1.1 200 OK\r\n" + bytes(60), "begins with b'HTTP'"),
    ],
)
def test_the_head_is_refused_before_its_body_comes(head: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameReader(max_body=10).feed(head)


# ---- fuzzing

MOST_BYTES, MOST_S = 64e6, 0.05
Mutation = Callable[[random.Random, bytearray], None]


@dataclass
class Fuzzed:
    """Of `count` mutated streams, how many were refused, and the worst of them."""

    count: int
    refused: int = 0
    worst_s: float = 0.0
    worst_bytes: int = 0
    grown_bytes: int = 0  # of the whole process


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _write(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((1, 2, 4, 8))] = rng.choice(
        (b"\xff" * 4, bytes(4), b"\xdf\xff\xff\xff\xff", b"\xc1")
    )


def _remove(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 16, 200))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    at, size = rng.randrange(len(data)), rng.choice((1, 4, 60, 400))
    data[at:at] = data[at : at + size]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 2, 30)))


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


MUTATIONS: tuple[Mutation, ...] = (_flip, _write, _remove, _repeat, _insert, _cut)


def _sealed(rng: random.Random, body: bytes) -> bytes:
    """A frame whose checksums fit a body or a head that does not make sense: only the decoders can refuse it."""
    changed = bytearray(body)
    rng.choice(MUTATIONS)(rng, changed)
    kind, size = rng.choice((Kind.PLAN, Kind.PLAN, Kind.PLAN, Kind.PROBLEM)), len(changed)
    if rng.random() < 0.1:
        size = rng.choice((0, size + 1, 1 << 26, (1 << 26) + 1, 2**32 - 1))
    return encode_head(kind, rng.getrandbits(64), size, digest(bytes(changed))) + changed


def _mutated(rng: random.Random, plans: list[bytes]) -> bytes:
    body = rng.choice([*plans, *plans, PROBLEM])
    if rng.random() < 0.5:
        return rng.choice(FRAMES) + _sealed(rng, body) + rng.choice(FRAMES)
    data = bytearray(rng.choice(FRAMES) + encode_frame(Kind.PLAN, 6, body) + rng.choice(FRAMES))
    for _ in range(rng.choice((1, 1, 2, 4))):
        if data:
            rng.choice(MUTATIONS)(rng, data)
    return bytes(data)


def _receive(data: bytes, step: int) -> None:
    """As a client does."""
    received = Received()
    for frame in read(data, step):
        if frame.kind is Kind.PLAN:
            received.decode(frame.body, 1, frame.iteration, 0)
        elif frame.kind is Kind.PROBLEM:
            raise problem(frame.body)


def _measure(data: bytes, step: int, record: Fuzzed) -> float:
    tracemalloc.reset_peak()
    before, since = tracemalloc.get_traced_memory()[0], time.thread_time()
    try:
        _receive(data, step)
    except (DecodeError, ClientError, TransientError):
        record.refused += 1
    elapsed = time.thread_time() - since
    record.worst_bytes = max(record.worst_bytes, tracemalloc.get_traced_memory()[1] - before)
    return elapsed


def _alone(data: bytes, step: int) -> float:
    """Seconds, the best of four, with nobody else watching: coverage and tracemalloc make it four times as long."""
    tracer = sys.gettrace()
    sys.settrace(None)
    tracemalloc.stop()
    try:
        return min(_seconds(data, step) for _ in range(4))
    finally:
        tracemalloc.start()
        sys.settrace(tracer)


def _seconds(data: bytes, step: int) -> float:
    since = time.thread_time()
    with suppress(DecodeError, ClientError, TransientError):
        _receive(data, step)
    return time.thread_time() - since


def fuzz(count: int, seed: int) -> Fuzzed:
    """`count` mutated streams raise nothing but typed errors, each within 64 MB and 50 ms."""
    rng, record = random.Random(seed), Fuzzed(count)
    plans = [ranks[0] for ranks in bodies(3)]
    _receive(encode_frame(Kind.PLAN, 0, plans[0]), 1 << 16)  # the first one imports what decoding needs
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for _ in range(count):
            data, step = _mutated(rng, plans), rng.choice((1, 7, 64, 1000, 1 << 16, 1 << 16))
            elapsed = _measure(data, step, record)
            if elapsed > MOST_S:
                elapsed = _alone(data, step)
            record.worst_s = max(record.worst_s, elapsed)
    finally:
        tracemalloc.stop()
    record.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10
    assert record.worst_bytes <= MOST_BYTES, record
    assert record.worst_s <= MOST_S, record
    return record


def case(seed: int) -> dict[str, float]:
    """100,000 of them."""
    return asdict(fuzz(100_000, seed))


@pytest.mark.parametrize("seed", range(3))
def test_mutated_streams_raise_typed_errors(seed: int) -> None:
    record = fuzz(300, seed)
    assert record.refused > 200
