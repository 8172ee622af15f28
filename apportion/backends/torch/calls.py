"""Matches the calls of ranks: tags messages with their call, and aborts waits if ranks make different calls or one
fails.

    begin ──number, digest──► tag of the call's messages            messages of two calls never meet
    wait  ──half a second──► store of the group: failures · calls of stalled ranks, so that errors name both calls

As long as nothing fails, only messages are sent. A watchdog thread reads the store when a wait takes long.
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, RLock, Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store
from torch.utils.checkpoint import _StopRecomputationError

from apportion.ir.errors import ExecutionError

CHECK_INTERVAL_S = 0.5  # between the watchdog's checks
EXIT_WAIT_S = 5.0  # longest wait for the watchdog's last check when the process exits
RELEASE_S = 0.2  # for gloo's threads when the process exits
HISTORY_CALLS = 64  # calls in a rank's history
_ABORT_TAG = 2**31 - 1  # the largest tag; no call uses it
_QUOTE_LENGTH = 2000  # maximum characters of an error that other ranks quote

_log = logging.getLogger(__name__)
_exiting = Event()


class Wait(NamedTuple):
    """The host's wait for messages. group: their process group; peers: their senders and receivers."""

    since: float
    group: Any
    peers: Collection[int]


class Calls:
    """The calls of this rank in a process group, numbered from 1. tag: tag of the running call's messages, 0 if no
    call runs; history: digest of all calls so far."""

    def __init__(self, group: Any) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.number = self.tag = self.history = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=HISTORY_CALLS)
        self._lock = RLock()
        store = _get_process_group_store(group)
        self._notices = Notices(PrefixStore("apportion", store), self.rank)
        self._wait: Wait | None = None
        self._fault: ExecutionError | None = None
        self._watched = False

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Opens one call; its name must be equal on all ranks. If it raises, the others raise and quote its error.
        Raises ExecutionError if another thread is in a call."""
        if not self._lock.acquire(blocking=False):
            raise ExecutionError(
                f"rank {self.rank}: two threads call at once: {name}, while another is in call {self._current()}. All "
                "ranks must make a communicator's calls in the same order: call from one thread at a time, or give "
                "each a communicator with its own groups"
            )
        previous = self.tag
        self._begin(name)
        try:
            yield
        except BaseException as error:
            # checkpointing ends a recomputation with an exception that the caller's backward expects
            if error is not self._fault and not isinstance(error, _StopRecomputationError):
                self._notices.fail(self.number, name, error)
            raise
        finally:
            self.tag = previous
            self._lock.release()

    def _begin(self, call: str) -> None:
        self._notices.resume()
        self.number += 1
        self._recent.append((self.number, call))
        name = call.encode()
        self.tag = crc32(name, self.number) % (_ABORT_TAG - 1) + 1
        self.history = crc32(name, self.history)

    # --- waits

    def wait(self, works: Sequence[Any], group: Any, peers: Collection[int]) -> None:
        """Waits for `Work` handles. Raises ExecutionError if they fail, with another rank's error if there is one."""
        if not self._watched:
            self._watched = True
            thread = Thread(target=_watch, args=(ref(self),), name="apportion-calls", daemon=True)
            thread.start()
            atexit.register(_stop_watch, thread)
        self._wait = Wait(time.monotonic(), group, peers)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._explain(error, peers) from error
        finally:
            self._wait = None

    def _explain(self, error: RuntimeError, peers: Collection[int]) -> ExecutionError:
        if self._fault is None and (failure := self._notices.failure()):
            self._fault = ExecutionError(f"{failure}. Rank {self.rank} waited in call {self._current()}")
        if self._fault is None:
            ranks = ", ".join(map(str, sorted(peers)))
            self._fault = ExecutionError(
                f"rank {self.rank} waited for ranks {ranks} in call {self._current()}: {error}"
            )
        return self._fault

    def check(self, attempt: int) -> bool:
        """Checks the current wait, on the watchdog thread; `attempt` counts checks. Returns True for a long wait."""
        wait = self._wait
        if wait is None or time.monotonic() - wait.since < CHECK_INTERVAL_S:
            return False
        fault = self._notices.failure()
        if not fault and attempt & (attempt - 1) == 0:  # less and less often: other ranks may just be late
            fault = self._mismatch(wait.peers)
        if fault and self._wait is wait:
            self._fault = ExecutionError(f"{fault}. Rank {self.rank} waited in call {self._current()}")
            _abort(wait.group, self.rank)
        return True

    def _mismatch(self, peers: Collection[int]) -> str:
        """Publishes this rank's calls; returns the difference if a peer is in a different call, else ""."""
        recent = dict(tuple(self._recent))
        self._notices.publish(recent)
        for peer in sorted(peers):
            if fault := _difference({self.rank: recent, peer: self._notices.calls_of(peer)}):
                self._notices.fail(self.number, recent[self.number], ExecutionError(fault))
                return fault
        return ""

    def recent_calls(self) -> str:
        """This rank's latest calls as text, for other ranks."""
        return json.dumps(dict(self._recent))

    def mismatch_error(self, texts: Sequence[str]) -> ExecutionError:
        """The error that ends this call on all ranks, which then resume together. texts: latest calls by rank."""
        ranks = {
            rank: {int(n): call for n, call in json.loads(text).items()} for rank, text in enumerate(texts)
        }
        self.number, self.history = max(map(max, ranks.values())), 0
        self._recent.clear()
        return ExecutionError(
            _difference(ranks) or f"ranks made different calls, more than {HISTORY_CALLS} calls ago"
        )

    def _current(self) -> str:
        number, call = self._recent[-1] if self._recent else (0, "none")
        return f"{number} ({call})"


