"""The engine and its store: what a restarted server knows, what is kept and dropped, a store that fails."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest

from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.planner.iteration.jobs import plan_job
from apportion.service.engine.kept.journal import Journal
from apportion.service.engine.kept.library import Library
from apportion.service.engine.kept.records import (
    BornRecord,
    IterationRecord,
    JobRecord,
    PastRecord,
    decode,
    encode,
)
from apportion.service.engine.kept.restore import restore
from apportion.service.errors import (
    DamagedJobError,
    GoneError,
    NotFoundError,
    OverloadError,
    RefusedBatchError,
    StoppingError,
    StoreError,
    StoreGoneError,
)
from apportion.service.limits import Limits
from apportion.service.packs import Pack
from apportion.service.store import Store
from apportion.service.store.memory import MemoryStore
from apportion.service.workers.errors import RefusedError, WorkerDiedError
from tests.service import engine_chaos, engine_kills, engine_soak
from tests.service.engines import (
    JOB,
    KEY,
    DownStore,
    LocalPool,
    Rig,
    batch,
    begin,
    raised,
    run,
    submit,
    take,
    until,
)
from tests.support.sparse import sparse

WIDE = replace(JOB, cluster=Cluster(4, 8), tokens_per_rank=8192)  # its packs are compact
PACKED = [9000 + 37 * i for i in range(20)]


def wide(number: int) -> list[Batch]:
    return [Batch.from_lengths([*PACKED, 1 + number, 1])]


def spoil(store: Store, change: Callable[[bytes], bytes | None]) -> None:
    """Every pack, by hand."""
    for key, _ in list(store.packs()):
        data = store.read_pack(key)
        assert data is not None
        store.drop_pack(key)
        changed = change(data)
        if changed is not None:
            store.put_pack(key, changed)


# ---------------------------------------------------------------------------------------------- restart


def test_a_restarted_server_goes_on() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await engine.begin_epoch("run", "second")
            await submit(engine, *range(6), epoch=2)
            rig.pool.let(0, 1)
            first = [await take(engine, i, epoch=2) for i in range(2)]
            before = engine.job("run")
            await engine.stop(0.0)
        rig.pool = LocalPool()
        async with rig.started() as engine:
            assert engine.job("run") == before
            assert engine.epoch_state("run", 2).front == 2
            assert await engine.begin_epoch("run", "first") == (1, False)
            assert await engine.begin_epoch("run", "second") == (2, False)
            assert [await take(engine, i, epoch=2) for i in range(2)] == first
            assert await submit(engine, *range(6), epoch=2) == [False] * 6
            for i in range(6):
                await take(engine, i, epoch=2)
            assert sorted(rig.pool.begun) == [2, 3, 4, 5]

    run(main())


def test_what_nothing_refers_to_is_dropped_at_the_start() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
        records = dict(rig.store.records())
        places = ("epoch/gone/00000001", "iteration/gone/00000001/0000000000000000")
        stray = dict(
            zip(places, [value for key, value in sorted(records.items()) if "/run/" in key], strict=True)
        )
        rig.store.commit(stray)
        async with rig.started():
            pass
        assert rig.store.records().__next__()[0] == "epoch/run/00000001"
        assert not stray.keys() & dict(rig.store.records()).keys()

    run(main())


def test_a_job_with_a_damaged_record_is_set_aside() -> None:
    """Its requests say why, the others go on; deleted and made anew it begins above its last epoch."""

    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            await engine.create_job("other", JOB, 8, KEY)
            await engine.begin_epoch("other", "run-1")
        sound = dict(rig.store.records())
        iteration = next(key for key in sound if key.startswith("iteration/"))
        job = decode("job/run", sound["job/run"], JobRecord)
        for key, data in (
            ("job/run", b"\xc1"),
            ("job/run", encode(JobRecord({**job.spec, "tokens_per_rank": 0}, 8, KEY))),
            ("epoch/run/x", sound["epoch/run/00000001"]),
            (iteration, encode(IterationRecord(b"short", b"short", b""))),
        ):
            store = MemoryStore()
            store.commit({**sound, key: data})
            async with Rig(store).started() as engine:
                assert [state.name for state in engine.jobs()] == ["other"]
                for asked in (engine.begin_epoch("run", "run-2"), engine.create_job("run", JOB, 8, KEY)):
                    assert repr(key) in str(await raised(asked, DamagedJobError))
                await engine.begin_epoch("other", "run-2")
                await engine.delete_job("run")
                assert await engine.create_job("run", JOB, 8, KEY)
                number, _ = await engine.begin_epoch("run", "run-2")
                assert number > 1
            async with Rig(store).started() as engine:
                assert len(engine.jobs()) == 2

    run(main())


def test_lost_numbers_stay_lost_in_later_starts() -> None:
    """What may have been an epoch of anybody, or what new jobs begin above, is damaged, and was dropped since."""

    async def main() -> None:
        for lost in (b"epoch/run/00000001", b"past/run", b"born"):
            store = MemoryStore()
            async with Rig(store).with_job() as engine:
                await submit(engine, 0)
                await engine.create_job("other", JOB, 8, KEY)
                await engine.begin_epoch("other", "first")
                await engine.delete_job("other")
                await engine.create_job("other", JOB, 8, KEY)
            store.commit({"born": encode(BornRecord(1)), "past/run": encode(PastRecord(1))})
            held = store._records
            held[lost] = held[lost][:-1] + bytes([held[lost][-1] ^ 1])
            async with Rig(store).started() as engine:
                for name in ("run", "other"):
                    with suppress(NotFoundError):
                        await engine.delete_job(name)
                    assert await engine.create_job(name, JOB, 8, KEY)
            async with Rig(store).started() as engine:  # none is set aside again
                assert all(state.last > 1_000_000 for state in engine.jobs())
                assert len(engine.jobs()) == 2

    run(main())


def test_no_flipped_bit_of_a_record_is_believed() -> None:
    """Any bit of a value, or of a key behind its kind: the job that the key names is set aside."""

    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await submit(engine, 1)
            await take(engine, 0)
        held, rng = dict(rig.store._records), random.Random(3)  # type: ignore[attr-defined]
        for _ in range(2000):
            store, (key, value) = MemoryStore(), rng.choice(sorted(held.items()))
            both = bytearray(key + value)
            both[rng.randrange(key.index(b"/") + 1, len(both))] ^= 1 << rng.randrange(8)
            store._records = {**held}
            del store._records[key]
            store._records[bytes(both[: len(key)])] = bytes(both[len(key) :])
            found = restore(store, Library(Limits()), 0.0)
            assert len(found.aside) == 1
            assert not found.aside.keys() & found.jobs.keys()
            last = (
                found.jobs["run"].state.last
                if "run" in found.jobs
                else found.past.get("run", found.born.epoch)
            )
            assert last >= 1  # no epoch has its number again

    run(main())


class HeldStore(DownStore):
    """Commits wait until `let` is set."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.let = threading.Event()
        self.let.set()

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        self.let.wait(60.0)
        self.__getattr__("commit")(puts, drops)


