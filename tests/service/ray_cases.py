"""Cases of the pool on Ray; `benchmarks/soak.py` runs them at length."""

import asyncio
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

from apportion.service.workers import Supervisor, worker as real
from apportion.service.workers.ray.pool import RayPool
from tests.service.worker_cases import DEADLINE_S, children, launchers, plan_task, until

LOOPBACK = "127.0.0.1"
VICTIMS = ("raylet", "gcs_server", "ray::", "ray_driver")


def killed_ray(seed: int, kills: int = 1) -> dict[str, float]:
    """The head, the node, a worker or our driver of a local Ray is killed over tasks: every task is done, with the
    same bytes, and no process is left."""
    return asyncio.run(_killed_ray(seed, kills))


async def _killed_ray(seed: int, kills: int) -> dict[str, float]:
    tasks = [plan_task(seed * 100 + number) for number in range(8)]
    expected = [await asyncio.to_thread(real.run, task) for task in tasks]
    pool, whole_s = RayPool(2, address="local"), []
    began = time.monotonic()
    await pool.start()
    figures = {"start_s": round(time.monotonic() - began, 2), "kills": kills}
    try:
        supervisor = Supervisor(pool)
        for number in range(kills):
            results = [asyncio.create_task(supervisor.run(task, DEADLINE_S)) for task in tasks * 4]
            await asyncio.wait(results, return_when=asyncio.FIRST_COMPLETED)
            kill(VICTIMS[(seed + number) % len(VICTIMS)], random.Random(seed))
            done = await asyncio.gather(*results)
            assert [each.bodies for each in done] == [each.bodies for each in expected * 4]
            whole_s.append(await until(lambda: pool.alive == 2, "the lines are there again"))
        group = [pid for launcher in launchers() for pid in descendants(launcher)]
    finally:
        await pool.close()
    figures["gone_s"] = await until(lambda: not any(alive(pid) for pid in group), "nothing of Ray is left")
    return figures | {"retries": supervisor.counters.retries}


def joined(seed: int) -> dict[str, float]:
    """A machine joins a cluster and leaves it again: its cores are used while it is there, and every task is done with
    the same bytes."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": LOOPBACK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        return asyncio.run(_joined(seed, cluster))
    finally:
        cluster.shutdown()


async def _joined(seed: int, cluster: Any) -> dict[str, float]:
    tasks = [plan_task(seed * 100 + number) for number in range(8)]
    expected = [await asyncio.to_thread(real.run, task) for task in tasks]
    pool = RayPool(address=cluster.address)
    await pool.start()
    try:
        supervisor = Supervisor(pool)
        assert pool.alive == pool.size == 1
        (launcher,) = launchers()
        node = cluster.add_node(num_cpus=2, node_ip_address=LOOPBACK)  # Ray wants the main thread
        joined_s = await until(lambda: pool.alive == 3, "its cores are used")
        results = [asyncio.create_task(supervisor.run(task, DEADLINE_S)) for task in tasks * 4]
        await asyncio.wait(results, return_when=asyncio.FIRST_COMPLETED)
        cluster.remove_node(node)
        done = await asyncio.gather(*results)
        assert [each.bodies for each in done] == [each.bodies for each in expected * 4]
        left_s = await until(lambda: pool.alive == pool.size == 1, "nobody counts on them")
        assert (await supervisor.run(tasks[0], DEADLINE_S)).bodies == expected[0].bodies
        assert launchers() == [launcher]  # nothing was begun anew
    finally:
        await pool.close()
    return {
        "joined_s": round(joined_s, 2),
        "left_s": round(left_s, 2),
        "retries": supervisor.counters.retries,
    }


def kill(name: str, draw: random.Random) -> None:
    """One of the processes of our Ray whose command has that name."""
    found = [pid for top in launchers() for pid in (top, *descendants(top)) if name in command(pid)]
    os.kill(draw.choice(found), signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def head() -> str:
    """The address of the one cluster of our own."""
    commands = (Path(f"/proc/{pid}/cmdline").read_text() for top in launchers() for pid in descendants(top))
    found = (re.search(r"--gcs-address=([0-9.:]+)", each) for each in commands)
    return next(each[1] for each in found if each)


def command(pid: int) -> str:
    """Its executable, or for Python its module or title."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(words[0]).name if "python" not in words[0] else " ".join(words[:4])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listening(pids: list[int]) -> set[str]:
    """Addresses, as in /proc/net/tcp, on which processes listen."""
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].split(":")[0])
    return found
