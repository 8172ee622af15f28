"""A store in Redis, for servers on more than one machine, one at a time.

    apportion:format          version of this layout
    apportion:writer          who opened it last for writing: nobody else may write
    apportion:lease           who writes; ends 2 s after its process did
    apportion:values          hash      key → value of the records
    apportion:keys            sorted    their keys, in order
    apportion:packs           sorted    keys of the packs, by when they were put (ms since 1970)
    apportion:pack:…          bytes     of a pack, by its key in hex

Each write is one script, so it happens as a whole. It lasts as long as Redis keeps what it has answered: with
`appendonly yes` and `appendfsync always` that is for good.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from apportion.ir.errors import ConfigError, MissingDependencyError, VersionError
from apportion.service.errors import StoreBusyError, StoreError, StoreLostError
from apportion.service.packs import Part, check_key, part_at
from apportion.service.store import names
from apportion.service.store.files import holder

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:
    raise MissingDependencyError("redis", "redis", "a store in Redis") from None

VERSION = 1
LEASE_MS = 2000  # after which another server may take over from one that died
CONNECT_S = 1.0
PASSWORD = "APPORTION_REDIS_PASSWORD"  # the environment's
ANSWER_S = 5.0  # of Redis, to one command
LONGEST_PAUSE_S = 1.0  # between attempts to reach it

_PREFIX = "apportion:"
_FORMAT, _WRITER, _LEASE, _VALUES, _KEYS, _PACKS = (
    _PREFIX + name for name in ("format", "writer", "lease", "values", "keys", "packs")
)

# Scripts that write answer {1} where they did.
_OPEN = """
local held = redis.call('GET', KEYS[2])
if held then return {0, held, redis.call('PTTL', KEYS[2])} end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[3], ARGV[4], 'NX')
return {1}
"""
_IF_LAST = """
local last = redis.call('GET', KEYS[1])
if last ~= ARGV[1] then return {0, last, redis.call('GET', KEYS[2])} end
"""
_RENEW = f"{_IF_LAST} redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) return {{1}}"
_LEAVE = f"{_IF_LAST} redis.call('DEL', KEYS[2]) return {{1}}"
_COMMIT = f"""{_IF_LAST}
local puts = tonumber(ARGV[2])
for i = 3, 2 + 2 * puts, 2 do
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[4], 0, ARGV[i])
end
for i = 3 + 2 * puts, #ARGV do
  redis.call('HDEL', KEYS[3], ARGV[i])
  redis.call('ZREM', KEYS[4], ARGV[i])
end
return {{1}}
"""
_PUT = f"""{_IF_LAST}
redis.call('SET', KEYS[4], ARGV[3])
if not redis.call('ZSCORE', KEYS[3], ARGV[2]) then
  local newest = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')
  redis.call('ZADD', KEYS[3], math.max((newest[2] or 0) + 1, tonumber(ARGV[4])), ARGV[2])