def test_no_rank_gets_a_plan_of_what_is_not_stored_yet() -> None:
    """Also where the plan is there, of an equal batch: what fails to be stored may be submitted anew, another batch."""

    async def main() -> None:
        store = HeldStore(MemoryStore())
        async with Rig(store).with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            store.let.clear()
            pending = asyncio.create_task(engine.submit("run", 1, 1, batch(0)))
            await until(lambda: engine.epoch_state("run", 1).held == 2)
            assert engine.peek("run", 1, 1, 0) is None
            assert await engine.fetch("run", 1, 1, 0, 0.0) is None
            reader = asyncio.create_task(take(engine, 1))
            store.down = True
            store.let.set()
            await raised(pending, StoreGoneError)
            store.down = False
            assert await engine.submit("run", 1, 1, batch(5))
            assert (await reader).data == plan_job(JOB, batch(5)).plan.slice_for(0).encode()

    run(main())


def test_ranks_of_a_deleted_job_never_get_the_plans_of_its_successor() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            assert await begin(engine, "run", run_id="second") == 2
            await engine.delete_job("run")
            await engine.create_job("run", JOB, 8, KEY)
            await raised(take(engine, 0, epoch=2), GoneError)
            assert engine.job("run").epoch == 0
        async with rig.started() as engine:
            await raised(take(engine, 0, epoch=2), GoneError)
            assert await begin(engine, "run") == 3
            await submit(engine, 0, epoch=3)
            await take(engine, 0, epoch=3)
            await raised(take(engine, 0, epoch=1), GoneError)
            await raised(take(engine, 0, epoch=4), NotFoundError)
            await engine.delete_job("run")
        async with rig.started() as engine:
            assert await begin(engine, "other") == 1
            assert await begin(engine, "run") == 4

    run(main())


