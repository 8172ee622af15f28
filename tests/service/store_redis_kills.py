"""Redis is killed and started again while a store writes to it: nothing that returned is lost."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from apportion.service.errors import StoreError
from apportion.service.store import Store
from tests.service.stores import RedisServer, contents, key_of, opened, pack_bytes, redis_server, until


@dataclass
class Writer:
    """Writes until it is told to stop, and does again what failed.

    waits: seconds that each call took which failed.
    """

    store: Store
    seed: int
    records: dict[str, bytes] = field(default_factory=dict)
    packs: dict[bytes, bytes | None] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    stopped: Event = field(default_factory=Event)

    def __call__(self) -> None:
        rng, number = random.Random(self.seed), 0
        while not self.stopped.is_set():
            number += 1
            puts = {f"{rng.randrange(50):02}": rng.randbytes(100), "last": str(number).encode()}
            drops = [f"{rng.randrange(50, 60)}"]
            while not self._try(number, puts, drops):
                self.stopped.wait(0.01)
            self.records |= puts
            self.packs[key_of(number % 40)] = pack_bytes(number % 40, 5000)

    def _try(self, number: int, puts: dict[str, bytes], drops: list[str]) -> bool:
        began = time.monotonic()
        try:
            self.store.put_pack(key_of(number % 40), pack_bytes(number % 40, 5000))
            self.store.commit(puts, drops)
        except StoreError:
            self.waits.append(time.monotonic() - began)
            return False
        return True

    @property
    def written(self) -> int:
        return int(self.records.get("last", b"0"))


def case(seed: int, folder: Path, kills: int = 3) -> list[float]:
    """Some kills during a run. Seconds that each failed call took; raises AssertionError where something was lost."""
    with redis_server(folder) as server, opened(server.url) as store:
        writer = Writer(store, seed)
        thread = Thread(target=writer)
        thread.start()
        try:
            for kill in range(kills):
                _kill(server, writer, random.Random(f"{seed} {kill}"))
        finally:
            writer.stopped.set()
            until(lambda: not thread.is_alive() or _revived(server), 120, "the writer")
            thread.join()
        if contents(store) != (writer.records, writer.packs):
            raise AssertionError(f"seed {seed}: Redis holds something else than what was written")
        return writer.waits


def _kill(server: RedisServer, writer: Writer, rng: random.Random) -> None:
    before, failed = writer.written, len(writer.waits)
    until(lambda: writer.written > before + 5, 60, "the first writes")
    time.sleep(rng.random() * 0.05)
    server.kill()
    until(lambda: len(writer.waits) > failed, 60, "the first failure")
    time.sleep(rng.random() * 3)  # also beyond the end of the lease
    server.start()
    before = writer.written
    until(lambda: writer.written > before, 60, "writes after the restart")


def _revived(server: RedisServer) -> bool:
    """Where a step failed, the writer still needs a server to end."""
    if server.process is None:
        server.start()
    return False
