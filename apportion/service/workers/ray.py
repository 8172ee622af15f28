"""Workers on a Ray cluster, for more throughput than one machine has.

Ray's own settings apply: RAY_ADDRESS is the cluster's address, RAY_AUTH_MODE=token with RAY_AUTH_TOKEN authenticates.
All nodes need this release of the package.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from apportion.ir.errors import MissingDependencyError
from apportion.service.workers.local import WorkerDiedError

try:
    # otherwise Ray replaces 127.0.0.1 with the machine's external address
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import exceptions
except ImportError as error:
    raise MissingDependencyError("ray", "ray", "planning on a Ray cluster") from error

T = TypeVar("T")
_DIED = (
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
    exceptions.NodeDiedError,
    exceptions.RaySystemError,
)


class RayExecutor(Executor):
    """Executor on Ray. address: the cluster's; None: RAY_ADDRESS or "local", which starts one on this machine with
    `workers` cores. task_s: time limit of a task from its submission to Ray, after which it raises `TimeoutError`."""

    def __init__(self, workers: int, task_s: float | None = None, address: str | None = None) -> None:
        self._task_s = task_s
        target = address or os.environ.get("RAY_ADDRESS", "local")
        local: dict[str, Any] = {
            "num_cpus": workers,
            "include_dashboard": False,
            "object_store_memory": 256 << 20,
        }
        ray.init(address=target, log_to_driver=False, **(local if target == "local" else {}))
        resources: Any = ray.cluster_resources
        self.workers = int(resources().get("CPU", workers)) if target != "local" else workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Like `Executor.submit`; the future raises `TimeoutError`, and `WorkerDiedError`."""
        future: Future[T] = Future()
        reference = ray.remote(num_cpus=1, max_retries=0)(fn).remote(*args, **kwargs)
        threading.Thread(target=self._wait, args=[reference, future], daemon=True).start()
        return future

    def _wait(self, reference: Any, future: Future[Any]) -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(ray.get(reference, timeout=self._task_s))
        except exceptions.GetTimeoutError:
            ray.cancel(reference, force=True)
            future.set_exception(TimeoutError(f"planning took longer than {self._task_s} s"))
        except _DIED as error:
            future.set_exception(WorkerDiedError(str(error).splitlines()[0]))
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnects from the cluster."""
        ray.shutdown()
