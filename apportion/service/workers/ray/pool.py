"""Workers of a Ray cluster, where one machine is not enough.

Ray's own settings hold: RAY_ADDRESS says where the cluster is, RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or
RAY_AUTH_TOKEN_PATH has what opens it. Its nodes need this release of the package. Arguments and results are bytes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

from apportion.ir.errors import MissingDependencyError
from apportion.service.workers.errors import LineLostError
from apportion.service.workers.launcher import LOG
from apportion.service.workers.pool import LinePool
from apportion.service.workers.processes import RUNNER
from apportion.service.workers.tasks import Done, Task


class RayPool(LinePool):
    """size: tasks under way at once, 0: as many as the cluster has cores, also as machines join and leave it. address:
    of the cluster, None for RAY_ADDRESS, "local" to start one on this machine, which is the default. A task's deadline
    begins when Ray is given it. When the cluster dies, tasks wait until there is one again. Raises ConfigError,
    MissingDependencyError."""

    def __init__(self, size: int = 0, address: str | None = None, *, runner: str = RUNNER) -> None:
        if find_spec("ray") is None:
            raise MissingDependencyError("ray", "ray", "planning on a Ray cluster")
        address = address or os.environ.get("RAY_ADDRESS", "local")
        cores = size or os.cpu_count() or 1
        own = _LOOPBACK | _token() if address == "local" else _LOOPBACK if _is_loopback(address) else {}
        self._folder = Path(gettempdir(), f"apportion-ray-{secrets.token_hex(8)}")
        command = ("apportion.service.workers.ray.driver", runner, address, str(cores), str(self._folder))
        super().__init__(size, command, own)

    async def run(self, task: Task, deadline_s: float) -> Done:
        while True:
            try:
                return await super().run(task, deadline_s)
            except LineLostError as error:
                LOG.warning("%s: the task waits for another", error)

    async def close(self, drain_s: float = 0.0) -> None:
        await super().close(drain_s)
        await asyncio.to_thread(rmtree, self._folder, ignore_errors=True)


# Without the first, Ray takes the machine's outer address in place of 127.0.0.1 on Linux, to listen as well as to
# connect; the other keeps it from reporting what it is used for.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def _token() -> dict[str, str]:
    """A new one, unless the user has one."""
    if os.environ.get("RAY_AUTH_MODE") or os.environ.get("RAY_AUTH_TOKEN"):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