class Notices:
    """Failures, in order of arrival, and calls of stalled ranks, published in the group's store."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._read = self._published = self._failed_at = 0
        self._has_failed = False  # since its last call began
        self._failed: dict[int, tuple[int, str]] = {}

    def fail(self, number: int, name: str, error: BaseException) -> None:
        self._failed_at, self._has_failed = number, True
        message = f"rank {self._rank} failed in call {number} ({name}): {quoted(error)}"
        self._write([self._rank, number, message])

    def resume(self) -> None:
        """Records that this rank resumes, if it has failed."""
        if self._has_failed:
            self._has_failed = False
            self._write([self._rank, 0, ""])

    def failure(self) -> str:
        """The first failure of another rank that has not resumed since; "" if there is none. Ignores failures up to the
        call in which this rank failed last: the others may resume later."""
        try:
            for index in range(self._read, self._store.add("failures", 0)):
                rank, number, message = json.loads(self._store.get(f"failure/{index}"))
                self._failed.pop(rank, None)
                if number and rank != self._rank:
                    self._failed[rank] = number, message
                self._read = index + 1
        except RuntimeError as error:  # the store's rank is gone: the group reports that too
            _log.debug("cannot check other ranks' calls: %s", error)
        return next((message for number, message in self._failed.values() if number > self._failed_at), "")

    def publish(self, calls: dict[int, str]) -> None:
        latest = max(calls, default=0)
        if latest != self._published:
            self._store.set(f"calls/{self._rank}", json.dumps(calls))
            self._published = latest

    def calls_of(self, rank: int) -> dict[int, str]:
        key = f"calls/{rank}"
        calls = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return {int(number): call for number, call in calls.items()}

    def _write(self, record: list[Any]) -> None:
        try:
            index = self._store.add("written", 1) - 1
            self._store.set(f"failure/{index}", json.dumps(record))
            self._store.add("failures", 1)
        except RuntimeError as error:  # the caller gets the rank's own error
            _log.debug("other ranks were not notified: %s", error)


def _difference(ranks: Mapping[int, Mapping[int, str]]) -> str:
    """Describes the first call in which ranks differ; "" if there is none. ranks: for each rank, number -> call."""
    common = set.intersection(*({*calls} for calls in ranks.values()))
    for number in sorted(common):
        texts = {rank: f"call {number} is {calls[number]}" for rank, calls in ranks.items()}
        if len(set(texts.values())) > 1:
            return (
                f"ranks make different calls: {by_value(texts)}. All ranks must make the same calls "
                "in the same order"
            )
    return ""


def by_value(values: Mapping[int, str], unit: str = "rank") -> str:
    """Describes which ranks have each value: "x on ranks 0, 2; y on rank 1". values: by rank."""
    ranks_of = defaultdict(list)
    for value, rank in sorted((value, rank) for rank, value in values.items()):
        ranks_of[value].append(str(rank))
    return "; ".join(
        f"{value} on {unit}{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for value, ranks in ranks_of.items()
    )


def quoted(error: BaseException | None) -> str:
    """The error's type and message, shortened, for other ranks to quote."""
    return "" if error is None else f"{type(error).__name__}: {error}"[:_QUOTE_LENGTH]


def _stop_watch(thread: Thread) -> None:
    """Runs before the interpreter exits, as a thread that needs the GIL later aborts the process: stops the watchdog,
    which may be in a store call, and lets gloo's threads release the tensors of the last collectives."""
    if not _exiting.is_set():
        _exiting.set()
        time.sleep(RELEASE_S)
    thread.join(EXIT_WAIT_S)


def _watch(current: Callable[[], Calls | None]) -> None:
    attempt = 1
    while not _exiting.wait(CHECK_INTERVAL_S):
        calls = current()
        if calls is None:
            return
        try:
            attempt = attempt + 1 if calls.check(attempt) else 1
        except RuntimeError as error:  # the store is gone: the wait ends by itself
            _log.debug("cannot check other ranks' calls: %s", error)
        del calls


def _abort(group: Any, rank: int) -> None:
    """Ends all waits in a gloo group, with an error: a receive that times out closes the group's connections."""
    peer = dist.get_global_rank(group, (rank + 1) % dist.get_world_size(group))
    work: Any = dist.irecv(torch.zeros(1, device="cpu"), peer, group=group, tag=_ABORT_TAG)
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        _log.debug("group closed: %s", error)


_CALLS: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()


def calls_of(group: Any) -> Calls:
    """The calls of a process group: one object for all communicators that use it."""
    if group not in _CALLS:
        _CALLS[group] = Calls(group)
    return _CALLS[group]
