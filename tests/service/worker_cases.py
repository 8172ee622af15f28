"""Hard cases of the workers, each a function of a seed that returns figures and raises where a promise fails."""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.workers import Done, Planner, ProcessPool, Supervisor, Task, worker as real

WAIT_S = 120.0
DEADLINE_S = 120.0
POOL_BACK_S = 1.0


def plan_task(seed: int, ranks: int = 4, recipe: str = "fcp") -> Task:
    draw = random.Random(seed)
    job = Job(Cluster(1, ranks), Model(4, 2, 64), Policy(find_recipe(recipe)), 2048)
    lengths = [draw.randint(20, 400) for _ in range(ranks * 4)]
    return Task("plan", encode_request(job, [Batch.from_lengths(lengths)]))


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, listed.read_text().split())
    return sorted(found)


def launchers() -> list[int]:
    """The zygotes of this process."""
    mine = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in children(os.getpid())]
    return [pid for pid, command in mine if b"apportion.service.workers." in command]


async def until(true: Callable[[], bool], what: str, limit_s: float = WAIT_S, step_s: float = 0.001) -> float:
    """Seconds until it is true."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"{what}: not after {limit_s} s")
        await asyncio.sleep(step_s)
    return time.monotonic() - began


async def pooled(
    pool: ProcessPool, use: Callable[[ProcessPool], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    await pool.start()
    try:
        return await use(pool)
    finally:
        await pool.close()


def killed_workers(seed: int, seconds: float = 60.0, every_s: float = 2.0) -> dict[str, float]:
    """A worker is killed again and again: all results equal those of nobody disturbed, as a rule the pool is back in a
    second."""
    return asyncio.run(pooled(ProcessPool(2), lambda pool: _killed_workers(pool, seed, seconds, every_s)))


async def _killed_workers(pool: ProcessPool, seed: int, seconds: float, every_s: float) -> dict[str, float]:
    tasks = [plan_task(seed * 100 + i) for i in range(16)]
    expected = [await asyncio.to_thread(_undisturbed, task) for task in tasks]
    supervisor, end, done = Supervisor(pool), time.monotonic() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            got = await supervisor.run(tasks[number % 16], DEADLINE_S)
            assert (got.bodies, got.id) == expected[number % 16]
            number, done = number + 4, done + 1

    clients = asyncio.gather(*(client(number) for number in range(4)))
    draw, back_s = random.Random(seed), []
    while time.monotonic() < end:
        await until(lambda: _whole(pool), "the pool is full")  # also where the machine itself stood still
        (zygote,) = launchers()
        back_s.append(await _kill_one(pool, draw.choice(children(zygote))))
        await asyncio.sleep(min(every_s, max(0.0, end - time.monotonic())))
    await clients
    assert statistics.median(back_s) <= POOL_BACK_S, f"the pool was back after {back_s} s"
    return {
        "tasks": done,
        "kills": len(back_s),
        "retries": supervisor.counters.retries,
        "back_ms_worst": round(max(back_s) * 1e3, 1),
    }


def _undisturbed(task: Task) -> tuple[tuple[bytes, ...], bytes]:
    done = real.run(task)
    return done.bodies, done.id


async def _kill_one(pool: ProcessPool, pid: int) -> float:
    before = pool.restarts
    os.kill(pid, signal.SIGKILL)
    return await until(lambda: pool.restarts > before and pool.alive == pool.size, "the pool is full again")


def killed_zygotes(seed: int, kills: int = 3) -> dict[str, float]:
    """The zygote is killed, with one of its workers or alone: the other worker goes on."""
    return asyncio.run(pooled(ProcessPool(2), lambda pool: _killed_zygotes(pool, seed, kills)))


async def _killed_zygotes(pool: ProcessPool, seed: int, kills: int) -> dict[str, float]:
    supervisor, draw, back_s = Supervisor(pool), random.Random(seed), []
    for number in range(kills):
        (zygote,) = launchers()
        workers, before = children(zygote), pool.restarts
        os.kill(zygote, signal.SIGKILL)
        await until(lambda gone=zygote: gone not in launchers(), "the zygote is gone")
        killed = draw.random() < 0.5 and bool(workers)
        if killed:
            os.kill(draw.choice(workers), signal.SIGKILL)
        await supervisor.run(plan_task(seed * 100 + number), DEADLINE_S)
        await until(lambda least=before + killed: pool.restarts >= least, "the worker is missed")
        back_s.append(await until(lambda: _whole(pool), "there is a zygote again"))
    return {"kills": kills, "back_s_worst": round(max(back_s), 3)}


def _whole(pool: ProcessPool) -> bool:
    return pool.alive == pool.size and len(launchers()) == 1


SERVER = """
import asyncio, sys
from apportion.service.workers import ProcessPool, Supervisor, Task
async def main():
    pool = ProcessPool(2, runner="tests.service.worker_faults")
    print("starting", flush=True)
    await pool.start()
    print("started", flush=True)
    task = Task("plan", sys.argv[1].encode())
    await asyncio.gather(*(pool.run(task, 600.0) for _ in range(2)), return_exceptions=True)
asyncio.run(main())
"""


def killed_server(seed: int) -> dict[str, float]:
    """The server is killed while it starts, or over tasks that never end: nothing of it is left."""
    mark = f"APPORTION_TEST_{uuid.uuid4().hex}"
    act = ("spin:", "sleep:600", "none")[seed % 3]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, act],
        env=os.environ | {mark: "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with server:
        assert server.stdout is not None
        server.stdout.readline()
        if act != "none":  # not while it starts
            server.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.5))
        server.kill()
    began = time.monotonic()
    while left := list(marked(mark)):
        assert time.monotonic() - began < WAIT_S, f"processes {left} are left"
        time.sleep(0.01)
    return {"gone_ms": round((time.monotonic() - began) * 1e3, 1)}


def marked(mark: str) -> Iterator[int]:
    """Processes with that name in their environment."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:  # it has ended
            continue


def long_run(seed: int, tasks: int = 1000) -> dict[str, float]:
    """Memory and descriptors stay as they are."""
    return asyncio.run(pooled(ProcessPool(2), lambda pool: _long_run(pool, seed, tasks)))


async def _long_run(pool: ProcessPool, seed: int, tasks: int) -> dict[str, float]:
    payloads = [plan_task(seed * 10_000 + i) for i in range(200)]
    (zygote,) = launchers()
    processes = [os.getpid(), zygote, *children(zygote)]

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            done: Done = await pool.run(payloads[number % 200], DEADLINE_S)
            assert done.bodies

    async def work(count: int) -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(client(numbers) for _ in range(4)))

    await work(tasks // 4)
    before = [(held(pid), memory(pid)) for pid in processes]
    await work(tasks - tasks // 4)
    after = [(held(pid), memory(pid)) for pid in processes]
    assert [fds for fds, _ in before] == [fds for fds, _ in after]
    grown = [late - early for (_, early), (_, late) in zip(before, after, strict=True)]
    assert max(grown) < 16 << 20, f"grown by {grown} bytes"
    return {"tasks": tasks, "grown_kb_worst": max(grown) >> 10}


def held(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def planned_in_a_child(pipe: Connection) -> None:
    """Sends the id of a plan."""
    with Planner(1) as planner:
        pipe.send_bytes(planner.submit(plan_task(3)).result(DEADLINE_S).id)
    pipe.close()
