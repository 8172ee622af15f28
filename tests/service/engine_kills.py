"""A server that is killed at one of its commit points, again and again, and the client that goes on with the next one.

    this process ──► the child below: imports everything, then forks one server after another
                     server: engine on a SQLite store + a client; SIGKILL before or after the n-th commit or pack
                     ◄── what the client was answered, written down before it goes on

What was answered must hold for the next server: an epoch keeps its number, a submitted iteration is known, a body is
the same as in a run that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from apportion.service.engine import Engine
from apportion.service.errors import GoneError
from apportion.service.limits import Limits
from apportion.service.store import Store, open_store
from tests.service.engines import JOB, KEY, Rig, batch, raised, take

RUNS = ("first", "second")  # of each, its first four iterations are asked for again by the next
ITERATIONS = 8
LIMITS = Limits(keep=4, store_packs=6, pending=6)
MOST_SERVERS = 12


@dataclass(frozen=True)
class Killed:
    """servers: that were killed; points: commit points of an undisturbed run."""

    servers: int
    points: int


def case(seed: int) -> dict[str, int]:
    """`Killed`. The point of the first kill is `seed // 2`, before or after it, of the others any. Raises
    AssertionError where an answer did not hold."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, str(seed)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


# ---------------------------------------------------------------------------------------------- parent of the servers


def main(folder: Path, seed: int) -> Killed:
    points = _undisturbed(folder / "calm")
    rng = random.Random(seed)
    point, after = seed // 2 % points, bool(seed % 2)
    for servers in range(MOST_SERVERS):
        last = servers == MOST_SERVERS - 1
        status = _serve(folder / "killed", -1 if last else point, after)
        if status == 0:
            _compare(folder)
            return Killed(servers, points)
        assert os.WIFSIGNALED(status), f"server {servers}, killed at {point}, ended with {status:#x}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        point, after = rng.randrange(points), rng.random() < 0.5
    raise AssertionError("not reached")


def _undisturbed(folder: Path) -> int:
    assert _serve(folder, -1, False) == 0
    return int((folder / "points").read_text())


def _serve(folder: Path, point: int, after: bool) -> int:
    """Wait status of a server on that folder."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        asyncio.run(_server(folder, point, after))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _compare(folder: Path) -> None:
    calm, killed = ({a["place"]: a for a in _answers(folder / name)} for name in ("calm", "killed"))
    assert calm.keys() == killed.keys(), calm.keys() ^ killed.keys()
    for place, answer in calm.items():
        assert killed[place] == answer, place


# ---------------------------------------------------------------------------------------------- a server


class DeadlyStore:
    """Kills its process before or after its n-th change."""

    def __init__(self, store: Store, point: int, after: bool) -> None:
        self._store, self._point, self._after, self.points = store, point, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        self._change(partial(self._store.commit, puts, drops))

    def put_pack(self, key: bytes, data: bytes) -> None:
        self._change(partial(self._store.put_pack, key, data))

    def drop_pack(self, key: bytes) -> None:
        self._change(partial(self._store.drop_pack, key))

    def _change(self, change: partial[None]) -> None:
        here = self.points == self._point
        self.points += 1
        if here and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        change()
        if here:
            os.kill(os.getpid(), signal.SIGKILL)


async def _server(folder: Path, point: int, after: bool) -> None:
    store = DeadlyStore(open_store(folder / "store"), point, after)
    async with Rig(store, limits=LIMITS).started() as engine:
        await _check_answers(engine, folder)
        await Client(engine, folder).work()
    store.close()
    (folder / "points").write_text(str(store.points))


async def _check_answers(engine: Engine, folder: Path) -> None:
    """What earlier servers have answered still holds."""
    for answer in _answers(folder):
        place, value = answer["place"], answer["value"]
        kind, *where = place.split()
        if kind == "job":
            assert engine.job(*where).spec == JOB
        elif kind == "epoch":
            assert await engine.begin_epoch("run", *where) == (value, False)
        elif kind == "submitted":
            await _check_known(engine, *map(int, where))


async def _check_known(engine: Engine, epoch: int, number: int) -> None:
    try:
        state = await engine.iteration_state("run", epoch, number)
    except GoneError:
        return
    assert state.state in ("queued", "planning", "ready"), state


@dataclass
class Client:
    """Does again what it has no answer to."""

    engine: Engine
    folder: Path

    async def work(self) -> None:
        known = {answer["place"]: answer["value"] for answer in _answers(self.folder)}
        if "job run" not in known:
            await self.engine.create_job("run", JOB, 3, KEY)
            self._note("job run", True)
        for lap, run in enumerate(RUNS):
            if f"end {run}" not in known:
                await self._run(run, 4 * lap, known)
        await raised(take(self.engine, 5, epoch=1), GoneError)

    async def _run(self, run: str, offset: int, known: Mapping[str, Any]) -> None:
        epoch, _ = await self.engine.begin_epoch("run", run)
        self._note(f"epoch {run}", epoch)
        for number in range(ITERATIONS):
            for ahead in range(number, min(number + 3, ITERATIONS)):
                await self._submit(epoch, ahead, offset)
            for rank in range(JOB.ranks):
                if f"body {epoch} {number} {rank}" not in known:
                    body = await take(self.engine, number, rank, epoch=epoch)
                    self._note(f"body {epoch} {number} {rank}", body.etag)
        self._note(f"end {run}", True)

    async def _submit(self, epoch: int, number: int, offset: int) -> None:
        try:
            await self.engine.submit("run", epoch, number, batch(offset + number))
        except GoneError:  # it had been planned and taken, and is no longer kept
            assert number < self.engine.epoch_state("run", epoch).floor
        else:
            self._note(f"submitted {epoch} {number}", True)

    def _note(self, place: str, value: object) -> None:
        with (self.folder / "answers").open("a") as file:
            file.write(json.dumps({"place": place, "value": value}) + "\n")


def _answers(folder: Path) -> list[dict[str, Any]]:
    path = folder / "answers"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    killed = main(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(asdict(killed)))
