"""A store in this process, for tests and for servers whose plans need not outlive them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from heapq import nsmallest
from threading import Lock

from apportion.service.errors import StoreError
from apportion.service.packs import Part, check_key, part_at
from apportion.service.store import names


class MemoryStore:
    """`Store` in dictionaries. Every one is a store of its own."""

    may_be_wiped, lost = False, ""

    def __init__(self) -> None:
        self._lock = Lock()
        self._records: dict[bytes, bytes] = {}
        self._packs: dict[bytes, bytes] = {}
        self._times: dict[bytes, float] = {}
        self._open = True

    def records(self, prefix: str = "", damaged: list[str] | None = None) -> Iterator[tuple[str, bytes]]:
        self._check()
        return names.records(self._page, prefix, damaged)

    def _page(self, first: bytes, last: bytes) -> list[names.Record]:
        with self._lock:
            found = ((key, value) for key, value in self._records.items() if first <= key < last)
            return nsmallest(names.PAGE, found)

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        self._check()
        written, dropped = names.changes(puts, drops)
        with self._lock:
            self._records.update(written)
            for key in dropped:
                self._records.pop(key, None)

    def put_pack(self, key: bytes, data: bytes) -> None:
        self._check()
        self._packs.setdefault(check_key("key", key), data)
        self._times.setdefault(key, time.time())

    def read_pack(self, key: bytes) -> bytes | None:
        self._check()
        return self._packs.get(check_key("key", key))

    def read_body(self, key: bytes, rank: int) -> Part | None:
        data = self.read_pack(key)
        return None if data is None else part_at(lambda start, size: data[start : start + size], key, rank)

    def has_pack(self, key: bytes) -> bool:
        return self.read_pack(key) is not None

    def drop_pack(self, key: bytes) -> None:
        self._check()
        self._packs.pop(check_key("key", key), None)
        self._times.pop(key, None)

    def packs(self) -> Iterator[tuple[bytes, int]]:
        self._check()
        return iter([(key, len(data)) for key, data in list(self._packs.items())])

    def packs_before(self, time_s: float) -> list[bytes]:
        self._check()
        return [key for key, put_s in list(self._times.items()) if put_s < time_s]

    def record_bytes(self) -> int:
        self._check()
        with self._lock:
            return sum(len(key) + len(value) for key, value in self._records.items())

    def keep_room(self) -> None:
        """It has no disk."""

    make_room = keep_room

    def close(self) -> None:
        self._open = False

    def _check(self) -> None:
        if not self._open:
            raise StoreError("the store is closed")
