"""A store in Redis, under keys that expire. Lost packs are planned again."""

from __future__ import annotations

import time
from collections.abc import Callable
from logging import getLogger
from threading import Lock
from typing import Any, TypeVar

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ConfigError, DecodeError, MissingDependencyError
from apportion.ir.version import __version__
from apportion.service.pack import Pack, read_slice
from apportion.service.store.protocol import StoreError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise MissingDependencyError("redis", "redis", "storing plans in Redis") from error

TIMEOUT_S = 2.0  # timeout of a command
BACKOFF_S = 5.0  # back-off after no answer, so that requests do not each wait for the timeout
DEFAULT_AGE_S = 86400.0
LOG = getLogger(__name__)
T = TypeVar("T")


class RedisStore:
    """Store in Redis. url: in redis-py's format, with user, password and database number. Raises ConfigError, and
    StoreError if there is no answer."""

    def __init__(self, url: str, max_age_s: float | None = None) -> None:
        self._age_s = int(DEFAULT_AGE_S if max_age_s is None else max(1.0, max_age_s))
        self._failed: tuple[str, str] | None = None  # a command, and the reason for its failure
        self._retry_at, self._lock = 0.0, Lock()  # end of the back-off after no answer
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))  # once, for connections that a restart broke
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=retry
            )
        except ValueError as error:
            raise ConfigError("store", "redis://...", str(error), "write redis://HOST:PORT/0") from None
        self._call("PING")

    def get(self, key: bytes) -> Pack | None:
        data = self._call("GET", _name(key))
        return None if data is None else self._decode_or_drop(key, lambda: Pack.decode(data, key))

    def slice(self, key: bytes, rank: int) -> IterationSlice | None:
        def read(offset: int, size: int) -> bytes:
            data: bytes = self._call("GETRANGE", _name(key), offset, offset + size - 1)
            return data

        exists = self._call("EXISTS", _name(key))
        return self._decode_or_drop(key, lambda: read_slice(read, key, rank)) if exists else None

    def put(self, pack: Pack) -> None:
        self._call("SET", _name(pack.key), pack.data, "EX", self._age_s)

    def problem(self) -> str | None:
        failure = self._failed
        return None if failure is None else failure[1]

    def close(self) -> None:
        self._redis.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._admit(name)
        try:
            answer: Any = self._redis.execute_command(name, *arguments)  # type: ignore[no-untyped-call]
        except redis.RedisError as error:
            if isinstance(error, redis.ConnectionError | redis.TimeoutError):
                self._retry_at = time.monotonic() + BACKOFF_S
            self._failed = name, f"Redis: {error}"
            raise StoreError(f"cannot {name}: {self.problem()}") from error
        self._retry_at, failure = 0.0, self._failed
        if failure is not None and name in ("SET", failure[0]):  # a read does not prove that SET works
            self._failed = None
        return answer

    def _admit(self, name: str) -> None:
        """While Redis does not answer, admits one call at a time as a probe. Raises StoreError."""
        with self._lock:
            now = time.monotonic()
            if now < self._retry_at:
                raise StoreError(f"cannot {name}: {self.problem()}")
            if self._retry_at:
                self._retry_at = now + BACKOFF_S

    def _decode_or_drop(self, key: bytes, decode: Callable[[], T]) -> T | None:
        """The decoded value; None if the data is damaged, which is then logged and removed."""
        try:
            return decode()
        except DecodeError as error:
            LOG.warning("Redis, %s: %s; it is planned again", _name(key), error)
            self._call("DEL", _name(key))
            return None


def _name(key: bytes) -> str:
    return f"apportion:{__version__}:{key.hex()}"
