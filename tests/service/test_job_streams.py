"""Streams of a job: each has a current epoch of its own, and fences itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.ir.errors import ConfigError
from apportion.service.engine.kept.records import EpochRecord, decode, epoch_key
from apportion.service.errors import GoneError, LimitError, QuotaError
from apportion.service.limits import Limits
from apportion.service.store import Store
from apportion.service.store.memory import MemoryStore
from tests.service.engines import JOB, KEY, Clock, LocalPool, Rig, batch, raised, run, submit, take, until
from tests.service.stores import opened, redis_server


def test_a_new_epoch_ends_only_its_stream() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            reader = asyncio.create_task(take(engine, 0))
            assert await engine.begin_epoch("run", "first", "eval") == (2, True)
            assert await engine.begin_epoch("run", "first", "eval") == (2, False)
            other = asyncio.create_task(take(engine, 0, epoch=2))
            await until(lambda: engine.snapshot().waiting == 2)
            assert await engine.begin_epoch("run", "second", "eval") == (3, True)
            assert "stream eval is over, 3 has begun" in str(await raised(other, GoneError))
            await raised(submit(engine, 1, epoch=2), GoneError)
            assert engine.job("run").streams == {"train": 1, "eval": 3}
            rig.pool.open()
            assert engine.epoch_state("run", 1).stream == "train"
            assert (await reader).id == (await take(engine, 0)).id
            assert await engine.begin_epoch("run", "second") == (4, True)
            await raised(take(engine, 0), GoneError)
            await submit(engine, 7, epoch=3)
            await take(engine, 7, epoch=3)

    run(main())


def test_a_stream_has_a_name() -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            assert (await raised(engine.begin_epoch("run", "r", "a b"), ConfigError)).field == "stream"

    run(main())


def test_a_job_has_so_many_streams_and_no_more() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(job_streams=2)).with_job() as engine:
            await engine.begin_epoch("run", "a", "eval")
            error = await raised(engine.begin_epoch("run", "a", "test"), LimitError)
            assert (error.status, error.field) == (422, "stream")
            assert "(eval, train): begin a new run of one of these" in str(error)
            assert await engine.begin_epoch("run", "b", "eval") == (3, True)
            assert await engine.begin_epoch("run", "a", "eval") == (2, False)

    run(main())


def test_a_stream_that_all_have_left_takes_nothing_from_the_others() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(pending=16, queue_total=20)).with_job(lookahead=2) as engine:
            await engine.begin_epoch("run", "a", "left")
            await submit(engine, *range(100, 108), epoch=2)
            assert "8 are allowed" in str(await raised(submit(engine, 108, epoch=2), QuotaError))
            for number in range(32):
                assert await submit(engine, number) == [True]
                await take(engine, number)
            assert engine.epoch_state("run", 2).held == 8

    run(main())


def test_streams_of_a_job_take_turns() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True), clock=Clock())
        async with rig.with_job() as engine:
            await engine.begin_epoch("run", "a", "eval")
            await engine.submit("run", 1, 0, batch(0))
            await until(lambda: rig.pool.begun == [0])
            rig.clock.now += 1000.0  # type: ignore[attr-defined]  # all that follows is late
            for number in (1, 2, 3):
                await engine.submit("run", 1, number, batch(number))
                await engine.submit("run", 2, number, batch(100 + number))
            rig.pool.open()
            await until(lambda: len(rig.pool.begun) == 7)
            assert rig.pool.begun == [0, 101, 1, 102, 2, 103, 3]

    run(main())


def test_old_runs_are_forgotten_but_not_those_that_go_on() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(epochs=3))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            for number in range(5):
                await engine.begin_epoch("run", f"pass{number}", "eval")
        async with rig.started() as engine:
            assert engine.job("run").streams == {"train": 1, "eval": 6}
            assert await engine.begin_epoch("run", "first") == (1, False)
            assert await engine.begin_epoch("run", "pass3", "eval") == (5, False)
            await take(engine, 0)
        assert [key for key, _ in rig.store.records("epoch/")] == [epoch_key("run", n) for n in (1, 5, 6)]

    run(main())


# ---------------------------------------------------------------------------------------------- restart


@contextmanager
def redis_place(folder: Path) -> Iterator[str]:
    with redis_server(folder) as server:
        yield server.url


@contextmanager
def folder_place(folder: Path) -> Iterator[str]:
    yield f"sqlite:{folder}"


@pytest.mark.parametrize("place", [folder_place, redis_place])
def test_a_restarted_server_has_all_streams(place: Any, tmp_path: Path) -> None:
    async def before(store: Store) -> int:
        async with Rig(store).with_job() as engine:
            first = engine.job("run").epoch
            await engine.begin_epoch("run", "old", "eval")
            await engine.begin_epoch("run", "new", "eval")
            await submit(engine, 0, 1, epoch=first)
            await submit(engine, 0, epoch=first + 2)
            await take(engine, 0, epoch=first)
            await take(engine, 0, epoch=first + 2)
        return first

    async def after(store: Store, first: int) -> None:
        train, old, new = first, first + 1, first + 2
        async with Rig(store).started() as engine:
            assert (engine.job("run").epoch, engine.job("run").streams) == (
                new,
                {"train": train, "eval": new},
            )
            assert [engine.epoch_state("run", number).front for number in (train, new)] == [1, 1]
            assert await engine.begin_epoch("run", "new", "eval") == (new, False)
            assert await engine.begin_epoch("run", "old", "eval") == (old, False)
            await raised(take(engine, 0, epoch=old), GoneError)
            await take(engine, 1, epoch=train)
            assert await engine.begin_epoch("run", "second") == (new + 1, True)
            await take(engine, 0, epoch=new)

    with place(tmp_path) as name:
        with opened(name) as store:
            first = run(before(store))
        with opened(name) as store:
            run(after(store, first))


def test_records_of_before_streams_are_of_the_one_there_was() -> None:
    async def main() -> None:
        rig = Rig(MemoryStore())
        async with rig.started() as engine:
            await engine.create_job("run", JOB, 8, KEY)
        old = {"run": "first", "front": 3, "floor": 1}
        rig.store.commit({epoch_key("run", 1): msgspec.msgpack.encode(old)})
        async with rig.started() as engine:
            assert engine.job("run").streams == {"train": 1}
            assert engine.epoch_state("run", 1).front == 3
            assert await engine.begin_epoch("run", "first") == (1, False)
        (record,) = [decode(key, data, EpochRecord) for key, data in rig.store.records("epoch/")]
        assert record == EpochRecord("first", 3, 1, "train")

    run(main())