# ---------------------------------------------------------------------------------------------- kept and dropped


def test_iterations_far_behind_are_gone() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(keep=3))
        async with rig.with_job() as engine:
            laggard = asyncio.create_task(take(engine, 0, 1))
            for i in range(1, 10):
                await submit(engine, i)
                await take(engine, i)
            error = await raised(laggard, GoneError)
            assert "no longer kept" in error.detail
            await raised(take(engine, 6), GoneError)
            await raised(submit(engine, 6), GoneError)
            await take(engine, 7, 1)
            state = engine.epoch_state("run", 1)
            assert (state.floor, state.held, state.front) == (7, 3, 10)
        assert sum(key.startswith("iteration/") for key, _ in rig.store.records()) == 3
        async with rig.started() as engine:
            assert engine.epoch_state("run", 1).floor == 7
            await raised(take(engine, 6), GoneError)

    run(main())


def test_packs_that_nobody_needs_go_when_the_store_is_full() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(keep=2, store_packs=4))
        async with rig.with_job() as engine:
            for i in range(10):
                await submit(engine, i)
                await take(engine, i)
            await until(lambda: len(list(rig.store.packs())) <= 4)
            assert engine.snapshot().packs <= 4
            held = {
                Pack.decode(data).id for key, _ in rig.store.packs() if (data := rig.store.read_pack(key))
            }
            assert {(await take(engine, i)).id for i in (8, 9)} <= held
        small = Rig(rig.store, limits=Limits(store_bytes=1))
        async with small.started() as engine:
            await until(lambda: len(list(rig.store.packs())) == 2)
            assert engine.snapshot().pack_bytes == sum(size for _, size in rig.store.packs())

    run(main())


def test_packs_that_nobody_needs_go_when_they_are_old() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(store_s=0.2))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            await asyncio.sleep(0.3)
            await engine.tidy()
            assert engine.snapshot().packs == len(list(rig.store.packs())) == 1  # it is needed
            await engine.begin_epoch("run", "second")
            await engine.tidy()
            assert engine.snapshot().packs == len(list(rig.store.packs())) == 0

    run(main())


def test_jobs_that_nobody_asks_for_go() -> None:
    async def main() -> None:
        now = [0.0]
        rig = Rig(limits=Limits(job_s=100.0), clock=lambda: now[0])
        async with rig.started() as engine:
            await begin(engine, "left")
            await begin(engine, "used")
            await submit(engine, 0, name="left")
            now[0] += 90.0
            engine.job("used")
            await engine.tidy()
            assert [state.name for state in engine.jobs()] == ["left", "used"]
            now[0] += 20.0
            await engine.tidy()
            assert [state.name for state in engine.jobs()] == ["used"]
            assert not list(rig.store.records("iteration/left/"))
        async with rig.started() as engine:
            await engine.tidy()
            now[0] += 90.0
            await engine.tidy()
            assert [state.name for state in engine.jobs()] == ["used"]  # from its start on

    run(main())


def test_records_count_among_what_a_store_holds() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(store_bytes=20_000))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            rig.store.commit({"other": bytes(30_000)})
            await engine.tidy()
            error = await raised(submit(engine, 1), OverloadError)
            assert "--store-gb" in error.detail
            rig.store.commit({}, ["other"])
            await engine.tidy()
            await submit(engine, 1)

    run(main())


def test_a_pack_that_is_asked_for_again_while_it_is_dropped_and_then_not_made_goes() -> None:
    async def main() -> None:
        store = DownStore(MemoryStore())
        rig = Rig(store, LocalPool(), Limits(keep=1, store_packs=2))
        async with rig.with_job() as engine:
            for i in range(3):
                await submit(engine, i)
                await take(engine, i)
            await until(lambda: len(list(store.packs())) == 2)
            store.failing = {"drop_pack"}
            await submit(engine, 3)
            await take(engine, 3)  # the plan of 1 is in excess, and cannot be dropped now
            await until(lambda: engine.snapshot().packs == 2 and engine.snapshot().store_errors > 0)
            rig.pool.hold()
            await begin(engine, "other")
            await engine.submit("other", 1, 0, batch(1))
            await until(lambda: engine.snapshot().at_workers == 1)
            store.failing = set()
            await asyncio.sleep(0.3)  # it is not dropped under whoever asked
            assert len(list(store.packs())) == 3
            await engine.delete_job("other")
            await until(lambda: engine.snapshot().packs == len(list(store.packs())) == 2)

    run(main())


