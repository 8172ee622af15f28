"""A server whose disk is full: it starts, serves what it has, says why it is not ready, and a deletion makes room. It
mounts a small disk of its own: as root, on Linux."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import urllib3

from apportion.service.http.run.child import Serving, serving
from tests.service.servers import KEY, Caller, begin, make_job, plan_path, ready, submit

_SIZE_MIB = 48


@contextmanager
def small_disk() -> Iterator[Path]:
    """A disk of some MiB, in memory."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def fill(path: Path) -> None:
    """Until not one byte is free."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 1 << 12, 1):
        with suppress(OSError):
            while True:
                os.write(file, bytes(size))
    os.close(file)


def caller_of(server: Serving) -> Caller:
    return Caller(server.url, server.admin_key, urllib3.PoolManager(maxsize=2, retries=False, timeout=60))


def case(seed: int) -> dict[str, float]:
    """The seed is of no use: nothing in it is random."""
    with small_disk() as disk:
        with serving(disk / "store") as server:
            caller = caller_of(server)
            for name in ("run", "other"):
                assert make_job(caller, name).status == 201
                begin(caller, name)
                for number in range(8):
                    assert submit(caller, number, name=name).status == 201
                    assert ready(caller, number, name=name).status == 200
            fill(disk / "first")
            assert submit(caller, 50).status == 503
            told = caller("GET", "/readyz")
            assert told.status == 503, told
            assert "full" in told.json["reason"], told
            assert caller.using(KEY)("GET", plan_path(3)).status == 200
            assert caller("DELETE", "/v1/jobs/other").status == 204
            assert caller("GET", "/readyz").status == 200
            caller.http.clear()
        fill(disk / "second")
        with serving(disk / "store") as server:
            caller = caller_of(server)
            assert caller.using(KEY)("GET", plan_path(3)).status == 200
            assert caller("DELETE", "/v1/jobs/run").status == 204
            caller.http.clear()
    return {}
