"""Workers: what they return, how they are refused, stopped, replaced, and what is left of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import struct
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import uvloop

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.workers import (
    ClosedError,
    DeadlineError,
    LaunchError,
    LineLostError,
    Planner,
    PoisonedError,
    ProcessPool,
    RefusedError,
    Supervisor,
    Task,
    WorkerDiedError,
    pool as pool_module,
)
from apportion.service.workers.lines import Line
from apportion.service.workers.pool import LinePool
from apportion.service.workers.tasks import HEAD, MAX_REPLY, MAX_TASK, read_reply, read_task, size_of
from tests.service import worker_cases as cases
from tests.service.worker_cases import DEADLINE_S, launchers, plan_task, pooled, until


def act(text: str) -> Task:
    return Task("plan", text.encode())


def faulty(size: int = 1) -> ProcessPool:
    return ProcessPool(size, runner="tests.service.worker_faults")


def with_faulty(use: Any, size: int = 1) -> Any:
    return asyncio.run(pooled(faulty(size), use))


def test_bodies_are_those_of_planning_here_and_lowering_gives_them_again() -> None:
    task = plan_task(1)
    planned = plan_job(*decode_request(task.payload))
    expected = tuple(planned.plan.slice_for(rank).encode() for rank in range(4))
    with Planner(2) as planner:
        done = planner.submit(task).result(DEADLINE_S)
        assert (done.bodies, done.id, done.assignment) == (expected, planned.plan.id, planned.assignment)
        lowered = planner.submit(Task("lower", planned.assignment)).result(DEADLINE_S)
        assert (lowered.bodies, lowered.id, lowered.assignment) == (expected, planned.plan.id, None)
        counters = planner.supervisor.counters
        assert (counters.plans, counters.lowered, counters.retries) == (1, 1, 0)
        assert counters.ms > 0
    assert IterationSlice.decode(done.bodies[3]).rank == 3


def test_a_batch_that_takes_too_much_memory_is_refused_and_its_worker_goes_on() -> None:
    ranks = 2048
    job = Job(Cluster(ranks // 8, 8), Model(8, 1, 64), Policy(find_recipe("ring")), 2048)
    large = Task("plan", encode_request(job, [Batch.from_lengths([4_000_000])]))

    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        with pytest.raises(RefusedError, match="--worker-gb") as caught:
            await supervisor.run(large, DEADLINE_S)
        assert caught.value.kind == "CapacityError"
        assert len((await supervisor.run(plan_task(1), DEADLINE_S)).bodies) == 4
        assert (pool.restarts, supervisor.counters.retries) == (0, 0)
        (worker,) = cases.children(cases.children(os.getpid())[-1])
        assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "800"

    asyncio.run(pooled(ProcessPool(1, memory_bytes=1 << 30), use))


def test_what_the_planner_refuses_is_said_and_not_tried_again() -> None:
    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        with pytest.raises(RefusedError, match="not an Apportion iteration request") as caught:
            await supervisor.run(act("nonsense"), DEADLINE_S)
        assert (caught.value.kind, caught.value.field) == ("DecodeError", None)
        with pytest.raises(RefusedError, match="a bug") as caught:
            await supervisor.run(act("bug:"), DEADLINE_S)
        assert caught.value.kind == "IndexError"
        assert (supervisor.counters.refused, supervisor.counters.retries, pool.restarts) == (2, 0, 0)

    with_faulty(use)


def test_what_workers_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(pool: ProcessPool) -> None:
        assert (await pool.run(act("print:"), DEADLINE_S)).bodies == (b"printed",)

    with_faulty(use)
    out, err = capfd.readouterr()
    assert out == ""
    assert {"on stdout", "on stderr", "on descriptor 1"} <= set(err.splitlines())


def test_a_worker_has_one_thread() -> None:
    async def use(pool: ProcessPool) -> None:
        assert (await pool.run(act("threads:"), DEADLINE_S)).bodies == (b"1", b"1")

    with_faulty(use)


def test_large_frames_go_both_ways() -> None:
    async def use(pool: ProcessPool) -> None:
        data = os.urandom(1 << 20) * 40
        assert (await pool.run(Task("plan", b"echo:" + data), DEADLINE_S)).bodies == (data,)

    with_faulty(use)


def test_a_deadline_ends_the_worker_and_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pids"

    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        with pytest.raises(
            DeadlineError, match="deadline_s = 3: the worker was not done by then and was killed"
        ):
            await supervisor.run(act(f"spin:{note}"), 3.0)
        await _ended(note)
        await until(lambda: pool.alive == pool.size and pool.restarts == 1, "the worker is replaced")
        assert supervisor.counters.deadlines == 1
        assert (await pool.run(act("echo:x"), DEADLINE_S)).bodies == (b"x",)

    with_faulty(use)


def test_who_stops_waiting_has_the_worker_killed(tmp_path: Path) -> None:
    note = tmp_path / "pids"

    async def use(pool: ProcessPool) -> None:
        running = asyncio.create_task(pool.run(act(f"spin:{note}"), DEADLINE_S))
        waiting = asyncio.create_task(pool.run(act("echo:never"), DEADLINE_S))
        await until(note.exists, "the worker is at it")
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await _ended(note)
        assert (await pool.run(act("echo:x"), DEADLINE_S)).bodies == (b"x",)

    with_faulty(use)


async def _ended(note: Path) -> None:
    pids = [int(pid) for pid in note.read_text().split()]
    await until(lambda: not any(_runs(pid) for pid in pids), "the worker and its child are gone")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_task_whose_worker_dies_is_done_by_another(tmp_path: Path) -> None:
    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        done = await supervisor.run(act(f"die once:{tmp_path / 'died'}"), DEADLINE_S)
        assert done.bodies == (b"alive",)
        assert (supervisor.counters.retries, supervisor.counters.poisoned) == (1, 0)

    with_faulty(use)


def test_poison_is_quarantined_after_two_retries_and_others_go_on() -> None:
    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        good = [supervisor.run(act(f"echo:{i}"), DEADLINE_S) for i in range(20)]
        poison, *done = await asyncio.gather(
            supervisor.run(act("die:"), DEADLINE_S), *good, return_exceptions=True
        )
        assert [each.bodies for each in done] == [(str(i).encode(),) for i in range(20)]  # type: ignore[union-attr]
        assert isinstance(poison, PoisonedError)
        assert poison.attempts == 3
        assert "3 workers died over this task one after another" in str(poison)
        assert (supervisor.counters.retries, supervisor.counters.poisoned) == (2, 1)
        await until(lambda: pool.alive == 2 and pool.restarts == 3, "the workers are replaced")

    with_faulty(use, size=2)


def test_a_worker_that_died_idle_is_replaced() -> None:
    async def use(pool: ProcessPool) -> None:
        (zygote,) = launchers()
        for pid in cases.children(zygote):
            os.kill(pid, 9)
        await until(lambda: pool.restarts == 2 and pool.alive == 2, "the workers are replaced")
        assert (await pool.run(act("echo:x"), DEADLINE_S)).bodies == (b"x",)

    with_faulty(use, size=2)


def test_a_pool_follows_what_its_launcher_says() -> None:
    """As Ray's does when machines join and leave."""

    async def use(pool: ProcessPool) -> None:
        first = pool.size
        pool._launcher._line.told(b"4")
        await until(lambda: pool.alive == pool.size == 4, "there are more")
        tasks = [asyncio.create_task(pool.run(act("sleep:0.2"), DEADLINE_S)) for _ in range(6)]
        await asyncio.sleep(0.1)
        pool._launcher._line.told(b"1")
        await until(lambda: pool.alive == pool.size == 1, "those that are too many have gone")
        assert [done.bodies for done in await asyncio.gather(*tasks)] == [(b"slept",)] * 6
        assert (sizes, pool.restarts) == ([first, 4, 1], 0)
        pool._launcher._line.told(b"2")
        tasks = [asyncio.create_task(pool.run(act("sleep:600"), DEADLINE_S)) for _ in range(5)]
        await until(lambda: pool.alive == 2, "there is one more")
        pool._launcher._line.told(b"1")
        await pool.close()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S)
        assert all(isinstance(end, ClosedError | WorkerDiedError) for end in ends)

    sizes: list[int] = []
    pool = LinePool(0, ("apportion.service.workers.zygote", "tests.service.worker_faults", "0"))
    pool.size = 0
    pool.resized = lambda: sizes.append(pool.size)
    asyncio.run(pooled(pool, use))