def test_old_epochs_leave_nothing_but_their_runs() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(epochs=3))
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            for i in range(5):
                await begin(engine, "run", run_id=f"run{i}")
            assert await engine.begin_epoch("run", "run4") == (6, False)
            assert await engine.begin_epoch("run", "run2") == (4, False)
        keys = [key for key, _ in rig.store.records()]
        assert keys == [f"epoch/run/{number:08d}" for number in (4, 5, 6)] + ["job/run"]

    run(main())


def test_bodies_are_read_again_when_the_cache_was_too_small() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(cache_bytes=1))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            readers = [take(engine, 0, rank) for rank in (0, 1, 0, 1)]
            bodies = await asyncio.gather(*readers)
            assert engine.peek("run", 1, 0, 0) is None
            assert await engine.fetch("run", 1, 0, 0, 0.0) == bodies[0]
            assert bodies[:2] == bodies[2:]
            assert [body.data for body in bodies[:2]] == [
                plan_job(JOB, batch(0)).plan.slice_for(rank).encode() for rank in range(2)
            ]
            assert engine.snapshot().cache_bytes == 0

    run(main())


def test_compact_packs_are_lowered_once_for_all_who_wait() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.started() as engine:
            await begin(engine, "run", WIDE)
            await engine.submit("run", 1, 0, wide(0))
            first = [await take(engine, 0, rank) for rank in range(WIDE.ranks)]
        (key,) = (key for key, _ in rig.store.packs())
        data = rig.store.read_pack(key)
        assert data is not None
        assert Pack.decode(data).form == "assignment"
        async with rig.started() as engine:
            again = await asyncio.gather(*(take(engine, 0, rank) for rank in range(WIDE.ranks)))
            assert again == first
            assert rig.pool.lowered == 1
            assert engine.snapshot().tasks.lowered == 1

    run(main())


def test_what_ranks_take_now_stays_in_the_cache_while_more_is_planned() -> None:
    async def main() -> None:
        plan = plan_job(WIDE, wide(0)).plan
        room = int(2.5 * sum(len(plan.slice_for(rank).encode()) for rank in range(WIDE.ranks)))
        rig = Rig(limits=Limits(cache_bytes=room))
        async with rig.started() as engine:
            await begin(engine, "run", WIDE)
            for i in range(6):
                await engine.submit("run", 1, i, wide(i))
            await asyncio.gather(*(take(engine, 0, rank) for rank in range(4)))
            await until(lambda: engine.snapshot().packs == 6)
            assert engine.snapshot().cached == 2
            for rank in range(WIDE.ranks):
                assert engine.peek("run", 1, 0, rank) is not None
            for i in range(1, 6):
                await asyncio.gather(*(take(engine, i, rank) for rank in range(WIDE.ranks)))
            assert rig.pool.lowered == 4

    run(main())


# ---------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("change", [lambda data: None, lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_pack_that_was_lost_or_damaged_is_planned_again(change: Callable[[bytes], bytes | None]) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0)
            body = await take(engine, 0)
            await engine.stop()
        async with rig.started() as engine:
            spoil(rig.store, change)
            assert await take(engine, 0) == body
            assert engine.snapshot().counters.healed == 1
            assert len(list(rig.store.packs())) == 1
            assert rig.pool.begun == [0, 0]

    run(main())


def test_a_pack_that_was_renamed_is_planned_again() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            bodies = [await take(engine, i) for i in range(2)]
        packs = {key: rig.store.read_pack(key) for key, _ in list(rig.store.packs())}
        for key, other in zip(packs, reversed(packs.values()), strict=True):
            rig.store.drop_pack(key)
            rig.store.put_pack(key, other or b"")
        async with rig.started() as engine:
            assert [await take(engine, i) for i in range(2)] == bodies
            assert engine.snapshot().counters.healed == 2

    run(main())


def test_who_reads_old_plans_does_not_keep_others_from_having_new_ones() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.started() as engine:
            await begin(engine, "run", WIDE)
            for i in range(8):
                await engine.submit("run", 1, i, wide(i))
                await take(engine, i)
        async with rig.started() as engine:
            readers = [asyncio.create_task(take(engine, i)) for i in range(8)]
            await until(lambda: rig.pool.lowered > 0)
            await begin(engine, "other")
            await submit(engine, 0, name="other")
            await take(engine, 0, name="other")
            assert rig.pool.lowered < 8
            await asyncio.gather(*readers)

    run(main())


