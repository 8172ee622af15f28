"""Many tiny iterations through one engine: memory and descriptors stay where they are."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from apportion.ir.request.batch import Batch
from apportion.service.engine import Engine
from apportion.service.limits import Limits
from apportion.service.store import open_store
from tests.service.engines import Rig, begin, run, take

GROWTH_BYTES = 8 << 20
NEW = 0.25  # of the iterations ask for what nobody has asked for before
AT_ONCE = 8
LIMITS = Limits(keep=32, store_bytes=1 << 20, cache_bytes=1 << 20)


@dataclass(frozen=True)
class Grown:
    """Over the last two thirds of the iterations."""

    iterations: int
    rss_bytes: int
    descriptors: int


def case(seed: int, iterations: int = 10_000) -> dict[str, int]:
    """`Grown`. Raises AssertionError where the process has grown."""
    with tempfile.TemporaryDirectory() as folder:
        grown = run(_soak(random.Random(seed), iterations, Path(folder)), 3600.0)
    assert grown.rss_bytes < GROWTH_BYTES, grown
    assert grown.descriptors <= 0, grown
    return asdict(grown)


async def _soak(random: random.Random, iterations: int, folder: Path) -> Grown:
    store = open_store(folder)
    try:
        async with Rig(store, limits=LIMITS).started() as engine:
            await begin(engine, "run")
            await _work(engine, random, 0, iterations // 3)
            rss, files = _rss_bytes(), _descriptors()
            await _work(engine, random, iterations // 3, iterations)
            return Grown(iterations, _rss_bytes() - rss, _descriptors() - files)
    finally:
        store.close()


async def _work(engine: Engine, random: random.Random, first: int, stop: int) -> None:
    for start in range(first, stop, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, stop))
        await asyncio.gather(*(engine.submit("run", 1, number, _batch(random, number)) for number in numbers))
        await asyncio.gather(*(take(engine, number, rank) for number in numbers for rank in range(2)))


def _batch(random: random.Random, number: int) -> list[Batch]:
    which = number if random.random() < NEW else number % 50
    return [Batch.from_lengths([1 + which % 1000, 1 + which // 1000])]


def _rss_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
