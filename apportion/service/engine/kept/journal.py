"""The store, from the event loop: one thread that makes its calls in order, and commits that are made together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from apportion.service.errors import StoreError
from apportion.service.store import Store

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
PROBE = "probe"  # a record that says nothing
_NO_PACK = bytes(32)
_MANY = 512  # records that may wait for a commit that somebody else needs


@dataclass(frozen=True)
class _Write:
    puts: Mapping[str, bytes]
    done: asyncio.Future[None]


class Journal:
    """Commits wait for the one under way and are then made as one: a disk flush serves all who wait for it.

    What nobody waits for (`later`) goes with the next commit. errors: how often the store failed. trouble: how it did,
    until a commit succeeds again.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.errors = 0
        self.trouble = ""
        self._thread = ThreadPoolExecutor(1, "apportion-store")
        self._waiting: list[_Write] = []
        self._puts: dict[str, bytes] = {}
        self._drops: set[str] = set()
        self._flusher: asyncio.Task[None] | None = None
        self._closed = False

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """The function's result, called in the store's thread. Raises StoreError also after `close`."""
        if self._closed:
            raise StoreError("the server has stopped")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except StoreError as error:
            self.errors += 1
            self.trouble = str(error)
            raise

    async def probe(self) -> str:
        """What is wrong with the store, "" where nothing is: it is read, and written where it had failed."""
        with contextlib.suppress(StoreError):
            await self.call(self.store.has_pack, _NO_PACK)
            if self.trouble:
                await self.try_to_write()
        return self.trouble

    async def try_to_write(self) -> None:
        """So that `probe` knows of a disk that is full or read-only before anybody submits."""
        with contextlib.suppress(StoreError):
            await self.commit({PROBE: b""})
            self.later({}, [PROBE])

    def commit(self, puts: Mapping[str, bytes]) -> asyncio.Future[None]:
        """Its turn is now; done when it is durable. Raises StoreError: then it may or may not have happened."""
        for key in puts:
            self._puts.pop(key, None)
        self._drops.difference_update(puts)
        write = _Write(puts, asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        self._start()
        return write.done

    def later(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        """Goes with the next commit. A key that is put again before is not dropped."""
        self._puts.update(puts)
        self._drops.difference_update(puts)
        self._drops.update(drops)
        for key in drops:
            self._puts.pop(key, None)
        if len(self._drops) > _MANY:
            self._start()

    async def flush(self) -> None:
        """Commits what waits. Raises StoreError."""
        if self._puts or self._drops:
            await self.commit({})

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result; while the store fails it is made again, after pauses that grow."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except StoreError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Waits for the call under way; the store stays open."""
        self._closed = True
        self._thread.shutdown()

    def _start(self) -> None:
        if self._flusher is None:
            self._flusher = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting or len(self._drops) > _MANY:
                writes, self._waiting = self._waiting, []
                error = await self._together([write.puts for write in writes])
                for write in writes:
                    _answer(write.done, error)
                if error is not None and not self._waiting:
                    break
        finally:
            self._flusher = None

    async def _together(self, writes: list[Mapping[str, bytes]]) -> Exception | None:
        """One commit for all; what nobody waits for is kept where it failed."""
        puts, lazy, drops = dict[str, bytes](), self._puts, self._drops
        self._puts, self._drops = {}, set()
        for write in (*writes, lazy):
            puts.update(write)
        for key in drops:
            puts.pop(key, None)
        try:
            await self.call(self.store.commit, puts, drops)
        except Exception as error:
            self._keep(lazy, drops)
            return error
        self.trouble = ""
        return None

    def _keep(self, lazy: Mapping[str, bytes], drops: set[str]) -> None:
        """Back among what goes with the next commit, except what was written anew in the meantime."""
        newer = self._puts.keys() | self._drops | {key for write in self._waiting for key in write.puts}
        self._puts.update({key: data for key, data in lazy.items() if key not in newer})
        self._drops.update(drops - newer)


def _answer(done: asyncio.Future[None], error: Exception | None) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # whoever waited was cancelled
        done.set_result(None) if error is None else done.set_exception(error)