def test_closing_waits_for_what_runs_and_kills_what_takes_too_long() -> None:
    async def use(pool: ProcessPool) -> None:
        short, long = (asyncio.create_task(pool.run(act(f"sleep:{s}"), DEADLINE_S)) for s in (0.5, 600))
        waiting = asyncio.create_task(pool.run(act("echo:x"), DEADLINE_S))
        await asyncio.sleep(0)
        await pool.close(drain_s=4.0)
        ends = await asyncio.gather(short, long, waiting, return_exceptions=True)
        assert ends[0].bodies == (b"slept",)  # type: ignore[union-attr]
        assert isinstance(ends[1], WorkerDiedError)
        assert isinstance(ends[2], ClosedError)
        with pytest.raises(ClosedError):
            await pool.run(act("echo:x"), DEADLINE_S)
        assert pool.alive == 0

    with_faulty(use, size=2)
    assert launchers() == []


def test_workers_that_cannot_be_started_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPORTION_TEST_NO_START", "1")
    with pytest.raises(LaunchError, match="ended before it was ready: see its output"):
        asyncio.run(faulty().start())
    assert launchers() == []


def test_under_uvloop() -> None:
    async def use(pool: ProcessPool) -> None:
        supervisor = Supervisor(pool)
        data = os.urandom(1 << 22)
        assert (await supervisor.run(Task("plan", b"echo:" + data), DEADLINE_S)).bodies == (data,)
        with pytest.raises(DeadlineError):
            await supervisor.run(act("spin:"), 0.5)
        with pytest.raises(PoisonedError):
            await supervisor.run(act("die:"), DEADLINE_S)
        await until(lambda: pool.alive == 1, "the worker is replaced")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(pooled(faulty(), use))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "two"])
