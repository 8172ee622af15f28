"""Packs: what goes in comes out, one rank without the others, and nothing else is let in."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from apportion.ir.errors import ConfigError, DecodeError, VersionError
from apportion.service import packs
from apportion.service.packs import Pack, Part, etag, pack_of, read_body
from tests.service.pack_fuzz import case

KEY, ID = bytes(range(32)), bytes(range(32, 64))

KEYS = st.binary(min_size=32, max_size=32)
BODIES = st.lists(st.binary(max_size=300), min_size=1, max_size=20).map(tuple)


@dataclass(frozen=True)
class Done:
    id: bytes
    bodies: tuple[bytes, ...]
    assignment: bytes | None


@given(KEYS, KEYS, BODIES)
def test_decode_gives_what_was_encoded(key: bytes, id: bytes, bodies: tuple[bytes, ...]) -> None:
    slices = Pack(key, id, "slices", len(bodies), bodies)
    compact = Pack(key, id, "assignment", 65_535, bodies[:1])
    for pack in (slices, compact):
        assert Pack.decode(pack.encode()) == pack


def test_the_format_is_what_it_says(tmp_path: Path) -> None:
    """The layout of the docstring, written by hand."""
    bodies = (b"first", b"", b"third")
    head = b"APPACK\r\n" + (1).to_bytes(2, "little") + b"\0\0" + (3).to_bytes(4, "little") + KEY + ID
    for body in bodies:
        head += len(body).to_bytes(8, "little") + blake2b(body, digest_size=32).digest()
    expected = head + blake2b(head, digest_size=32).digest() + b"firstthird"
    assert Pack(KEY, ID, "slices", 3, bodies).encode() == expected


@pytest.mark.parametrize("ranks", [1, 199, 201, 5000])
def test_one_body_is_read_alone(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = tuple(b"%d" % rank * 2000 for rank in range(ranks))
    (path := tmp_path / "pack").write_bytes(Pack(KEY, ID, "slices", ranks, bodies).encode())
    got, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: got.append(found := pread(*args)) or found)
    for rank in (0, ranks // 2, ranks - 1):
        assert read_body(path, KEY, rank) == Part("slices", ID, bodies[rank])
    assert sum(map(len, got)) <= 3 * (8192 + 40 * ranks + len(bodies[-1]))
    with pytest.raises(ConfigError, match="rank"):
        read_body(path, KEY, ranks)


def test_every_rank_reads_the_assignment(tmp_path: Path) -> None:
    (path := tmp_path / "pack").write_bytes(Pack(KEY, ID, "assignment", 7, (b"compact",)).encode())
    for rank in range(7):
        assert read_body(path, KEY, rank) == Part("assignment", ID, b"compact")
    with pytest.raises(ConfigError, match="rank"):
        read_body(path, KEY, 7)


def test_a_renamed_pack_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "pack").write_bytes(Pack(KEY, ID, "slices", 1, (b"body",)).encode())
    with pytest.raises(DecodeError, match="it was renamed"):
        read_body(path, ID, 0)


@pytest.mark.parametrize(
    ("total", "assignment", "form"),
    [
        (packs.COMPACT_ABOVE, 10, "slices"),
        (packs.COMPACT_ABOVE + 8, 10, "assignment"),
        (packs.COMPACT_ABOVE + 8, None, "slices"),
        (4 << 20, 1 << 20, "slices"),
        ((4 << 20) + 8, 1 << 20, "assignment"),
    ],
)
def test_the_form_follows_from_the_sizes(total: int, assignment: int | None, form: str) -> None:
    compact = None if assignment is None else bytes(assignment)
    done = Done(ID, (bytes(total // 8),) * 8, compact)
    pack = pack_of(done, KEY)
    assert (pack.form, pack.ranks, pack.key, pack.id) == (form, 8, KEY, ID)
    assert pack.bodies == (done.bodies if form == "slices" else (compact,))


def test_the_etag_is_blake2b() -> None:
    assert etag(b"body") == blake2b(b"body", digest_size=32).hexdigest()


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", b"short"), ("id", "x" * 32), ("form", "plan"), ("ranks", 0), ("ranks", 65_536), ("ranks", 2)],
)
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"key": KEY, "id": ID, "form": "slices", "ranks": 1, "bodies": (b"",)}
    with pytest.raises(ConfigError, match=r"pack\."):
        Pack(**fields | {field: value})


def test_a_newer_format_is_named() -> None:
    data = bytearray(Pack(KEY, ID, "slices", 1, (b"",)).encode())
    data[8] = 2
    with pytest.raises(VersionError, match=r"version 2, this release reads 1: use a release that reads it"):
        Pack.decode(bytes(data))


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", "0 bytes"), (b"x" * 100, "begins with"), (b"\x93" + bytes(500), "begins with")],
)
def test_other_bytes_are_no_pack(data: bytes, text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        Pack.decode(data)


@given(BODIES, st.data())
def test_every_cut_and_every_changed_byte_is_found(bodies: tuple[bytes, ...], data: st.DataObject) -> None:
    whole = Pack(KEY, ID, "slices", len(bodies), bodies).encode()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    for wrong in (whole[:place], bytes(changed), whole + b"\0"):
        with pytest.raises(DecodeError):
            Pack.decode(wrong)


@pytest.mark.parametrize("seed", range(30))
def test_changed_packs_are_refused_by_typed_errors(seed: int) -> None:
    assert case(seed) > 250


def test_a_head_that_promises_much_costs_little() -> None:
    promise = packs._PREFIX.pack(packs.MAGIC, 1, 0, 65_535, KEY, ID) + bytes(1000)
    tracemalloc.start()
    with pytest.raises(DecodeError):
        Pack.decode(promise)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
