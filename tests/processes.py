"""Finds the descendants of a process in /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The descendants of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(text) for task in tasks for text in task.read_text().split()]
    return direct + [descendant for child in direct for descendant in descendants(child)]


def running(pids: Iterable[int], seconds: float = 0.0) -> set[int]:
    """The processes that still run after at most `seconds`."""
    until = time.monotonic() + seconds
    while (alive := {pid for pid in pids if _runs(pid)}) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
