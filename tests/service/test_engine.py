"""The engine with real workers: each request is planned once; refusals, dead workers, memory, a failing store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from apportion import Cluster, Job, Model, Policy
from apportion.ir.bytes.transport import decompress
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.engine import Engine, Limits, Metrics, PlanRequest, State
from apportion.service.pack import Pack
from apportion.service.problems import ServiceError, UnknownPlanError
from apportion.service.store import Folder, StoreError
from apportion.service.workers import ProcessExecutor, WorkerDiedError
from apportion.service.workers.work import plan_file
from tests.service.faults import address_space, die, hang, hog
from tests.service.requests import RANKS, Request


def run(workers: Executor, test: Callable[[Engine], Any], store: Any = None, limits: Any = None) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(test(Engine(workers, 1, store, Metrics(), limits)), 60.0)

    return asyncio.run(main())


def plan_request(request: Request) -> PlanRequest:
    return PlanRequest(request.key, request.data, request.job.digest, RANKS)


async def submit(engine: Engine, request: Request, ahead: int = 0) -> State:
    entry = await engine.submit(plan_request(request), "anyone", ahead)
    return entry.state


def value(counter: Any) -> float:
    return float(counter._value.get())


def test_a_request_is_planned_once_for_all_clients(workers: ProcessExecutor) -> None:
    async def test(engine: Engine) -> list[Pack | None]:
        early = asyncio.create_task(engine.pack(Request(0).key, 20.0))  # before it is submitted
        await asyncio.sleep(0)
        states = [await submit(engine, Request(0)) for _ in range(3)]
        assert set(states) <= {State.QUEUED, State.PLANNING}
        packs = await asyncio.gather(early, *(engine.pack(Request(0).key, 20.0) for _ in range(5)))
        assert await submit(engine, Request(0)) is State.READY
        assert value(engine.metrics.plans.labels("ready")) == 1
        assert [entry.key for entry in engine.latest(10)] == [Request(0).key]
        return packs

    for pack in run(workers, test):
        assert [decompress(pack.slice(rank)) for rank in range(RANKS)] == Request(0).slices()


def test_an_unsubmitted_plan_is_unknown_and_an_unfinished_one_is_none(workers: ProcessExecutor) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(UnknownPlanError):
            await engine.pack(Request(1).key, 0.0)
        began = time.monotonic()
        with pytest.raises(UnknownPlanError):
            await engine.pack(Request(1).key, 30.0)
        assert time.monotonic() - began < 10.0
        await submit(engine, Request(1))
        assert await engine.pack(Request(1).key, 0.0) is None
        assert await engine.pack(Request(1).key, 30.0) is not None

    run(workers, test)


def test_all_clients_get_the_reason_of_a_refusal(workers: ProcessExecutor) -> None:
    job = Job(Cluster(1, RANKS), Model(4, 2, 16), Policy(find_recipe("fcp"), token_cap=10), 512)
    request = Request(2, job)

    async def test(engine: Engine) -> None:
        await submit(engine, request)
        for _ in range(2):
            with pytest.raises(ServiceError, match="422 refused"):
                await engine.pack(request.key, 30.0)
            with pytest.raises(ServiceError, match="422 refused"):
                await submit(engine, request)
        assert value(engine.metrics.plans.labels("refused")) == 1

    run(workers, test)


def test_the_task_of_a_killed_worker_is_repeated(workers: ProcessExecutor) -> None:
    async def test(engine: Engine) -> None:
        real = engine._executor.submit
        engine._executor = KillingExecutor(real)
        await submit(engine, Request(3))
        assert await engine.pack(Request(3).key, 60.0) is not None
        assert value(engine.metrics.deaths) == 2

    class KillingExecutor:
        """The first two tasks kill their worker."""

        def __init__(self, real: Any) -> None:
            self._real, self._tasks = real, 0

        def submit(self, work: Any, request: bytes) -> Any:
            self._tasks += 1
            return self._real(die if self._tasks < 3 else work, request)

    run(workers, test)


@pytest.mark.parametrize(
    ("work", "type"),
    [(die, "quarantined"), (hang, "too-long"), (hog, "failed")],
    ids=["dies", "hangs", "memory"],
)
def test_a_request_that_kills_workers_is_refused(work: Any, type: str) -> None:
    workers = ProcessExecutor(2, task_s=8.0, memory_bytes=4 << 30)
    try:

        async def test(engine: Engine) -> None:
            request = PlanRequest(b"1", Request(4).data, b"j", RANKS)
            healthy = asyncio.create_task(engine.make(plan_file, request, "a"))
            with pytest.raises(ServiceError) as caught:
                await engine.make(work, PlanRequest(b"2", b"", b"k", RANKS), "a")
            assert caught.value.type == type
            assert (await healthy)[1:].startswith(b"\xa6format")

        run(workers, test)
    finally:
        workers.shutdown(cancel_futures=True)


def test_the_memory_of_a_worker_is_in_addition_to_its_size_at_start() -> None:
    workers = ProcessExecutor(1, memory_bytes=64 << 20)
    try:
        assert int(workers.submit(address_space, b"").result(60.0).data) > 96 << 20
    finally:
        workers.shutdown(cancel_futures=True)


def test_the_length_of_the_queue_is_limited(workers: ProcessExecutor) -> None:
    async def test(engine: Engine) -> None:
        for number in range(10, 13):  # one is being planned, two are queued
            await submit(engine, Request(number))
        with pytest.raises(ServiceError, match="429 queue-full"):
            await submit(engine, Request(19))
        while len(engine._schedule):
            await asyncio.sleep(0.01)
        assert await submit(engine, Request(19)) is not State.REFUSED

    run(workers, test, limits=Limits(queued=2))


class StalledExecutor(Executor):
    """Accepts tasks and never finishes them."""

    def __init__(self) -> None:
        self.begun = list[Future[Any]]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]


def test_the_queue_is_bounded_in_bytes_also_after_a_worker_died() -> None:
    executor, waiting = StalledExecutor(), [Request(2), Request(3)]

    async def test(engine: Engine) -> None:
        await submit(engine, Request(0))
        executor.begun[0].set_exception(WorkerDiedError("killed"))
        while len(executor.begun) < 2:  # until the request is planned again
            await asyncio.sleep(0)
        for request in (Request(1), *waiting):  # the first takes the lane for light requests
            await submit(engine, request)
        with pytest.raises(ServiceError, match="429 queue-full"):
            await submit(engine, Request(4))

    run(executor, test, limits=Limits(queued_bytes=sum(len(request.data) for request in waiting)))


def test_a_tenant_that_fills_the_queue_leaves_others_their_share(workers: ProcessExecutor) -> None:
    async def submit_as(engine: Engine, number: int, tenant: str) -> None:
        request = Request(number)
        await engine.submit(plan_request(request), tenant)

    async def test(engine: Engine) -> None:
        for number in range(60, 63):  # one is being planned
            await submit_as(engine, number, "many")
        await submit_as(engine, 70, "few")
        for tenant in ("many", "few"):
            with pytest.raises(ServiceError, match="429 queue-full"):
                await submit_as(engine, 71, tenant)

    run(workers, test, limits=Limits(queued=2))


def test_memory_is_bounded_and_dropped_plans_are_in_the_store(
    workers: ProcessExecutor, tmp_path: Path
) -> None:
    requests, store = [Request(number) for number in range(20, 30)], Folder(tmp_path)

    async def test(engine: Engine) -> None:
        for request in requests:
            await submit(engine, request)
            await engine.pack(request.key, 30.0)
        while any(store.get(request.key) is None for request in requests):
            await asyncio.sleep(0.01)  # plans are written after the reply
        assert engine._cached_bytes <= 20_000
        assert len(engine._entries) <= 4
        for request in requests:
            assert engine.cached(request.key) is None or request in requests[-8:]
            assert (await engine.pack(request.key, 0.0)).key == request.key

    run(workers, test, store, Limits(cached_bytes=20_000, known=4))


def test_without_a_store_dropped_plans_are_unknown_until_resubmitted(workers: ProcessExecutor) -> None:
    async def test(engine: Engine) -> None:
        for number in range(30, 33):
            await submit(engine, Request(number))
            assert await engine.pack(Request(number).key, 30.0)
        with pytest.raises(UnknownPlanError):
            await engine.pack(Request(30).key, 0.0)
        await submit(engine, Request(30))
        assert await engine.pack(Request(30).key, 30.0)

    run(workers, test, limits=Limits(cached_bytes=1))


def test_a_plan_of_another_server_is_given_to_waiting_clients(
    workers: ProcessExecutor, tmp_path: Path
) -> None:
    async def test(engine: Engine) -> None:
        waiting = [asyncio.create_task(engine.pack(Request(41).key, 30.0)) for _ in range(3)]
        await asyncio.sleep(0.02)
        Folder(tmp_path).put(pack)
        assert [received.data for received in await asyncio.gather(*waiting)] == 3 * [pack.data]
        assert not engine._arriving

    pack = Request(41).pack()
    run(workers, test, Folder(tmp_path))


class FailingStore(Folder):
    def get(self, key: bytes) -> Pack | None:
        raise StoreError("cannot read")

    def put(self, pack: Pack) -> None:
        raise StoreError("cannot store a plan")


def test_planning_continues_if_the_store_fails(workers: ProcessExecutor, tmp_path: Path) -> None:
    async def test(engine: Engine) -> None:
        await submit(engine, Request(50))
        assert await engine.pack(Request(50).key, 30.0)
        await asyncio.sleep(0.05)
        assert value(engine.metrics.store_errors) >= 2

    run(workers, test, FailingStore(tmp_path))


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    lines = [
        "print('begun')",
        "from apportion.service.workers import ProcessExecutor, plan_pack",
        "from tests.service.requests import Request",
        "workers = ProcessExecutor(1)",
        "print(workers.submit(plan_pack, Request(0).data).result(60.0).data == Request(0).pack().data)",
        "workers.shutdown()",
    ]
    (program := tmp_path / "train.py").write_text("\n".join(lines))
    options = {"env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, "check": True}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, **options)
    assert done.stdout.split() == ["begun", "True"]
