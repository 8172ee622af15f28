"""A process that writes a store and is killed, at a chosen step or at any time; then what it left is looked at.

    parent   history of a seed ──► child: opens, does the history, says what returned ──► SIGKILL
             opens the store: all that had returned is there, the one that had not is there whole or not at all
             … the next child goes on with what had not returned

Run as a program, this is the child: FOLDER SEED FIRST CALL COUNT PHASE. It is killed before (0), in the middle of (1)
or after (2) the COUNTth of its calls of that name; at none where the name is "none".
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from apportion.service.store import finish
from apportion.service.store.files import PART
from apportion.service.store.sqlite import SqliteStore, pack_keys
from tests.service.stores import contents, key_of, opened, pack_bytes

#: what a store asks of the system, and up to which of such calls a child is killed
CALLS = {
    "open": 12,
    "write": 4,
    "fsync": 12,
    "replace": 6,
    "unlink": 6,
    "mkdir": 4,
    "ftruncate": 4,
    "pwrite": 2,
}
SQLITE_CALLS = {"execute": 60, "executemany": 12, "close": 4}
_write = os.write


@dataclass(frozen=True)
class Kill:
    """A moment: before, in the middle of or after a call."""

    call: str = "none"
    count: int = 0
    phase: int = 0

    @staticmethod
    def drawn(rng: random.Random) -> Kill:
        calls = CALLS | SQLITE_CALLS
        call = rng.choice([*calls, *4 * ["write"], "replace", "execute"])
        return Kill(call, rng.randrange(calls[call]), rng.randrange(3))


# ---------------------------------------------------------------------------------------------- histories


@dataclass
class Model:
    """What a store should hold."""

    records: dict[str, bytes] = field(default_factory=dict)
    packs: dict[bytes, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """kind: commit, put, drop, reopen, finish."""

    kind: str
    puts: dict[str, bytes] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    number: int = 0
    size: int = 0

    def on_model(self, model: Model) -> Model:
        records, packs, key = dict(model.records), dict(model.packs), key_of(self.number)
        if self.kind == "commit":
            for name in self.drops:
                records.pop(name, None)
            records |= self.puts
        elif self.kind == "put":
            packs.setdefault(key, pack_bytes(self.number, self.size))
        elif self.kind == "drop":
            packs.pop(key, None)
        return Model(records, packs)

    def on_store(self, store: SqliteStore) -> SqliteStore:
        if self.kind == "commit":
            store.commit(self.puts, self.drops)
        elif self.kind == "put":
            store.put_pack(key_of(self.number), pack_bytes(self.number, self.size))
        elif self.kind == "drop":
            store.drop_pack(key_of(self.number))
        else:
            store.close()
            if self.kind == "finish":
                finish(store.folder)
            return SqliteStore(store.folder)
        return store


def history(seed: int, length: int = 40) -> list[Action]:
    """The actions of a seed."""
    rng = random.Random(seed)
    return [_action(rng) for _ in range(length)]


def _action(rng: random.Random) -> Action:
    kind = rng.choices(("commit", "put", "drop", "reopen", "finish"), (8, 8, 3, 1, 1))[0]
    number = rng.randrange(12)
    if kind != "commit":
        return Action(kind, number=number, size=40_000 + number)
    puts = {
        f"r/{rng.randrange(20):02}": rng.randbytes(rng.choice((5, 5000))) for _ in range(rng.randrange(1, 9))
    }
    return Action("commit", puts, tuple(f"r/{rng.randrange(20):02}" for _ in range(rng.randrange(4))))


# ---------------------------------------------------------------------------------------------- the parent


def case(seed: int, folder: Path, kills: int = 5) -> None:
    """One history with several kills. Raises AssertionError where the store lost or tore something."""
    rng, actions = random.Random(~seed), history(seed)
    store, done, before = folder / "store", 0, Model()
    for turn in range(kills + 1):
        anytime = turn < kills and rng.random() < 0.3
        kill = Kill() if anytime or turn == kills else Kill.drawn(rng)
        returned = _run_child(store, seed, done, kill, rng.random() * 0.05 if anytime else None)
        for action in actions[done : done + returned]:
            before = action.on_model(before)
        done += returned
        after = actions[done].on_model(before) if done < len(actions) else before
        _check(store, before, after)
    if done != len(actions):
        raise AssertionError(f"seed {seed}: the last child ended after {done} of {len(actions)} actions")


def _run_child(store: Path, seed: int, first: int, kill: Kill, delay: float | None) -> int:
    """How many actions returned before the child ended. delay: seconds after the first of them that it is killed."""
    moment = (kill.call, str(kill.count), str(kill.phase))
    command = [sys.executable, "-m", __name__, str(store), str(seed), str(first), *moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told = child.stdout.read(1)
        if delay is not None and told:
            time.sleep(delay)  # at any moment at all, also inside of SQLite
            child.kill()
        told += child.stdout.read()
        code = child.wait()
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"seed {seed}: the child failed with {code}")
    return len(told)


def _check(folder: Path, before: Model, after: Model) -> None:
    """The store is as before or after the action in whose middle its process died, and nothing is left over."""
    with opened(folder) as store:
        records, packs = contents(store)
        if (records, packs) not in [(model.records, model.packs) for model in (before, after)]:
            raise AssertionError(_difference(records, packs, before))
        listed = {key for key, _ in store.packs()}
    torn = [path for path in folder.rglob("*") if path.name.endswith(PART)]
    if torn or listed != set(pack_keys(folder)):
        raise AssertionError(f"{folder}: left over: {torn}")


def _difference(records: dict[str, bytes], packs: dict[bytes, Any], expected: Model) -> str:
    changed = {
        key for key in records.keys() | expected.records if records.get(key) != expected.records.get(key)
    }
    torn = {
        key.hex()[:8] for key in packs.keys() | expected.packs if packs.get(key) != expected.packs.get(key)
    }
    return f"records {sorted(changed)} and packs {sorted(torn)} are not what was written"


# ---------------------------------------------------------------------------------------------- the child


class Killer:
    """Kills this process at a moment."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._left = kill, kill.count

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            now, self._left = self._left == 0, self._left - 1
            if now and self._kill.phase < 2:
                if name == "write" and self._kill.phase == 1:
                    call(args[0], memoryview(args[1])[: len(args[1]) // 2])
                _die()
            result = call(*args, **named)
            if now:
                _die()
            return result

        return watched if name == self._kill.call else call

    def connection(self) -> type[sqlite3.Connection]:
        """A connection whose calls are watched."""
        calls = {name: self.around(name, getattr(sqlite3.Connection, name)) for name in SQLITE_CALLS}
        return type("Watched", (sqlite3.Connection,), calls)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, seed: int, first: int, kill: Kill) -> None:
    killer, connect = Killer(kill), sqlite3.connect
    for name in CALLS:
        setattr(os, name, killer.around(name, getattr(os, name)))
    watched: Any = partial(connect, factory=killer.connection())
    sqlite3.connect = watched
    store = SqliteStore(folder)
    for action in history(seed)[first:]:
        store = action.on_store(store)
        _write(1, b".")
    store.close()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Kill(sys.argv[4], int(sys.argv[5]), int(sys.argv[6])),
    )