@pytest.mark.parametrize(
    ("fault", "lowered"), [(RefusedError("DecodeError", "another id"), 1), (WorkerDiedError("killed"), 3)]
)
def test_an_assignment_that_cannot_be_lowered(fault: Exception, lowered: int) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.started() as engine:
            await begin(engine, "run", WIDE)
            await engine.submit("run", 1, 0, wide(0))
            body = await take(engine, 0)
        rig.pool.lowering = fault
        async with rig.started() as engine:
            if isinstance(fault, RefusedError):  # as damaged: planned again
                assert await take(engine, 0) == body
                assert engine.snapshot().counters.healed == 1
            else:
                assert (await raised(take(engine, 0), OverloadError)).retry_after == 1.0
                rig.pool.lowering = None
                assert await take(engine, 0) == body
                lower = rig.pool.lowered - 1
                assert lower == lowered

    run(main())


def test_the_state_of_a_damaged_pack_has_no_id() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
        spoil(rig.store, lambda data: b"x" * len(data))
        async with rig.started() as engine:
            assert (await engine.iteration_state("run", 1, 0)).id is None

    run(main())


class LateStore(MemoryStore):
    """Takes its time to read."""

    def read_pack(self, key: bytes) -> bytes | None:
        time.sleep(0.3)
        return super().read_pack(key)


def test_who_waits_for_a_pack_when_the_server_stops_is_told() -> None:
    async def main() -> None:
        rig = Rig(LateStore())
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
        async with rig.started() as engine:
            reader = asyncio.create_task(take(engine, 0))
            await asyncio.sleep(0)
            await engine.stop(0.0)
            await raised(reader, StoppingError)

    run(main())


@pytest.mark.parametrize("after", [False, True])
def test_a_store_that_is_gone_is_told_and_forgotten_when_it_is_back(after: bool) -> None:
    async def main() -> None:
        store = DownStore(MemoryStore())
        store.after = after
        rig = Rig(store, LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await until(lambda: rig.pool.begun == [0])
            store.down = True
            for work in (
                submit(engine, 1),
                engine.begin_epoch("run", "second"),
                engine.create_job("other", JOB, 8, KEY),
            ):
                error = await raised(work, StoreGoneError)
                assert (error.status, error.retry_after) == (503, 1.0)
            rig.pool.open()
            reader = asyncio.create_task(take(engine, 0))
            await until(lambda: engine.snapshot().store_errors > 4)
            assert not reader.done()
            assert "127.0.0.1:1" in await engine.trouble()
            store.down = False
            await reader
            assert await engine.trouble() == ""
            assert await submit(engine, 1) == [True]
            await take(engine, 1)
            assert await engine.begin_epoch("run", "second") == (2, True)
            assert await engine.create_job("other", JOB, 8, KEY)

    run(main())


def test_a_deletion_that_could_not_be_written_is_asked_for_again() -> None:
    async def main() -> None:
        store = DownStore(MemoryStore())
        async with Rig(store).with_job() as engine:
            store.failing = {"commit"}
            for _ in range(2):
                await raised(engine.delete_job("run"), StoreGoneError)
            assert engine.jobs() == []
            store.failing = set()
            await engine.delete_job("run")
            assert not [key for key, _ in store.records("job/", [])]
            await raised(engine.delete_job("run"), NotFoundError)

    run(main())


def test_what_was_told_to_have_failed_has_not_happened() -> None:
    async def main() -> None:
        store = DownStore(MemoryStore())
        store.after = True
        rig = Rig(store)
        async with rig.with_job() as engine:
            store.down = True
            await raised(engine.begin_epoch("run", "second"), StoreGoneError)
            await raised(engine.create_job("other", JOB, 8, KEY), StoreGoneError)
            await raised(submit(engine, 1), StoreGoneError)
            assert len(list(store.behind.records("iteration/"))) == 1
            store.down = False
            await submit(engine, 0)
        rig = Rig(store)
        async with rig.started() as engine:
            assert [(job.name, job.epoch) for job in engine.jobs()] == [("run", 1)]
            await raised(engine.iteration_state("run", 1, 1), NotFoundError)
            await take(engine, 0)

    run(main())


def test_a_client_that_leaves_does_not_leave_half_an_epoch() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            begun = asyncio.create_task(engine.begin_epoch("run", "second"))
            await asyncio.sleep(0)
            begun.cancel()
            await raised(asyncio.wait_for(begun, 60.0), asyncio.CancelledError)
            await until(lambda: engine.job("run").epoch == 2)
            assert await engine.begin_epoch("run", "second") == (2, False)

    run(main())


def test_reading_from_a_store_that_is_gone() -> None:
    async def main() -> None:
        store = DownStore(MemoryStore())
        rig = Rig(store, limits=Limits(cache_bytes=1))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            body = await take(engine, 0)
            store.down = True
            await raised(take(engine, 0), StoreGoneError)
            await raised(engine.delete_job("run"), StoreGoneError)
            await raised(take(engine, 0), NotFoundError)
            store.down = False
            assert await begin(engine, "run") == 2
            await submit(engine, 0, epoch=2)
            assert await take(engine, 0, epoch=2) == body
        assert sorted(key for key, _ in store.records("job/")) == ["job/run"]

    run(main())


def test_a_server_that_has_stopped_says_so() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(cache_bytes=1))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            await engine.stop()
            await raised(take(engine, 0), OverloadError)

    run(main())


