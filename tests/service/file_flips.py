"""A bit of a server's folder is flipped while nobody looks: what was acknowledged is served as it was, or refused by a
typed error; never another plan."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from apportion.ir.errors import ApportionError
from apportion.service.store import open_store
from tests.service.engines import Rig, run, submit, take

PLANNED, QUEUED = 4, 2


def case(seed: int, flips: int = 100) -> dict[str, int]:
    """How many plans were as before, and how many refused. Raises AssertionError for another one, and any error that is
    not a typed one."""
    rng, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        sound, changed = Path(name, "sound"), Path(name, "changed")
        bodies = run(_written(sound))
        files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.stat().st_size)
        files = [path for path in files if (sound / path).is_file()]
        for _ in range(flips):
            shutil.copytree(sound, changed)
            _flip(changed / _chosen(files, rng), rng)
            found.update(run(_answers(changed, bodies)))
            shutil.rmtree(changed)
    return dict(found)


def _chosen(files: list[Path], rng: random.Random) -> Path:
    """Half of them in the index, the others in packs and what else there is."""
    index = [path for path in files if path.name.startswith("index")]
    return rng.choice(index if rng.random() < 0.5 else files)


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


async def _written(folder: Path) -> list[bytes]:
    """Plans that were served; more iterations are queued."""
    store = open_store(folder)
    rig = Rig(store)
    try:
        async with rig.with_job() as engine:
            await submit(engine, *range(PLANNED))
            bodies = [bytes((await take(engine, number)).data) for number in range(PLANNED)]
            rig.pool.hold()
            await submit(engine, *range(PLANNED, PLANNED + QUEUED))
        async with Rig().with_job() as engine:
            await submit(engine, *range(PLANNED + QUEUED))
            numbers = range(PLANNED, PLANNED + QUEUED)
            return bodies + [bytes((await take(engine, number)).data) for number in numbers]
    finally:
        store.close()


async def _answers(folder: Path, bodies: list[bytes]) -> Counter[str]:
    found: Counter[str] = Counter()
    try:
        store = open_store(folder)
    except ApportionError:
        return Counter(refused=len(bodies))
    try:
        async with Rig(store).started() as engine:
            for number, body in enumerate(bodies):
                try:
                    got = bytes((await take(engine, number, wait_s=5.0)).data)
                except (ApportionError, TimeoutError) as error:
                    found["late" if isinstance(error, TimeoutError) else "refused"] += 1
                    continue
                assert got == body, f"iteration {number}: another plan"
                found["as before"] += 1
    except ApportionError:
        found["stopped"] += 1
    finally:
        store.close()
    return found
