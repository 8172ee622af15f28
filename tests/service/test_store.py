"""What every store does. A new store passes this file with one line in `stores.STORES`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from apportion.ir.errors import ConfigError, DecodeError
from apportion.service.errors import StoreError
from apportion.service.packs import Pack
from apportion.service.store import Store, open_store
from apportion.service.store.names import PAGE
from tests.service.stores import LASTING, STORES, Place, contents, key_of, opened, pack_bytes, place_of

STRANGE = [
    "../../etc/passwd",
    "a/../b",
    "/",
    "~",
    "a b\n",
    "\0",
    "x\0y",
    "é",
    "漢字/1",
    "😀",
    "'; DROP TABLE records",
    "%00",
    "-",
]


@pytest.fixture(scope="module", params=STORES)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp(request.param)
    with place_of(request.param, folder) as place, opened(place) as store:
        yield store


@pytest.fixture
def store(shared: Store) -> Store:
    """An empty store."""
    shared.commit({}, [key for key, _ in shared.records()])
    for key, _ in list(shared.packs()):
        shared.drop_pack(key)
    return shared


@pytest.fixture(params=LASTING)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place_of(request.param, tmp_path) as found:
        yield found


# ---------------------------------------------------------------------------------------------- records


def test_records_are_sorted_by_code_points_and_found_by_prefix(store: Store) -> None:
    keys = [*STRANGE, "job/b", "job/a", "job", "job0", "job/", "jo"]
    store.commit({key: key.encode() for key in keys})
    assert list(store.records()) == [(key, key.encode()) for key in sorted(keys)]
    assert [key for key, _ in store.records("job/")] == ["job/", "job/a", "job/b"]
    assert [key for key, _ in store.records("job/a")] == ["job/a"]
    assert list(store.records("nothing")) == []


def test_a_commit_puts_and_drops_at_once(store: Store) -> None:
    store.commit({"a": b"1", "b": b"2", "c": b""})
    store.commit({"b": b"3", "d": b"\0\xff"}, ["a", "unknown", "d"])
    assert dict(store.records()) == {"b": b"3", "c": b"", "d": b"\0\xff"}


@pytest.mark.parametrize("count", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_records_are_all_there_over_pages(store: Store, count: int) -> None:
    store.commit({f"r/{i:06}": str(i).encode() for i in range(count)})
    assert [int(value) for _, value in store.records("r/")] == list(range(count))


def test_records_may_change_while_they_are_read(store: Store) -> None:
    store.commit({f"{i:06}": b"" for i in range(3 * PAGE)})
    seen = []
    for key, _ in store.records():
        seen.append(key)
        if len(seen) % 20 == 0:
            store.commit({f"{len(seen):06}+": b""}, [key])
    assert seen == sorted(set(seen))
    assert {f"{i:06}" for i in range(3 * PAGE)} <= set(seen)


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "\ud800"])
def test_keys_that_are_no_text_of_moderate_length_are_refused(store: Store, key: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        store.commit({"fine": b"", key: b""})
    assert not list(store.records())


def test_values_are_bytes(store: Store) -> None:
    wrong: Any = "text"
    with pytest.raises(ConfigError, match="must be bytes"):
        store.commit({"a": wrong})


# ---------------------------------------------------------------------------------------------- packs


def test_a_pack_is_read_as_it_was_put(store: Store) -> None:
    data = pack_bytes(1)
    assert store.read_pack(key_of(1)) is None
    assert store.read_body(key_of(1), 0) is None
    assert not store.has_pack(key_of(1))
    store.put_pack(key_of(1), data)
    assert store.read_pack(key_of(1)) == data
    assert store.has_pack(key_of(1))
    assert not store.has_pack(key_of(2))


def test_putting_a_pack_again_does_nothing(store: Store) -> None:
    for number in (2, 1, 2):
        store.put_pack(key_of(number), pack_bytes(number))
    assert [key for key, _ in store.packs()] == [key_of(2), key_of(1)]


def test_packs_come_in_the_order_in_which_they_were_put(store: Store) -> None:
    numbers = list(range(PAGE + 1))
    for number in numbers:
        store.put_pack(key_of(number), bytes(number))
    store.drop_pack(key_of(5))
    store.put_pack(key_of(5), bytes(5))
    expected = [*numbers[:5], *numbers[6:], 5]
    assert list(store.packs()) == [(key_of(number), number) for number in expected]


def test_packs_know_when_they_were_put(store: Store) -> None:
    store.put_pack(key_of(1), pack_bytes(1))
    time.sleep(0.01)
    between_s = time.time()
    time.sleep(0.01)
    store.put_pack(key_of(2), pack_bytes(2))
    assert store.packs_before(between_s) == [key_of(1)]
    assert sorted(store.packs_before(time.time() + 1.0)) == sorted([key_of(1), key_of(2)])
    store.drop_pack(key_of(1))
    assert store.packs_before(between_s) == []


def test_records_tell_how_much_they_take(store: Store) -> None:
    before = store.record_bytes()
    store.commit({f"a/{number}": bytes(1000) for number in range(1000)})
    assert 0.5e6 < store.record_bytes() - before < 5e6
    store.commit({}, [f"a/{number}" for number in range(1000)])
    assert store.record_bytes() - before < 0.5e6


def test_a_dropped_pack_is_gone(store: Store) -> None:
    store.put_pack(key_of(1), pack_bytes(1))
    store.drop_pack(key_of(1))
    store.drop_pack(key_of(1))
    assert store.read_pack(key_of(1)) is None
    assert not list(store.packs())


def test_one_body_is_read_without_the_others(store: Store) -> None:
    bodies = (b"", b"a" * 10, b"b" * 100_000, *(bytes([i]) * i for i in range(253)))
    pack = Pack(key_of(1), key_of(2), "slices", len(bodies), bodies)
    store.put_pack(key_of(1), pack.encode())
    for rank in (0, 1, 2, 3, 255):
        part = store.read_body(key_of(1), rank)
        assert part is not None
        assert (part.form, part.id, part.data) == ("slices", key_of(2), bodies[rank])
    with pytest.raises(ConfigError, match="rank"):
        store.read_body(key_of(1), 256)
    store.put_pack(key_of(3), Pack(key_of(3), key_of(4), "assignment", 256, (b"compact",)).encode())
    part = store.read_body(key_of(3), 200)
    assert part is not None
    assert (part.form, part.data) == ("assignment", b"compact")


def test_a_damaged_body_is_refused(store: Store) -> None:
    data = bytearray(pack_bytes(1))
    data[-1] ^= 1
    store.put_pack(key_of(1), bytes(data))
    assert store.read_body(key_of(1), 0) is not None
    with pytest.raises(DecodeError, match="body 3 differs"):
        store.read_body(key_of(1), 3)


@pytest.mark.parametrize(
    "key", [b"", b"short", b"x" * 33, "x" * 32, "../../../../etc/passwd/packs/abc", None]
)
def test_keys_of_packs_are_32_bytes(store: Store, key: Any) -> None:
    for call in (
        store.read_pack,
        store.has_pack,
        store.drop_pack,
        lambda key: store.put_pack(key, b""),
        lambda key: store.read_body(key, 0),
    ):
        with pytest.raises(ConfigError, match="32 bytes"):
            call(key)


def test_a_pack_of_8_mb(store: Store) -> None:
    data = pack_bytes(7, 8 << 20, 128)
    store.put_pack(key_of(7), data)
    assert store.read_pack(key_of(7)) == data
    assert list(store.packs()) == [(key_of(7), len(data))]


def test_many_threads(store: Store) -> None:
    def work(thread: int) -> None:
        rng = random.Random(thread)
        for i in range(20):
            number = rng.randrange(30)
            store.put_pack(key_of(number), pack_bytes(number))
            store.commit({f"{thread}/{i:02}": key_of(number)}, [f"{thread}/{i - 5:02}"] if i >= 5 else ())
            assert store.read_pack(key_of(number)) == pack_bytes(number)
            assert [key for key, _ in store.records(f"{thread}/")][-1] == f"{thread}/{i:02}"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    records, packs = contents(store)
    assert len(records) == 8 * 5
    assert all(Pack.decode(data).key == key for key, data in packs.items() if data)


# ---------------------------------------------------------------------------------------------- anything in any order


def test_it_behaves_like_a_dictionary(store: Store) -> None:
    """Random histories against two dictionaries."""
    names = ["a", "a/b", "a/b/1", "é", *STRANGE]
    for seed in range(20):
        rng = random.Random(seed)
        records: dict[str, bytes] = dict(store.records())
        packs = {key: store.read_pack(key) for key, _ in store.packs()}
        for _ in range(10):
            puts = {rng.choice(names): rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(4))}
            drops = rng.sample(names, rng.randrange(3))
            store.commit(puts, drops)
            records = {key: value for key, value in records.items() if key not in drops} | puts
            number = rng.randrange(6)
            if rng.random() < 0.6:
                store.put_pack(key_of(number), pack_bytes(number))
                packs.setdefault(key_of(number), pack_bytes(number))
            else:
                store.drop_pack(key_of(number))
                packs.pop(key_of(number), None)
            prefix = rng.choice(["", "a", "a/", "é"])
            expected = sorted(item for item in records.items() if item[0].startswith(prefix))
            assert list(store.records(prefix)) == expected
        assert contents(store) == (records, packs)
        assert [key for key, _ in store.packs()] == list(packs)


# ---------------------------------------------------------------------------------------------- opening and closing


@pytest.mark.parametrize("name", STORES)
def test_a_closed_store_says_so(name: str, tmp_path: Path) -> None:
    with place_of(name, tmp_path) as place:
        store = open_store(place)
        store.close()
        store.close()
    calls: list[Callable[[], object]] = [
        lambda: list(store.records()),
        lambda: list(store.packs()),
        lambda: store.commit({}),
        lambda: store.put_pack(key_of(1), b""),
        lambda: store.read_pack(key_of(1)),
        lambda: store.read_body(key_of(1), 0),
        lambda: store.has_pack(key_of(1)),
        lambda: store.drop_pack(key_of(1)),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="closed"):
            call()


def test_what_was_written_is_there_when_it_is_opened_again(place: Place) -> None:
    with opened(place) as store:
        store.commit({key: key.encode() for key in STRANGE})
        for number in range(5):
            store.put_pack(key_of(number), pack_bytes(number))
        before = contents(store)
    with opened(place) as store:
        assert contents(store) == before
    with opened(place, read_only=True) as store:
        assert contents(store) == before


def test_a_second_writer_is_told_who_writes(place: Place) -> None:
    with opened(place) as store:
        began = time.monotonic()
        with pytest.raises(StoreError, match=rf"in use: process {os.getpid()} on .* writes it; stop that"):
            open_store(place)
        assert time.monotonic() - began < 30
        store.commit({"a": b"1"})
    with opened(place) as store:
        assert dict(store.records()) == {"a": b"1"}


def test_nothing_is_written_through_a_store_for_reading(place: Place) -> None:
    with opened(place) as store:
        store.put_pack(key_of(1), b"1")
    with opened(place, read_only=True) as first, opened(place, read_only=True) as second:
        for store in (first, second):
            for call in (
                lambda store=store: store.commit({"a": b""}),
                lambda store=store: store.put_pack(key_of(1), b""),
                lambda store=store: store.drop_pack(key_of(1)),
            ):
                with pytest.raises(StoreError, match="reading only"):
                    call()
            assert contents(store) == ({}, {key_of(1): b"1"})


def test_there_must_be_a_store_to_read(place: Place) -> None:
    with pytest.raises(ConfigError, match="there is no store"):
        open_store(place, read_only=True)


@pytest.mark.parametrize(
    "url", ["", "plans", "memory", "sqlite:", "http://x", "redis:x", "redis://127.0.0.1:no/0"]
)
def test_urls_of_nothing_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        open_store(url)