class SlowStore(MemoryStore):
    """Commits that wait until they may; commits: what each had."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[list[str], list[str]]] = []
        self.fail = False

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        self.commits.append((sorted(puts), sorted(drops)))
        if self.fail:
            raise StoreError("full")
        super().commit(puts, drops)


def test_a_disk_that_is_full_at_the_start_is_known_before_anybody_submits() -> None:
    async def main() -> None:
        store = SlowStore()
        store.fail = True
        rig = Rig(store=store)
        async with rig.started() as engine:
            await until(lambda: bool(store.commits))
            assert await engine.trouble() == "full"
            store.fail = False
            assert await engine.trouble() == ""

    run(main())


def test_commits_that_wait_are_made_together_and_in_order() -> None:
    async def main() -> None:
        store = SlowStore()
        journal = Journal(store)
        await asyncio.gather(*(journal.commit({f"k{i}": b"1"}) for i in range(64)))
        assert len(store.commits) < 4
        journal.later({"k0": b"2"}, ["k1", "k2"])
        await journal.commit({"k1": b"3"})
        assert store.commits[-1] == (["k0", "k1"], ["k2"])
        journal.later({"k3": b"4"}, ["k4"])
        store.fail = True
        await raised(journal.commit({"k5": b"5"}), StoreError)
        store.fail = False
        journal.later({}, ["k3"])
        await journal.commit({"k4": b"6"})
        assert store.commits[-1] == (["k4"], ["k3"])
        await journal.flush()
        assert store.commits[-1] == (["k4"], ["k3"])
        journal.later({}, [f"old{i}" for i in range(1000)])
        await until(lambda: len(store.commits[-1][1]) == 1000)
        journal.close()
        assert dict(store.records("k"))["k0"] == b"2"

    run(main())


# ---------------------------------------------------------------------------------------------- long ones


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_killed_at_a_commit_point(seed: int) -> None:
    engine_kills.case(seed)


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_nothing_is_left_after_chaos(seed: int) -> None:
    engine_chaos.case(seed, 60)


def test_memory_stays_flat() -> None:
    engine_soak.case(0, 500)


def test_an_epoch_of_another_release_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivered iterations never get other bytes: the ranks are told to begin anew."""

    async def main() -> None:
        store = MemoryStore()
        async with Rig(store).with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
        monkeypatch.setattr("apportion.service.engine.kept.restore.build", lambda: "9.9.9+00")
        async with Rig(store).started() as engine:
            for asked in (take(engine, 0), submit(engine, 1)):
                gone = await raised(asked, GoneError)
                assert "9.9.9" in gone.detail
                assert "begin a new epoch" in gone.detail
            assert engine.job("run").streams == {}
            assert await begin(engine, "run", run_id="second") == 2
            await submit(engine, 0, epoch=2)
            await take(engine, 0, epoch=2)

    run(main())


def test_a_plan_that_was_delivered_is_not_replaced_by_another() -> None:
    """Its pack is gone, and it is planned otherwise now: refused, not delivered."""

    async def main() -> None:
        store, pool = MemoryStore(), LocalPool()
        rig = Rig(store, pool=pool, limits=Limits(cache_bytes=1))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            first = await take(engine, 0)
            assert first is not None
            entry = next(iter(engine._library._entries.values()))
            store.drop_pack(entry.key)
            entry.id = bytes(32)  # what ranks have
            refused = await raised(take(engine, 0), RefusedBatchError)
            assert "begin a new epoch" in refused.detail

    run(main())
