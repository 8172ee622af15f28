"""Plans by their content address: which are stored, who needs them, and the bodies that are at hand.

    entry ── needed by iterations of any job
          ├─ request       until it is planned
          ├─ problem       why it cannot be
          ├─ stored_bytes  of its pack, 0 before
          └─ bodies        of all ranks, while they are in the cache

Packs that no iteration needs are kept for a restarted job that asks for the same again, until the store is full: the
one that was not needed for longest goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apportion.service.engine.kept.records import ProblemRecord
from apportion.service.limits import Limits

if TYPE_CHECKING:
    from apportion.service.engine.kept.state import Iteration

_REMEMBERED = 4096  # batches that cannot be planned


@dataclass(frozen=True, slots=True)
class Body:
    """What a rank gets. data: `IterationSlice.encode()`; etag: hex digest of it; id: of the iteration plan."""

    data: bytes
    etag: str
    id: bytes


class Entry:
    """One content address that somebody needs."""

    __slots__ = (
        "bodies", "id", "key", "loading", "long", "planned_ms", "problem", "ready_at", "request", "stored_bytes",
        "takes", "task", "users",
    )  # fmt: skip

    def __init__(self, key: bytes, stored_bytes: int = 0) -> None:
        self.key, self.stored_bytes = key, stored_bytes
        self.request = b""
        self.problem: ProblemRecord | None = None
        self.id: bytes | None = None  # of the plan, where it is known
        self.planned_ms: float | None = None  # at the worker; None where an earlier server planned it
        self.ready_at: float | None = None  # since 1970; likewise
        self.bodies: tuple[Body, ...] | None = None
        self.long = False  # it was tried where only short plans may be
        self.takes = 0  # how often one of these was taken
        self.users: set[Iteration] = set()
        self.task: asyncio.Task[None] | None = None  # that plans and publishes it
        self.loading: asyncio.Task[tuple[Body, ...] | None] | None = None

    @property
    def state(self) -> str:
        """queued, planning, ready, refused or quarantined."""
        if self.problem is not None:
            return self.problem.type
        if self.stored_bytes:
            return "ready"
        return "queued" if self.task is None else "planning"


class Library:
    """The entries, and the sizes of all packs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[bytes, Entry] = {}
        # of what cannot be planned, whoever asks
        self._problems: OrderedDict[bytes, ProblemRecord] = OrderedDict()
        self._idle: dict[bytes, int] = {}  # stored packs that nobody needs, longest idle first
        self._uncounted: set[bytes] = set()  # whose packs were to be dropped, and are asked for again
        self.cache = Cache(limits.cache_bytes)
        self.packs = self.pack_bytes = 0
        self.record_bytes = 0  # of the store, as it told lately
        self.unplanned = self.unplanned_bytes = 0

    def index(self, packs: Iterable[tuple[bytes, int]]) -> None:
        """Packs of the store, (key, bytes), oldest first."""
        self._idle.update(packs)
        self.packs = len(self._idle)
        self.pack_bytes = sum(self._idle.values())

    def may_drop(self, key: bytes) -> bool:
        """Whether the pack, one of `excess`, is still of no use. If not: it is counted again when the same is stored
        anew, and excess again where that never happens."""
        entry = self._entries.get(key)
        if entry is not None and not entry.stored_bytes:
            self._uncounted.add(key)
        return entry is None and key not in self._idle

    def need(self, key: bytes, user: Iteration, request: bytes) -> None:
        """Gives the user its entry, which is there until all its users have released it."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, self._idle.pop(key, 0))
            entry.problem = self._problems.get(key)
        if request and not entry.request and entry.state == "queued":
            self.expect(entry, request)
        entry.users.add(user)
        user.entry = entry

    def release(self, user: Iteration) -> None:
        """One user less. What is being planned for nobody is still finished and stored."""
        user.entry.users.discard(user)
        self._forget_unused(user.entry)

    def expect(self, entry: Entry, request: bytes) -> None:
        """It is to be planned."""
        self._settle(entry)
        entry.request = request
        self.unplanned += 1
        self.unplanned_bytes += len(request)

    def stored(self, entry: Entry, stored_bytes: int, bodies: tuple[Body, ...]) -> None:
        """Its pack is in the store."""
        self._settle(entry)
        self._uncounted.discard(entry.key)
        self.packs += not entry.stored_bytes
        self.pack_bytes += stored_bytes - entry.stored_bytes
        entry.stored_bytes = stored_bytes
        self.keep(entry, bodies)

    def keep(self, entry: Entry, bodies: tuple[Body, ...], asked: bool = False) -> None:
        """Its bodies are at hand. asked: a rank waits for one."""
        entry.id = bodies[0].id
        if entry.users:
            self.cache.put(entry, bodies, asked)

    def given_up(self, entry: Entry, problem: ProblemRecord, for_good: bool = False) -> None:
        """It will not be planned. for_good: nor will the same in a later epoch, until the server is started anew."""
        self._settle(entry)
        entry.problem = problem
        if for_good:
            self._problems[entry.key] = problem
            while len(self._problems) > _REMEMBERED:
                self._problems.popitem(last=False)

    def lost(self, entry: Entry) -> None:
        """Its pack is damaged or gone."""
        self.packs -= entry.stored_bytes > 0
        self.pack_bytes -= entry.stored_bytes
        entry.stored_bytes = 0
        self.cache.drop(entry)

    def finished(self, entry: Entry) -> None:
        """Its task has ended."""
        entry.task = None
        self._forget_unused(entry)

    def discard(self, keys: Iterable[bytes]) -> list[bytes]:
        """Packs of these that nobody needs, which are no longer counted: to be dropped."""
        found = [key for key in keys if key in self._idle]
        self.packs -= len(found)
        self.pack_bytes -= sum(self._idle.pop(key) for key in found)
        return found

    def excess(self) -> list[bytes]:
        """Packs to drop, which are no longer counted."""
        found = [key for key in self._uncounted if key not in self._entries]
        self._uncounted.difference_update(found)
        while self._idle and (
            self.pack_bytes + self.record_bytes > self._limits.store_bytes
            or self.packs > self._limits.store_packs
        ):
            key = next(iter(self._idle))
            self.packs -= 1
            self.pack_bytes -= self._idle.pop(key)
            found.append(key)
        return found

    def _settle(self, entry: Entry) -> None:
        if entry.request:
            self.unplanned -= 1
            self.unplanned_bytes -= len(entry.request)
            entry.request = b""

    def _forget_unused(self, entry: Entry) -> None:
        if entry.users or entry.task is not None or self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._settle(entry)
        self.cache.drop(entry)
        if entry.stored_bytes:
            self._idle[entry.key] = entry.stored_bytes


class Cache:
    """Bodies, so many bytes of them. What goes first: of what all ranks have taken, the oldest; of what none has taken
    yet, the latest, which will be needed last; of the others, which ranks are taking now, the oldest."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._spent: OrderedDict[Entry, int] = OrderedDict()
        self._fresh: OrderedDict[Entry, int] = OrderedDict()
        self._taken: OrderedDict[Entry, int] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._spent) + len(self._fresh) + len(self._taken)

    def put(self, entry: Entry, bodies: tuple[Body, ...], asked: bool) -> None:
        """Keeps the bodies while there is room."""
        self.drop(entry)
        size = sum(len(body.data) for body in bodies)
        entry.bodies, entry.takes = bodies, 0
        (self._taken if asked else self._fresh)[entry] = size
        self.bytes += size
        while self.bytes > self._most and len(self):
            self.drop(self._least())

    def touch(self, entry: Entry) -> None:
        """A rank takes a body of it."""
        entry.takes += 1
        if entry.takes == 1 and entry in self._fresh:
            self._taken[entry] = self._fresh.pop(entry)
        if entry.bodies is not None and entry.takes == len(entry.bodies):
            self.spend(entry)

    def spend(self, entry: Entry) -> None:
        """The ranks are done with it."""
        for tier in (self._taken, self._fresh):
            if entry in tier:
                self._spent[entry] = tier.pop(entry)

    def drop(self, entry: Entry) -> None:
        """Forgets the bodies."""
        entry.bodies = None
        self.bytes -= sum(tier.pop(entry, 0) for tier in (self._spent, self._fresh, self._taken))

    def _least(self) -> Entry:
        if self._fresh and not self._spent:
            return next(reversed(self._fresh))
        return next(iter(self._spent or self._taken))
