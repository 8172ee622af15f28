"""Packs that were changed: only what is refused by a typed error, or read as the same pack."""

from __future__ import annotations

import random
import struct

from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.hashing import digest
from apportion.service.packs import Pack, part_at

PREFIX, ROW = struct.Struct("<8sHBxI32s32s"), struct.Struct("<Q32s")
NUMBERS = (0, 1, 2, 3, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1)
SIZES = (*NUMBERS, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def random_pack(rng: random.Random) -> Pack:
    ranks = rng.choice((1, 2, 5, 300))
    form = rng.choice(("slices", "assignment"))
    bodies = tuple(rng.randbytes(rng.choice((0, 1, 200))) for _ in range(ranks if form == "slices" else 1))
    return Pack(rng.randbytes(32), rng.randbytes(32), form, ranks, bodies)


def case(seed: int, changes: int = 300) -> int:
    """Changes a pack in many ways, and reads what came out. How many were refused; raises AssertionError where a pack
    was read that is another one than was written, any other error where it is not a typed one."""
    rng = random.Random(seed)
    pack = random_pack(rng)
    data, refused = pack.encode(), 0
    for _ in range(changes):
        change = rng.choice((_flipped, _cut, _added, _moved, _forged))
        refused += _refused(change(data, rng), pack, change is _forged)
    return refused


def _refused(data: bytes, pack: Pack, forged: bool) -> bool:
    try:
        found = Pack.decode(data)
    except DecodeError:
        _read_bodies(data, pack)
        return True
    if not forged and found != pack:
        raise AssertionError(f"{data[:200]!r} was read as another pack")
    if found.encode() != data:
        raise AssertionError(f"{data[:200]!r} is a second way to write {found.key.hex()}")
    return False


def _read_bodies(data: bytes, pack: Pack) -> None:
    """One rank at a time only typed errors come out as well."""
    for rank in (0, pack.ranks - 1, pack.ranks):
        try:
            part_at(lambda start, size: data[start : start + size], pack.key, rank)
        except (DecodeError, ConfigError):
            continue


# ---------------------------------------------------------------------------------------------- changes


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(min(len(data), rng.choice((16, 80, 300, len(data)))))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _added(data: bytes, rng: random.Random) -> bytes:
    place = rng.choice((0, len(data), rng.randrange(len(data))))
    return data[:place] + rng.randbytes(rng.choice((1, 32, 80))) + data[place:]


def _moved(data: bytes, rng: random.Random) -> bytes:
    start, stop = sorted(rng.choices(range(len(data)), k=2))
    return data[start:stop] + data[:start] + data[stop:]


def _forged(data: bytes, rng: random.Random) -> bytes:
    """Another head with a right digest: numbers that promise too much, or too little."""
    magic, version, form, ranks, key, id = PREFIX.unpack_from(data)
    rows = list(ROW.iter_unpack(data[PREFIX.size : PREFIX.size + ROW.size * (ranks if form == 0 else 1)]))
    body = data[PREFIX.size + ROW.size * len(rows) + 32 :]
    change = rng.randrange(5)
    if change == 0:
        ranks = rng.choice(NUMBERS)
    elif change == 1:
        form = rng.choice((0, 1, 2, 255))
    elif change == 2:
        rows[rng.randrange(len(rows))] = (rng.choice(SIZES), rng.randbytes(32))
    elif change == 3:
        version = rng.choice((0, 2, 65_535))
    else:
        rows = rows[: rng.randrange(len(rows) + 1)]
    head = PREFIX.pack(magic, version, form, ranks, key, id) + b"".join(ROW.pack(*row) for row in rows)
    return head + digest(head) + body