end
return {{1}}
"""
_DROP = f"""{_IF_LAST}
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[3], ARGV[2])
return {{1}}
"""
_PAGE = """
local keys = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
if #keys == 0 then return {{}, {}} end
return {keys, redis.call('HMGET', KEYS[1], unpack(keys))}
"""

_TIMES = 10**12  # scores of packs from here on are times
_GONE = (redis.ConnectionError, redis.TimeoutError)
_T = TypeVar("_T")


class RedisStore:
    """`Store` in a Redis database. Raises what `open_store` raises."""

    may_be_wiped = True

    def __init__(self, url: str, read_only: bool = False, password: str | None = None) -> None:
        self._link = _Link(url, password)
        self._read_only = read_only
        self._order = Lock()  # a write that is repeated on a new connection must not undo a later one
        self._lease: _Lease | None = None
        try:
            _check_server(self._link)
            _check_format(self._link, read_only)
            if not read_only:
                _warn_of_losses(self._link)
                self._lease = _Lease(self._link)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------ records

    def records(self, prefix: str = "", damaged: list[str] | None = None) -> Iterator[tuple[str, bytes]]:
        return names.records(self._records, prefix, damaged)

    def _records(self, first: bytes, last: bytes) -> list[names.Record]:
        bounds = (b"[" + first, b"(" + last, names.PAGE)
        keys, values = self._link.run("read records", _PAGE, (_VALUES, _KEYS), bounds)
        return list(zip(keys, values, strict=True))

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        written, dropped = names.changes(puts, drops)
        pairs = (part for record in written for part in record)
        self._write("commit records", _COMMIT, (_VALUES, _KEYS), (len(written), *pairs, *dropped))

    # ------------------------------------------------------------------------------------------ packs

    def put_pack(self, key: bytes, data: bytes) -> None:
        if not self.has_pack(key) or self._read_only:
            self._write("store a pack", _PUT, (_PACKS, _pack(key)), (key, data, int(time.time() * 1e3)))

    def read_pack(self, key: bytes) -> bytes | None:
        name = _pack(key)
        found: bytes | None = self._link.call("read a pack", lambda client: client.get(name))
        return found

    def read_body(self, key: bytes, rank: int) -> Part | None:
        name = _pack(key)

        def read(start: int, size: int) -> bytes:
            return self._link.call(
                "read a pack", lambda client: client.getrange(name, start, start + size - 1) if size else b""
            )

        return part_at(read, key, rank) if self.has_pack(key) else None

    def has_pack(self, key: bytes) -> bool:
        name = _pack(key)
        return bool(self._link.call("look for a pack", lambda client: client.exists(name)))

    def drop_pack(self, key: bytes) -> None:
        self._write("drop a pack", _DROP, (_PACKS, _pack(key)), (key,))

    def packs(self) -> Iterator[tuple[bytes, int]]:
        newest = 0.0
        while found := self._pack_page(newest):
            yield from ((key, size) for key, _, size in found)
            newest = found[-1][1]

    def packs_before(self, time_s: float) -> list[bytes]:
        return self._link.call(
            "list packs", lambda client: list(client.zrangebyscore(_PACKS, _TIMES, f"({int(time_s * 1e3)}"))
        )

    def record_bytes(self) -> int:
        return self._link.call(
            "look at the records", lambda client: int(client.memory_usage(_VALUES, samples=64) or 0)
        )

    def _pack_page(self, after: float) -> list[tuple[bytes, float, int]]:
        """(key, number, bytes) of the next packs."""

        def read(client: Any) -> list[tuple[bytes, float, int]]:
            found = client.zrangebyscore(_PACKS, f"({after}", "+inf", 0, names.PAGE, withscores=True)
            sizes = client.pipeline(transaction=False)
            for key, _ in found:
                sizes.strlen(_pack(key))
            return [(key, number, size) for (key, number), size in zip(found, sizes.execute(), strict=True)]

        return self._link.call("list packs", read)

    # ------------------------------------------------------------------------------------------ the whole

    @property
    def lost(self) -> str:
        return "" if self._lease is None else self._lease.lost

    def keep_room(self) -> None:
        """It has no disk."""

    make_room = keep_room

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.leave()
        self._link.close()

    def _write(self, task: str, script: str, keys: tuple[str, ...], values: tuple[Any, ...]) -> None:
        if self._read_only:
            raise StoreError(f"{self._link.place} was opened for reading only")
        lease = self._lease
        if lease is None:
            raise StoreError(f"the store in {self._link.place} is closed")
        with self._order:
            lease.run(task, script, keys, values)


class _Link:
    """The connections to a server. A call that fails is not repeated but once, on a new connection; after it, calls
    fail at once until a pause is over, that grows up to 1 s."""

    def __init__(self, url: str, password: str | None) -> None:
        self.place, pool = _pool(url, password)
        self._client = redis.Redis(connection_pool=pool)
        self._lock = Lock()
        self._pause, self._again = 0.0, 0.0
        self._closed = False

    def run(self, task: str, script: str, keys: tuple[str, ...], values: tuple[Any, ...]) -> Any:
        return self.call(task, lambda client: client.eval(script, len(keys), *keys, *values))

    def call(self, task: str, ask: Callable[[Any], _T]) -> _T:
        """What `ask` makes of the client. Raises StoreError."""
        self._check(task)
        try:
            answer = ask(self._client)
        except redis.RedisError as error:
            self._wait_after(error)
            raise StoreError(f"cannot {task}: Redis at {self.place}{_said(error)}") from error
        self._pause = 0.0
        return answer

    def _check(self, task: str) -> None:
        if self._closed:
            raise StoreError(f"the store in {self.place} is closed")
        left = self._again - time.monotonic()
        if self._pause and left > 0:
            raise StoreError(
                f"cannot {task}: Redis at {self.place} did not answer and is tried again in {left:.2f} s"
            )

    def _wait_after(self, error: Exception) -> None:
        if isinstance(error, _GONE):
            with self._lock:
                self._pause = min(LONGEST_PAUSE_S, 2 * self._pause or 0.05)
                self._again = time.monotonic() + self._pause

    def close(self) -> None:
        self._closed = True
        self._client.close()
        self._client.connection_pool.disconnect()


def _check_server(link: _Link) -> None:
    """Raises StoreError where the server drops what it was given."""
    memory: Any = link.call("open the store", lambda client: client.info("memory"))
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        raise StoreError(
            f"Redis at {link.place} forgets data when memory is short (maxmemory-policy {policy}): "
            "set maxmemory-policy noeviction, or name a Redis of its own"
        )


def _warn_of_losses(link: _Link) -> None:
    persistence: Any = link.call("open the store", lambda client: client.info("persistence"))
    if not persistence.get("aof_enabled"):
        text = (
            "Redis at %s keeps no append-only file: what is stored is lost when it stops; set appendonly yes"
        )
        logging.getLogger(__name__).warning(text, link.place)


def _check_format(link: _Link, must_exist: bool) -> None:
    found = link.call("open the store", lambda client: client.get(_FORMAT))
    if found is None and must_exist:
        rule = "there is no store"
        raise ConfigError("store", link.place, rule, "name the Redis and the database of a server")
    if found not in (None, str(VERSION).encode()):
        raise VersionError(
            f"Redis at {link.place} holds a store of format version {found[:20].decode(errors='replace')}, "
            f"this release reads {VERSION}: use a newer release, or another database"
        )


class _Lease:
    """The right to write, renewed by a thread while the process lives. Raises StoreError where another has it."""

    def __init__(self, link: _Link) -> None:
        self._link, self._holder = link, holder()
        self.lost = ""  # why nothing more may be written
        self._token = f"{uuid4().hex} {self._holder}"
        self._take()
        self._left = Event()
        self._thread = Thread(target=self._keep, name="apportion-lease", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        """Waits for the lease of a process that died to end; one that lives renews it."""
        least = LEASE_MS + 1
        keys, values = (_WRITER, _LEASE, _FORMAT), (self._token, self._holder, LEASE_MS, VERSION)
        while True:
            done, *held = self._link.run("open the store", _OPEN, keys, values)
            if done:
                return
            if held[1] > least or held[1] < 0:
                raise StoreBusyError(
                    f"Redis at {self._link.place} is in use: {held[0].decode(errors='replace')} writes it; "
                    "stop that server, or name another database"
                )
            least = held[1]
            time.sleep(0.05)

    def run(self, task: str, script: str, keys: tuple[str, ...], values: tuple[Any, ...]) -> None:
        """Run a script of the last writer."""
        done, *found = self._link.run(task, script, (_WRITER, _LEASE, *keys), (self._token, *values))
        if not done:
            self.lost = self._why_lost(*found)
            raise StoreLostError(f"cannot {task}: {self.lost}; start this server again")

    def _why_lost(self, last: bytes | None = None, other: bytes | None = None) -> str:
        if last is None:
            return f"Redis at {self._link.place} has lost what was stored (is it run with appendonly yes?)"
        who = "another server" if other is None else other.decode(errors="replace")
        return f"{who} has taken over the store in Redis at {self._link.place}"

    def _keep(self) -> None:
        while not self._left.wait(LEASE_MS / 4000):
            with suppress(StoreError):  # the next write tells
                self._renew()

    def _renew(self) -> None:
        self.run("renew the lease", _RENEW, (), (self._holder, LEASE_MS))

    def leave(self) -> None:
        self._left.set()
        self._thread.join()
        with suppress(StoreError):  # it ends by itself
            self.run("close the store", _LEAVE, (), ())


def _pool(url: str, password: str | None) -> tuple[str, redis.ConnectionPool]:
    """(where it is, without password; connections). Raises ConfigError."""
    password = password or os.environ.get(PASSWORD)
    own = {} if password is None else {"password": password}
    try:
        parts = urlsplit(url)
        place = f"{parts.hostname or 'localhost'}:{parts.port or 6379}/{parts.path.strip('/') or 0}"
        return place, redis.ConnectionPool.from_url(
            url,
            protocol=2,  # any Redis; the third begins with a greeting that hides why one is refused
            socket_read_size=1 << 18,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            **own,
            retry=Retry(NoBackoff(), 1, (redis.ConnectionError,)),  # the server was started again
        )
    except ValueError:  # its text may have the password
        rule = "is not the URL of a Redis"
        raise ConfigError("store", url.split("@")[-1], rule, "write redis://HOST:PORT/0") from None


def _said(error: Exception) -> str:
    """What went wrong and what to do about it."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return f": {error}; say --redis-password-file, or {PASSWORD} in the environment; a user goes into the URL: redis://USER@HOST/0"
    if isinstance(error, _GONE):
        return f" does not answer ({error}): it is tried again by itself; see that it runs and can be reached"
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return f": {error}; raise its maxmemory, or keep fewer plans"
    return f": {error}; see its log"


def _pack(key: bytes) -> str:
    return f"{_PREFIX}pack:{check_key('key', key).hex()}"
