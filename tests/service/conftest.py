"""Fixtures: a server for all tests of a file, and workers for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from apportion.service.http.serve import Server, serving
from apportion.service.workers import ProcessExecutor
from tests.service.requests import TOKEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`apportion serve` with a folder and a token."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder / "plans", options=["--workers", "1"], token=TOKEN, log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(2, task_s=60.0, memory_bytes=4 << 30)
    yield executor
    executor.shutdown(cancel_futures=True)
