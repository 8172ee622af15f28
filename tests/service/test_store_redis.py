"""The store in Redis: its server is killed, hangs, is full or wiped; two servers want the same store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from apportion.ir.errors import VersionError
from apportion.service.errors import StoreError
from apportion.service.store import open_store
from apportion.service.store.redis import ANSWER_S, LEASE_MS
from tests.service.store_redis_kills import case
from tests.service.stores import RedisServer, contents, key_of, opened, pack_bytes, redis_server, until
from tests.support.sparse import sparse


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """An empty Redis."""
    with redis.Redis(port=running.port) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    return running


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        yield client


# ---------------------------------------------------------------------------------------------- the server dies


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_what_returned_survives_a_killed_redis(seed: int, tmp_path: Path) -> None:
    waits = case(seed, tmp_path, kills=1)
    assert waits
    assert max(waits) < 60  # loopback refuses at once; the rest is the load of the machine


def test_calls_fail_at_once_while_redis_is_gone_and_work_when_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        store.commit({"a": b"1"})
        server.kill()
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(
                StoreError, match=rf"Redis at 127.0.0.1:{server.port}/0 (does|did) not answer"
            ):
                store.commit({"a": b"2"})
        assert time.monotonic() - began < 60
        server.start()
        until(lambda: _writes(store), 30, "writes after the restart")
        assert dict(store.records()) == {"a": b"3"}


def _writes(store: Any) -> bool:
    try:
        store.commit({"a": b"3"})
    except StoreError:
        return False
    return True


def test_a_redis_that_hangs_is_given_up(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.url) as store:
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreError, match="does not answer"):
                store.commit({"a": b"1"})
            assert time.monotonic() - began < 8 * ANSWER_S
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        until(lambda: _writes(store), 30, "writes after it goes on")


# ---------------------------------------------------------------------------------------------- one writer

HOLD = """
from apportion.service.store import open_store
store = open_store(sys.argv[1])
store.commit({"written": b"yes"})
print("open", flush=True)
sys.stdin.read()
"""


def test_the_lease_of_a_killed_server_ends(server: RedisServer) -> None:
    command = [sys.executable, "-c", f"import sys\n{HOLD}", server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            with pytest.raises(StoreError, match=rf"in use: process {process.pid} on"):
                open_store(server.url)
        finally:
            process.kill()
    began = time.monotonic()
    with opened(server.url) as store:
        assert time.monotonic() - began < LEASE_MS / 1000 + 60
        assert dict(store.records()) == {"written": b"yes"}


def test_the_lease_is_renewed_while_the_server_lives(server: RedisServer, raw: redis.Redis) -> None:
    with opened(server.url):
        ends = time.monotonic() + LEASE_MS / 1000 + 0.5
        while time.monotonic() < ends:
            assert raw.exists("apportion:lease")
            time.sleep(0.1)
    assert not raw.exists("apportion:lease")


def test_who_lost_the_store_writes_nothing_more(server: RedisServer, raw: redis.Redis) -> None:
    """As after a pause that was longer than the lease."""
    with opened(server.url) as old:
        old.commit({"a": b"old"})
        raw.delete("apportion:lease")
        with opened(server.url) as new:
            new.commit({"a": b"new"})
            for call in (
                lambda: old.commit({"a": b"late"}),
                lambda: old.put_pack(key_of(1), b"late"),
                lambda: old.drop_pack(key_of(2)),
            ):
                with pytest.raises(StoreError, match=r"process .* has taken over the store in Redis"):
                    call()
            time.sleep(LEASE_MS / 1000)  # time for the old one to renew what is not its own
            new.commit({"b": b"new"})
            assert contents(new) == ({"a": b"new", "b": b"new"}, {})


def test_an_expired_lease_that_nobody_took_is_still_good(server: RedisServer, raw: redis.Redis) -> None:
    with opened(server.url) as store:
        raw.delete("apportion:lease")
        store.commit({"a": b"1"})
        until(lambda: bool(raw.exists("apportion:lease")), 10, "the renewal")


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_a_wiped_redis_is_noticed(server: RedisServer, raw: redis.Redis) -> None:
    with opened(server.url) as store:
        store.commit({"a": b"1"})
        raw.flushall()
        with pytest.raises(StoreError, match=r"has lost what was stored \(is it run with appendonly yes\?\)"):
            store.commit({"b": b"1"})


def test_a_full_redis_refuses_as_a_whole(server: RedisServer, raw: redis.Redis) -> None:
    with opened(server.url) as store:
        store.commit({"a": b"1"})
        raw.config_set("maxmemory", 1)
        for call in (
            lambda: store.commit({"a": b"2", "b": b"2"}, ["a"]),
            lambda: store.put_pack(key_of(1), pack_bytes(1)),
        ):
            with pytest.raises(StoreError, match=r"maxmemory.*raise its maxmemory, or keep fewer plans"):
                call()
        raw.config_set("maxmemory", 0)
        assert contents(store) == ({"a": b"1"}, {})


def test_a_redis_that_forgets_is_refused(server: RedisServer, raw: redis.Redis) -> None:
    raw.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match=r"forgets data .*set maxmemory-policy noeviction"):
        open_store(server.url)


def test_a_redis_that_keeps_nothing_on_disk_is_told(
    server: RedisServer, raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    raw.config_set("appendonly", "no")
    try:
        with opened(server.url):
            assert "keeps no append-only file" in caplog.text
    finally:
        raw.config_set("appendonly", "yes")


def test_a_store_of_a_newer_release_is_left_alone(server: RedisServer, raw: redis.Redis) -> None:
    raw.set("apportion:format", 2)
    for read_only in (True, False):
        with pytest.raises(VersionError, match=r"format version 2, this release reads 1"):
            open_store(server.url, read_only=read_only)
    assert raw.keys() == [b"apportion:format"]


def test_keys_of_others_are_left_alone(server: RedisServer, raw: redis.Redis) -> None:
    raw.set("apportion:values", "theirs")
    with opened(server.url) as store, pytest.raises(StoreError, match="WRONGTYPE"):
        store.commit({"a": b"1"})
    assert raw.get("apportion:values") == b"theirs"


def test_passwords_are_needed_and_not_told(server: RedisServer, raw: redis.Redis) -> None:
    raw.config_set("requirepass", "s3cret")
    try:
        for who in ("", ":wrong-pass@"):
            with pytest.raises(StoreError, match="--redis-password-file") as refused:
                open_store(f"redis://{who}127.0.0.1:{server.port}/0")
            assert "wrong-pass" not in str(refused.value)
        with opened(f"redis://:s3cret@127.0.0.1:{server.port}/0") as store:
            store.commit({"a": b"1"})
    finally:
        raw.config_set("requirepass", "")


def test_databases_are_stores_of_their_own(server: RedisServer) -> None:
    with opened(server.url) as first, opened(server.url[:-1] + "5") as second:
        first.commit({"a": b"1"})
        assert contents(second) == ({}, {})


def test_the_missing_package_is_named_with_its_extra() -> None:
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "from apportion.ir.errors import MissingDependencyError\n"
        "from apportion.service.store import open_store\n"
        "try:\n    open_store('redis://127.0.0.1:1/0')\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "a store in Redis needs redis: pip install 'apportion[redis]'\n"


def test_nobody_there_is_a_store_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        url = server.url
    with pytest.raises(StoreError, match="does not answer"):
        open_store(url)
