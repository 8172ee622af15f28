"""Workers that are processes of this machine."""

from __future__ import annotations

from apportion.ir.fields import integer
from apportion.service.workers.pool import LinePool

RUNNER = "apportion.service.workers.worker"


class ProcessPool(LinePool):
    """Processes forked from a zygote. runner: a module with `warm()` and `run(task) -> Done`, which the zygote
    imports. memory_bytes: that a worker may map beyond what it is forked with, 0 for no limit. Raises ConfigError for a
    wrong number."""

    def __init__(self, size: int, *, runner: str = RUNNER, memory_bytes: int = 0) -> None:
        most = str(integer("memory_bytes", memory_bytes, 0))
        super().__init__(integer("workers", size), ("apportion.service.workers.zygote", runner, most))
