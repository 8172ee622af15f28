"""Stores, a folder and a real Redis: a stored pack is read back or missing, never changed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__
from apportion.service.pack import Pack
from apportion.service.store import Folder, StoreError, open_store
from tests.service.requests import RANKS, Request
from tests.service.stores import redis_server

REQUEST = Request(1)


@pytest.fixture(scope="module")
def packs() -> list[Pack]:
    return [Request(number).pack() for number in range(4)]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(params=["folder", "redis"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else request.getfixturevalue("redis_url")


def test_a_stored_pack_is_read_back(target: str, packs: list[Pack]) -> None:
    with closing(open_store(target)) as store:
        assert store.get(bytes(32)) is None
        assert store.slice(bytes(32), 0) is None
        for pack in [*packs, packs[0]]:
            store.put(pack)
        for pack in packs:
            assert store.get(pack.key).data == pack.data
        assert [store.slice(REQUEST.key, rank).encode() for rank in range(RANKS)] == REQUEST.slices()
        with pytest.raises(ConfigError, match="rank"):
            store.slice(REQUEST.key, RANKS)
        assert store.problem() is None


def overwrite_pack(target: str, key: bytes, data: bytes) -> None:
    """Overwrites a pack of the store with other bytes."""
    if target.startswith("redis"):
        import redis

        with closing(redis.Redis.from_url(target)) as client:
            client.set(f"apportion:{__version__}:{key.hex()}", data)
    else:
        Folder(Path(target)).path(key).write_bytes(data)


@pytest.mark.parametrize("wrong", ["cut", "changed", "renamed", "empty"])
def test_a_damaged_pack_counts_as_missing(target: str, wrong: str, packs: list[Pack]) -> None:
    pack = packs[1]
    changed = bytearray(pack.data)
    changed[-1] ^= 1  # of the last rank's slice
    data = {"cut": pack.data[:-1], "changed": bytes(changed), "renamed": packs[0].data, "empty": b""}[wrong]
    with closing(open_store(target)) as store:
        for read in (lambda: store.get(pack.key), lambda: store.slice(pack.key, RANKS - 1)):
            store.put(pack)
            overwrite_pack(target, pack.key, data)
            assert read() is None
            store.put(pack)
            assert store.get(pack.key).data == pack.data


# ---- the folder


def test_links_and_pipes_are_not_followed(tmp_path: Path, packs: list[Pack]) -> None:
    store, outside = Folder(tmp_path / "store"), tmp_path / "outside"
    path = store.path(REQUEST.key)
    path.parent.mkdir(parents=True)
    outside.write_bytes(packs[1].data)
    path.symlink_to(outside)
    with pytest.raises(StoreError):
        store.get(REQUEST.key)
    path.unlink()
    os.mkfifo(path)
    assert store.get(REQUEST.key) is None  # without waiting for a writer
    path.symlink_to(outside)
    store.put(packs[1])
    assert not path.is_symlink()
    assert store.get(REQUEST.key).data == outside.read_bytes()


def test_a_full_disk_is_reported_and_leaves_no_partial_file(tmp_path: Path, packs: list[Pack]) -> None:
    store, limit = Folder(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(packs[0].data) - 1, limit[1]))
        with pytest.raises(StoreError, match="MiB are free"):
            store.put(packs[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert "too large" in store.problem()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.put(packs[0])
    assert store.problem() is None


def put_aged(store: Folder, packs: list[Pack]) -> None:
    """Stores the packs, each last used a day before the next one."""
    for days, pack in enumerate(reversed(packs)):
        store.put(pack)
        os.utime(store.path(pack.key), (time.time() - days * 86400,) * 2)


def stored_numbers(store: Folder, packs: list[Pack]) -> list[int]:
    return [number for number, pack in enumerate(packs) if store.path(pack.key).is_file()]


def test_the_least_recently_used_packs_are_evicted_by_size_and_age(tmp_path: Path, packs: list[Pack]) -> None:
    store = Folder(tmp_path)
    put_aged(store, packs)
    assert store.prune(max_age_s=2.5 * 86400) == (1, len(packs[0].data))
    assert stored_numbers(store, packs) == [1, 2, 3]
    assert store.get(packs[1].key) is not None  # reading resets its age
    assert store.prune(max_bytes=len(packs[1].data) + len(packs[3].data))[0] == 1
    assert stored_numbers(store, packs) == [1, 3]
    full = Folder(tmp_path, max_bytes=2 * len(packs[0].data))
    for pack in packs:
        full.put(pack)
    assert len(stored_numbers(full, packs)) <= 2
    assert 3 in stored_numbers(full, packs)


def _put_often(root: Path, packs: list[bytes]) -> None:
    store = Folder(root, max_bytes=3 * len(packs[0]))
    for number in range(100):
        pack = Pack.decode(packs[number % len(packs)])
        store.put(pack)
        stored = store.get(pack.key)
        assert stored is None or stored.data == pack.data


def test_processes_share_a_folder(tmp_path: Path, packs: list[Pack]) -> None:
    context = get_context("spawn")
    data = [pack.data for pack in packs]
    processes = [context.Process(target=_put_often, args=(tmp_path, data)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert not list(tmp_path.rglob("*.part"))


def test_many_plans_are_counted_quickly(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    for number in range(20_000):
        path = store.path(number.to_bytes(2, "big") + bytes(30))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    began = time.process_time()
    assert len(list(store.files())) == 20_000
    assert time.process_time() - began < 5.0


def test_an_unreadable_folder_is_reported(tmp_path: Path, packs: list[Pack]) -> None:
    store = Folder(tmp_path, max_bytes=1 << 20)
    store.put(packs[0])
    subfolder = tmp_path / __version__ / "zz"
    subfolder.symlink_to(subfolder)  # cannot be opened, like a folder of another user
    with pytest.raises(StoreError, match="zz"):
        Folder(tmp_path, max_bytes=1 << 20).put(packs[1])
    subfolder.unlink()


# ---- invalid stores


@pytest.mark.parametrize("target", ["", "redis://127.0.0.1:port/0"])
def test_invalid_store_names_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        open_store(target)


def test_an_unreachable_redis_is_reported() -> None:
    with pytest.raises(StoreError):
        open_store("redis://user:word@127.0.0.1:1/0")


def test_a_hanging_redis_is_waited_for_only_once(tmp_path: Path, packs: list[Pack]) -> None:
    import redis

    with redis_server(tmp_path) as url, closing(open_store(url)) as store:
        store.put(packs[0])
        with closing(redis.Redis.from_url(url)) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        for pack in 5 * packs:
            with pytest.raises(StoreError, match="Timeout"):
                store.get(pack.key)
        assert time.monotonic() - began < 4.0
        os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + 10.0
        while store.problem() is not None and time.monotonic() < end:
            with suppress(StoreError):
                assert store.get(packs[0].key).data == packs[0].data
        assert store.problem() is None


def test_a_full_redis_is_reported_although_it_can_be_read(tmp_path: Path, packs: list[Pack]) -> None:
    import redis

    with redis_server(tmp_path) as url, closing(open_store(url)) as store:
        store.put(packs[0])
        with closing(redis.Redis.from_url(url)) as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreError, match="maxmemory"):
                store.put(packs[1])
            assert store.get(packs[0].key).data == packs[0].data
            assert "maxmemory" in store.problem()
            client.config_set("maxmemory", 0)
            store.put(packs[1])
            assert store.problem() is None
            client.hset(f"apportion:{__version__}:{packs[2].key.hex()}", "other", "type")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.get(packs[2].key)
        store.put(packs[2])  # ends the report of a read, too
        assert store.problem() is None