def test_a_wrong_number_of_workers_is_named(workers: object) -> None:
    with pytest.raises(ConfigError, match="workers"):
        Planner(workers)


def test_a_planner_starts_by_itself_and_close_cancels() -> None:
    planner = Planner(1)
    futures = [planner.submit(plan_task(i)) for i in range(8)]
    assert futures[0].result(DEADLINE_S).bodies
    planner.close()
    planner.close()
    assert all(future.done() for future in futures)
    with pytest.raises(CancelledError):
        futures[-1].result()
    with pytest.raises(ClosedError):
        planner.submit(plan_task(0))
    assert launchers() == []


def test_a_planner_serves_many_threads() -> None:
    ids: dict[int, bytes] = {}
    with Planner(2) as planner:

        def ask(number: int) -> None:
            ids[number] = planner.submit(plan_task(number % 2)).result(DEADLINE_S).id

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ids) == 6
    assert len(set(ids.values())) == 2


def test_a_planner_says_in_each_future_that_nothing_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(1)
    planner.supervisor.pool = faulty()
    monkeypatch.setenv("APPORTION_TEST_NO_START", "1")
    with pytest.raises(LaunchError):
        planner.submit(plan_task(0)).result(DEADLINE_S)
    planner.close()


def test_a_planner_works_in_a_daemonic_process() -> None:
    """As torch's data-loader workers are."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=cases.planned_in_a_child, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    assert ours.recv_bytes() == plan_job(*decode_request(plan_task(3).payload)).plan.id
    process.join(DEADLINE_S)
    process.close()
    ours.close()


def test_a_task_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_TASK", 40)
    with pytest.raises(RefusedError, match="a worker takes 40") as caught:
        asyncio.run(ProcessPool(1).run(act("x" * 41), DEADLINE_S))
    assert caught.value.kind == "CapacityError"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4done", b"\x90" * 4])
def test_messages_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        read_task(data)
    with pytest.raises(DecodeError):
        read_reply(data)


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    with pytest.raises(DecodeError, match=f"at most {MAX_TASK}"):
        size_of(HEAD.pack(MAX_TASK + 1), MAX_TASK)

    async def use() -> None:
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        with theirs:
            line = await Line.over(ours, "worker 1", lambda line: lost.set())
            reply = line.expect()
            theirs.sendall(struct.pack("<I", MAX_REPLY + 1))
            with pytest.raises(LineLostError, match="worker 1 has died"):
                await reply
            await lost.wait()

    asyncio.run(use())
