"""Redis server for tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from apportion.service.store import StoreError, open_store


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Starts an in-memory Redis and yields its URL; skips the test if Redis is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    words = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(StoreError):
                open_store(url).close()
                break
        try:
            yield url
        finally:
            process.terminate()
