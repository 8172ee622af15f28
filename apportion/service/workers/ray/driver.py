"""The process that talks to Ray, which may end the process it runs in when its cluster dies.

`python -m apportion.service.workers.ray.driver FD RUNNER ADDRESS CORES FOLDER`: as the zygote (see there), but each
socket is served by a coroutine that has the tasks done by Ray, and the first frame has the number of the cluster's
cores. As machines join and leave, a frame that begins with `TOLD` has another number; of one that joins once it has
compiled what tasks need. ADDRESS: "local" starts Ray with CORES on this machine's loopback, its files in FOLDER. It
ends when the server hangs up or the cluster dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from apportion.ir.version import __version__
from apportion.service.workers.pipes import dies_with, send
from apportion.service.workers.ray.worker import warm, work
from apportion.service.workers.tasks import HEAD, MAX_TASK, TOLD, Died, encode, size_of
from apportion.service.workers.worker import refusal

# of a local cluster: only bodies on their way to us
OBJECTS_BYTES = 256 << 20
CHECK_S = 1.0
PATIENCE_S = 10.0

# where a task was to be, or where its result was
_NODE_LEFT = (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.TaskUnschedulableError)
_WORKER_DIED = (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, *_NODE_LEFT)
_OF_THE_TASK = (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError)


class ClusterDiedError(Exception):
    """Nothing can be asked of Ray any more."""


class Driver:
    """Serves lines until the server hangs up."""

    def __init__(self, control: socket.socket, runner: str, warm: dict[str, int]) -> None:
        self._control, self._warm = control, warm
        self._warming: set[str] = set()  # nodes
        self._ask = ray.remote(num_cpus=1, max_retries=0)(work).options(name="apportion").remote
        self._runner = runner
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)

    async def serve(self) -> None:
        """Raises ClusterDiedError."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._open)
        watch = loop.create_task(self._watch())
        await asyncio.wait({watch, self._over}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        loop.remove_reader(self._control.fileno())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._over.done():
            self._over.result()
        else:
            raise ClusterDiedError("its head does not answer any more")

    def _open(self) -> None:
        _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not fds:
            self._end(None)
            return
        self._spawn(self._line(socket.socket(fileno=fds[0])))
        send(self._control, str(next(self._numbers)).encode())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Returns when the cluster no longer has what we need."""
        head = ray.get_runtime_context().gcs_address
        while await asyncio.to_thread(_answers, head):
            there = await asyncio.to_thread(nodes)
            self._count({node: cores for node, cores in self._warm.items() if node in there})
            for node in there.keys() - self._warm.keys() - self._warming:
                self._warming.add(node)
                self._spawn(self._join(node, there[node]))
            await asyncio.sleep(CHECK_S)

    async def _join(self, node: str, cores: int) -> None:
        """Counts on a node that is new, once it is warm; not on one that cannot be."""
        references = begin_warming(self._runner, node, cores)
        try:
            await asyncio.gather(*(asyncio.wrap_future(each.future()) for each in references))
        except exceptions.RayError as error:
            print(f"the Ray node {node} is not used: {error}", file=sys.stderr, flush=True)
        else:
            self._warming.discard(node)
            self._count(self._warm | {node: cores})

    def _count(self, warm: dict[str, int]) -> None:
        before, self._warm = sum(self._warm.values()), warm
        if (cores := sum(warm.values())) != before:
            send(self._control, TOLD + str(cores).encode())

    def _end(self, error: Exception | None) -> None:
        if not self._over.done():
            self._over.set_result(None) if error is None else self._over.set_exception(error)

    async def _line(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        coming = asyncio.ensure_future(_frame(reader))
        try:
            while True:
                data, coming = await coming, asyncio.ensure_future(_frame(reader))
                reply = await self._reply(data, coming)
                writer.writelines((HEAD.pack(len(reply)), reply))
                await writer.drain()
        except ClusterDiedError as error:
            self._end(error)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the server hung up
        finally:
            coming.cancel()
            writer.close()

    async def _reply(self, data: bytes, coming: asyncio.Future[bytes]) -> bytes:
        """Ray's answer. Where the server hangs up meanwhile, the worker is killed. Raises ClusterDiedError."""
        reference = self._ask(__version__, self._runner, data)
        answer = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait({answer, coming}, return_when=asyncio.FIRST_COMPLETED)
            return _answered(answer) if answer.done() else await coming
        finally:
            if not answer.done():
                answer.cancel()
                ray.cancel(reference, force=True)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(size_of(await reader.readexactly(HEAD.size), MAX_TASK))


def _answered(answer: asyncio.Future[bytes]) -> bytes:
    try:
        return answer.result()
    except _WORKER_DIED as error:
        return encode(Died(f"a Ray worker has died: {str(error).splitlines()[0]}"))
    except _OF_THE_TASK as error:
        return encode(refusal(error))
    except exceptions.RayError as error:
        raise ClusterDiedError(str(error).splitlines()[0]) from error


def _answers(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S).close()
    except OSError:
        return False
    return True


def connect(address: str, cores: int, folder: str) -> None:
    """To the cluster, or to one of our own that ends with us and has its files in `folder`."""
    if address != "local":
        where = address.removeprefix("ray://")
        if ":" in where and not _answers(where):  # Ray would try for minutes
            raise ConnectionRefusedError(f"no Ray cluster answers at {address}")
        ray.init(address=address, namespace="apportion")
        return
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    ray.init(
        address="local",
        num_cpus=cores,
        object_store_memory=OBJECTS_BYTES,
        include_dashboard=False,
        namespace="apportion",
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )


def nodes() -> dict[str, int]:
    """The cores of each node that is there."""
    found = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in found if node["Alive"]}


def warmed(runner: str) -> dict[str, int]:
    """The cores of each node, once each core had a process that has compiled what tasks need; of nodes that have left
    meanwhile none."""
    found = {}
    begun = [(node, cores, begin_warming(runner, node, cores)) for node, cores in nodes().items()]
    for node, cores, references in begun:
        with suppress(*_NODE_LEFT):
            ray.get(references)
            found[node] = cores
    return found


def begin_warming(runner: str, node: str, cores: int) -> list[Any]:
    """References of what each core does."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    once = ray.remote(num_cpus=1)(warm).options(scheduling_strategy=there).remote
    return [once(runner) for _ in range(cores)]


async def _serve(control: socket.socket, runner: str, warm: dict[str, int]) -> None:
    await Driver(control, runner, warm).serve()


def main(control: socket.socket, runner: str, address: str, cores: str, folder: str) -> None:
    with dies_with(control):
        connect(address, int(cores), folder)
        found = warmed(runner)
    send(control, str(sum(found.values())).encode())
    try:
        asyncio.run(_serve(control, runner, found))
        control.close()
        ray.shutdown()
    except ClusterDiedError as error:
        print(f"the Ray cluster has died: {error}", file=sys.stderr, flush=True)
        os.killpg(
            0, signal.SIGKILL
        )  # us, and what is left of a cluster of our own: Ray would take half a minute


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
