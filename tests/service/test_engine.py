"""The engine: what is answered to whom, and when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.request.batch import Batch
from apportion.planner.iteration.jobs import plan_job
from apportion.service.engine import Engine, IterationState
from apportion.service.errors import (
    ConflictError,
    GoneError,
    LimitError,
    NotFoundError,
    OverloadError,
    QuarantinedError,
    QuotaError,
    RefusedBatchError,
    StoppingError,
)
from apportion.service.limits import Limits
from apportion.service.packs import etag
from tests.service.engines import (
    JOB,
    KEY,
    Clock,
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

# ---------------------------------------------------------------------------------------------- bodies


def test_a_rank_gets_what_planning_here_gives() -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            assert await submit(engine, 0) == [True]
            plan = plan_job(JOB, batch(0)).plan
            for rank in range(JOB.ranks):
                body = await take(engine, 0, rank)
                assert body.data == plan.slice_for(rank).encode()
                assert (body.id, body.etag) == (plan.id, etag(body.data))
                assert IterationSlice.decode(body.data).rank == rank

    run(main())


def test_early_and_late_readers_get_the_same_bytes_of_one_planning() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            assert engine.peek("run", 1, 3, 1) is None
            early = [asyncio.create_task(take(engine, 3, 1)) for _ in range(256)]
            await until(lambda: engine.snapshot().waiting == 256)
            await submit(engine, 3)
            rig.pool.open()
            bodies = {(await reader).data for reader in early}
            late = engine.peek("run", 1, 3, 1)
            assert late is not None
            assert bodies == {late.data}
            assert rig.pool.begun == [3]
            assert engine.snapshot().waiting == 0

    run(main())


def test_who_waits_in_vain_is_told_not_yet() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(wait_s=0.05)).with_job() as engine:
            assert await engine.fetch("run", 1, 0, 0, 0.0) is None
            assert await engine.fetch("run", 1, 2**53, 0, 60.0) is None
            assert engine.snapshot().waiting == 0

    run(main())


def test_equal_requests_are_planned_once() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await begin(engine, "other")
            await asyncio.gather(
                *(engine.submit(name, 1, i, batch(7)) for name in ("run", "other") for i in range(3))
            )
            bodies = [await take(engine, i, 1, name) for name in ("run", "other") for i in range(3)]
            assert len({body.data for body in bodies}) == 1
            assert rig.pool.begun == [7]
            counters = engine.snapshot().counters
            assert (counters.submitted, counters.hits, counters.misses) == (6, 5, 1)
            assert (counters.plan_s.count, counters.publish_s.count, counters.ready_s.count) == (1, 1, 6)

    run(main())


def test_a_restarted_run_finds_its_plans() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            first = [await take(engine, i) for i in range(2)]
            epoch = await begin(engine, "run", run_id="second")
            await submit(engine, 0, 1, epoch=epoch)
            assert [await take(engine, i, epoch=epoch) for i in range(2)] == first
            assert sorted(rig.pool.begun) == [0, 1]

    run(main())


@pytest.mark.parametrize("number", [0, 2**53])
def test_any_iteration_number(number: int) -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            await engine.submit("run", 1, number, batch(0))
            await take(engine, number)
            assert engine.epoch_state("run", 1).front == number + 1
            for wrong in (-1, 2**53 + 1):
                await raised(engine.submit("run", 1, wrong, batch(0)), ConfigError)

    run(main())


# ---------------------------------------------------------------------------------------------- jobs, epochs


def test_jobs_are_made_once() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(jobs=2, ranks=4, lookahead=16)).started() as engine:
            assert await engine.create_job("a", JOB, 8, KEY)
            assert not await engine.create_job("a", JOB, 8, KEY)
            for other in ((replace(JOB, tokens_per_rank=4096), 8, KEY), (JOB, 9, KEY), (JOB, 8, b"x" * 32)):
                assert (await raised(engine.create_job("a", *other), ConflictError)).status == 409
            await raised(engine.create_job("a/b", JOB, 8, KEY), ConfigError)
            await raised(engine.create_job("b", JOB, 17, KEY), LimitError)
            wide = replace(JOB, cluster=replace(JOB.cluster, ranks_per_node=8))
            await raised(engine.create_job("b", wide, 8, KEY), LimitError)
            assert await engine.create_job("b", JOB, 8, KEY)
            assert (await raised(engine.create_job("c", JOB, 8, KEY), QuotaError)).status == 429
            assert [job.name for job in engine.jobs()] == ["a", "b"]
            await engine.delete_job("a")
            assert [job.name for job in engine.jobs()] == ["b"]

    run(main())


def test_every_rank_may_begin_the_epoch() -> None:
    async def main() -> None:
        async with Rig().started() as engine:
            await engine.create_job("run", JOB, 8, KEY)
            begun = await asyncio.gather(*(engine.begin_epoch("run", "r1") for _ in range(16)))
            assert sorted(begun) == [(1, False)] * 15 + [(1, True)]
            assert await engine.begin_epoch("run", "r2") == (2, True)
            assert await engine.begin_epoch("run", "r1") == (1, False)
            assert engine.job("run").epoch == 2

    run(main())


def test_a_new_epoch_ends_the_one_before_also_for_who_waits() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            readers = [asyncio.create_task(take(engine, i)) for i in (0, 1, 9)]
            await until(lambda: engine.snapshot().waiting == 3)
            await engine.begin_epoch("run", "second")
            for reader in readers:
                assert (await raised(reader, GoneError)).status == 410
            await raised(submit(engine, 2), GoneError)
            await raised(take(engine, 0), GoneError)
            assert engine.peek("run", 1, 0, 0) is None
            await until(lambda: rig.pool.begun == [0])
            rig.pool.open()
            await submit(engine, 5, epoch=2)
            await take(engine, 5, epoch=2)
            assert rig.pool.begun == [0, 5]

    run(main())


def test_a_deleted_job_is_gone_and_frees_its_worker() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            reader = asyncio.create_task(take(engine, 0))
            await until(lambda: rig.pool.begun == [0] and engine.snapshot().waiting == 1)
            await engine.delete_job("run")
            assert (await raised(reader, NotFoundError)).status == 404
            await raised(submit(engine, 2), NotFoundError)
            await raised(engine.delete_job("run"), NotFoundError)
            await until(lambda: rig.pool.running == 0)
            snapshot = engine.snapshot()
            assert (snapshot.unplanned, snapshot.unplanned_bytes, snapshot.at_workers) == (0, 0, 0)
            assert [key for key, _ in rig.store.records()] == ["past/run"]
            rig.pool.open()
            assert await begin(engine, "run") == 2
            await submit(engine, 4, epoch=2)
            await take(engine, 4, epoch=2)

    run(main())


def test_what_there_is_not() -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            for place in (
                ("no", 1, 0, 0),
                ("run", 2, 0, 0),
                ("run", 0, 0, 0),
                ("run", 1, 0, 2),
                ("run", 1, 0, -1),
            ):
                assert engine.peek(*place) is None
                assert (await raised(engine.fetch(*place, 0.0), NotFoundError)).status == 404
            await raised(engine.iteration_state("run", 1, 0), NotFoundError)
            await submit(engine, 0)
            await take(engine, 0)
            assert engine.peek("run", 1, 0, -1) is None
            assert engine.peek("run", 1, 0, 2) is None

    run(main())


# ---------------------------------------------------------------------------------------------- submitting


def test_submitting_is_idempotent_and_another_batch_is_a_conflict() -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            again = await asyncio.gather(*(engine.submit("run", 1, 0, batch(0)) for _ in range(8)))
            assert sorted(again) == [False] * 7 + [True]
            assert (await raised(engine.submit("run", 1, 0, batch(1)), ConflictError)).status == 409
            await take(engine, 0)
            assert await submit(engine, 0) == [False]
            await raised(engine.submit("run", 1, 0, batch(1)), ConflictError)
            assert engine.snapshot().counters.submitted == 1

    run(main())


def test_what_is_no_iteration_of_the_job() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(sequences=3, tokens=5000)).with_job() as engine:
            for wrong, kind in (
                (Batch.from_lengths([1] * 4), LimitError),
                (Batch.from_lengths([5001]), LimitError),
                (Batch.from_lengths([4097]), CapacityError),
            ):
                await raised(engine.submit("run", 1, 0, [wrong]), kind)
            await raised(engine.submit("run", 1, 0, []), ConfigError)
            await raised(engine.submit("run", 1, 0, [Batch.from_lengths([1])] * 2), ConfigError)

    run(main())


def test_a_refused_batch_is_named_and_blocks_nobody() -> None:
    async def main() -> None:
        job = replace(JOB, policy=replace(JOB.policy, memory_cap_gib=1e-6))
        async with Rig().with_job() as engine:
            await begin(engine, "tight", job)
            reader = asyncio.create_task(take(engine, 0, name="tight"))
            await engine.submit("tight", 1, 0, batch(500))
            error = await raised(reader, RefusedBatchError)
            assert (error.status, error.type) == (409, "refused")
            assert "memory_cap_gib" in error.detail
            state = await engine.iteration_state("tight", 1, 0)
            assert (state.state, state.id) == ("refused", None)
            assert isinstance(state.problem, RefusedBatchError)
            await submit(engine, 0)
            await take(engine, 0)

    run(main())


def test_a_poison_batch_is_quarantined_and_blocks_nobody() -> None:
    async def main() -> None:
        rig = Rig()
        rig.pool.deadly = {1}
        async with rig.with_job() as engine:
            await submit(engine, 0, 1, 2)
            error = await raised(take(engine, 1), QuarantinedError)
            assert (error.status, error.type) == (409, "quarantined")
            assert "3 workers died" in error.detail
            await take(engine, 0)
            await take(engine, 2)
            assert sorted(rig.pool.begun) == [0, 1, 1, 1, 2]
            assert (await engine.iteration_state("run", 1, 1)).state == "quarantined"
            assert await submit(engine, 1) == [False]
        async with rig.started() as engine:
            await raised(take(engine, 1), QuarantinedError)
        assert sorted(rig.pool.begun) == [0, 1, 1, 1, 2]

    run(main())


def test_a_poison_batch_is_not_tried_again_in_the_next_epoch() -> None:
    async def main() -> None:
        rig = Rig()
        rig.pool.deadly = {1}
        async with rig.with_job() as engine:
            await submit(engine, 1)
            await raised(take(engine, 1), QuarantinedError)
            epoch, _ = await engine.begin_epoch("run", "second")
            await engine.submit("run", epoch, 0, batch(1))
            assert (await engine.iteration_state("run", epoch, 0)).state == "quarantined"
        assert rig.pool.begun == [1, 1, 1]

    run(main())


def test_a_job_of_long_plans_gives_its_neighbour_as_many_seconds() -> None:
    """One worker: after a plan of 20 s the other job has all that it waits for, however many plans that are."""

    async def main() -> None:
        now = [0.0]
        rig = Rig(pool=LocalPool(held=True), clock=lambda: now[0])
        async with rig.started() as engine:
            await begin(engine, "heavy")
            await begin(engine, "light")
            await submit(engine, 1, 2, name="heavy")
            await until(lambda: rig.pool.begun == [1])
            await submit(engine, *range(11, 17), name="light")
            now[0] += 20.0
            for number in (1, *range(11, 17), 2):
                await until(lambda number=number: rig.pool.begun[-1] == number)
                now[0] += 0.1
                rig.pool.let(number)
            await take(engine, 2, name="heavy")
        assert rig.pool.begun == [1, *range(11, 17), 2]

    run(main())


def test_a_spare_worker_is_for_short_plans_while_the_others_are_at_long_ones() -> None:
    async def main() -> None:
        now = [0.0]
        rig = Rig(pool=LocalPool(3, held=True), clock=lambda: now[0], spare=1)
        async with rig.started() as engine:
            await begin(engine, "heavy")
            await submit(engine, 1, 2, 3, 4, name="heavy")
            await until(lambda: rig.pool.begun == [1, 2])  # alone, too
            await begin(engine, "light")
            await submit(engine, 11, name="light")
            assert rig.pool.begun == [1, 2]
            now[0] += 1.5
            await submit(engine, 12, name="light")  # whatever happens: it is looked at anew
            await until(lambda: rig.pool.begun == [1, 2, 11])
            rig.pool.let(11)
            await until(lambda: rig.pool.begun == [1, 2, 11, 12])
            now[0] += 20.0
            rig.pool.let(1, 12)
            await until(lambda: rig.pool.begun == [1, 2, 11, 12, 3])
            rig.pool.open()

    run(main())


def test_a_long_plan_leaves_the_spare_worker() -> None:
    """It waits for another one; whoever it kept waiting is served."""

    async def main() -> None:
        rig = Rig(pool=LocalPool(2, held=True), spare=1)
        async with rig.started() as engine:
            for name in ("heavy", "other", "light"):
                await begin(engine, name)
            await submit(engine, 1, name="heavy")
            await submit(engine, 2, name="other")
            await until(lambda: rig.pool.begun == [1, 2])  # once the first has taken a second
            await submit(engine, 11, name="light")
            await until(lambda: rig.pool.begun == [1, 2, 11])
            rig.pool.let(11)
            await take(engine, 11, name="light")
            assert (await engine.iteration_state("other", 1, 2)).state == "queued"
            rig.pool.open()
            await take(engine, 2, name="other")
            assert rig.pool.begun == [1, 2, 11, 2]

    run(main())


def test_what_takes_too_long_is_given_up() -> None:
    async def main() -> None:
        rig = Rig(limits=Limits(deadline_s=7.0))
        rig.pool.slow = {0}
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            error = await raised(take(engine, 0), RefusedBatchError)
            assert "deadline_s = 7" in error.detail
            await take(engine, 1)
            assert sorted(rig.pool.begun) == [0, 1]
            assert engine.snapshot().tasks.deadlines == 1

    run(main())


def test_a_pool_that_fails_is_asked_again() -> None:
    async def main() -> None:
        rig = Rig()
        rig.pool.failures = 1
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await take(engine, 0)
            assert rig.pool.begun == [0, 0]
            assert engine.snapshot().counters.errors == 1

    run(main())


def test_a_batch_of_many_sequences() -> None:
    async def main() -> None:
        async with Rig().with_job() as engine:
            many = [Batch.from_lengths([1] * 999 + [5])]
            assert await engine.submit("run", 1, 0, many)
            assert not await engine.submit("run", 1, 0, many)
            await raised(engine.submit("run", 1, 0, [Batch.from_lengths([1] * 999 + [6])]), ConflictError)
            assert (await take(engine, 0)).data == plan_job(JOB, many).plan.slice_for(0).encode()

    run(main())


def test_the_states_of_an_iteration() -> None:
    async def main() -> None:
        rig, began = Rig(pool=LocalPool(held=True)), time.time()
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            await until(lambda: rig.pool.begun == [0])
            states = [(await engine.iteration_state("run", 1, i)).state for i in range(2)]
            assert states == ["planning", "queued"]
            rig.pool.open()
            body = await take(engine, 1)
            found = await engine.iteration_state("run", 1, 1)
            assert (found.state, found.id, found.problem) == ("ready", body.id, None)
            assert found.planned_ms is not None
            assert found.ready_at is not None
            assert found.planned_ms > 0
            assert began <= found.ready_at <= time.time()
        async with rig.started() as engine:
            assert await engine.iteration_state("run", 1, 1) == IterationState("ready", body.id)

    run(main())


# ---------------------------------------------------------------------------------------------- order


def test_the_look_ahead_moves_with_the_ranks() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(4))
        async with rig.with_job(lookahead=3) as engine:
            await submit(engine, *range(12))
            await until(lambda: len(rig.pool.begun) == 3)
            await take(engine, 0)
            assert engine.epoch_state("run", 1).front == 1
            await until(lambda: len(rig.pool.begun) == 4)
            assert sorted(rig.pool.begun) == [0, 1, 2, 3]
            await take(engine, 11)
            assert 11 in rig.pool.begun

    run(main())


async def _paced(engine: Engine, clock: Clock, name: str, step_s: float) -> None:
    """A job whose ranks take an iteration every `step_s`."""
    await begin(engine, name)
    for number in range(9):
        await engine.submit(name, 1, number, batch(0))
        await take(engine, number, name=name)
        clock.now += step_s


def test_the_nearest_deadline_is_planned_first() -> None:
    async def main() -> None:
        clock = Clock()
        rig = Rig(pool=LocalPool(held=True), clock=clock)
        async with rig.started() as engine:
            rig.pool.let(0)
            await _paced(engine, clock, "slow", 50.0)
            await _paced(engine, clock, "fast", 1.0)
            await begin(engine, "blocker")
            await engine.submit("blocker", 1, 0, batch(1))
            await until(lambda: 1 in rig.pool.begun)
            for number in (9, 10, 11):
                await engine.submit("slow", 1, number, batch(100 + number))
                await engine.submit("fast", 1, number, batch(200 + number))
            rig.pool.open()
            await until(lambda: len(rig.pool.begun) == 8)
            assert rig.pool.begun[2:] == [
                209,
                109,
                210,
                211,
                110,
                111,
            ]  # due at once, at once, in 1, 2, 31, 76 s

    run(main())


def test_a_greedy_job_leaves_others_their_share() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(2, held=True), clock=lambda: 0.0)  # all plans take the same
        async with rig.with_job("greedy", lookahead=64) as engine:
            await begin(engine, "modest")
            await submit(engine, *range(64), name="greedy")
            readers = [asyncio.create_task(take(engine, i, name="greedy")) for i in range(64)]
            await until(lambda: len(rig.pool.begun) == 2 and engine.snapshot().waiting == 64)
            await submit(engine, *range(100, 104), name="modest")
            rig.pool.open()
            await asyncio.gather(*(take(engine, i, name="modest") for i in range(100, 104)))
            place = [rig.pool.begun.index(i) for i in range(100, 104)]
            assert max(place) <= 2 + 2 * 4, rig.pool.begun
            await asyncio.gather(*readers)

    run(main())


# ---------------------------------------------------------------------------------------------- too much


def test_the_quota_of_a_job_comes_back_as_ranks_take() -> None:
    async def main() -> None:
        async with Rig(limits=Limits(pending=4)).with_job() as engine:
            await begin(engine, "other")
            await submit(engine, 1, 2, 3, 4)
            error = await raised(submit(engine, 5), QuotaError)
            assert (error.status, error.type) == (429, "quota")
            assert error.retry_after is not None
            assert 0 < error.retry_after <= 5
            assert await submit(engine, 1, name="other") == [True]
            assert await submit(engine, 0, 1) == [True, False]  # what all wait for is taken all the same
            await take(engine, 0)
            await take(engine, 1)
            assert await submit(engine, 5) == [True]
            await raised(submit(engine, 6), QuotaError)
            reader = asyncio.create_task(take(engine, 7))
            await until(lambda: engine.snapshot().waiting == 1)
            assert await submit(engine, 7) == [True]
            await reader

    run(main())


def test_overload_is_answered_and_passes() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True), limits=Limits(queue_total=4))
        async with rig.with_job() as engine:
            await submit(engine, *range(4))
            error = await raised(submit(engine, 4), OverloadError)
            assert (error.status, error.type, error.retry_after) == (503, "overload", 1.0)
            assert await submit(engine, 3) == [False]
            rig.pool.open()
            await take(engine, 3)
            await until(lambda: engine.snapshot().unplanned == 0)
            assert await submit(engine, 4) == [True]

    run(main())


def test_the_bytes_that_wait_are_bounded() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True), limits=Limits(queue_bytes=500))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            assert 0 < engine.snapshot().unplanned_bytes <= 500
            await raised(submit(engine, *range(1, 9)), OverloadError)
            rig.pool.open()

    run(main())


# ---------------------------------------------------------------------------------------------- the end


def test_stopping_finishes_what_is_at_workers_and_keeps_the_rest() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0, 1)
            await until(lambda: rig.pool.begun == [0])
            readers = [asyncio.create_task(engine.fetch("run", 1, i, 0, 60.0)) for i in range(3)]
            await until(lambda: engine.snapshot().waiting == 3)
            stopping = asyncio.create_task(engine.stop(30.0))
            assert await readers[1] is None
            assert await readers[2] is None
            assert engine.draining
            assert not engine.ready
            for refused in (submit(engine, 5), engine.begin_epoch("run", "second"), engine.delete_job("run")):
                assert (await raised(refused, StoppingError)).status == 503
            rig.pool.open()
            assert await readers[0] is not None
            await stopping
        assert rig.pool.begun == [0]
        async with rig.started() as engine:
            await take(engine, 0)
            await take(engine, 1)
        assert rig.pool.begun == [0, 1]

    run(main())


def test_what_takes_longer_than_the_drain_is_left_for_the_next_server() -> None:
    async def main() -> None:
        rig = Rig(pool=LocalPool(held=True))
        async with rig.with_job() as engine:
            await submit(engine, 0)
            await until(lambda: rig.pool.begun == [0])
            reader = asyncio.create_task(engine.fetch("run", 1, 0, 0, 60.0))
            await until(lambda: engine.snapshot().waiting == 1)
            await engine.stop(0.05)
            assert await reader is None
        rig.pool.open()
        async with rig.started() as engine:
            await take(engine, 0)
        assert rig.pool.begun == [0, 0]

    run(main())
