"""An unfinished pass does not disturb the interpreter's exit, with any source."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apportion.service.http.serve import serving
from tests.support.sparse import sparse, sparse_rows

ROOT = Path(__file__).parents[2]
OPEN = """
import sys
from tests.ranks.loading import MODEL, Recorded
import apportion as ap
source, workers, status = sys.argv[1:]
batches = iter(ap.PlannedLoader(Recorded(), ap.Cluster(1, 1), MODEL, 64, source=source, workers=int(workers)))
next(batches)
if status != "0":
    raise SystemExit(int(status))
"""


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, str]]:
    with serving(None) as server:
        yield {"local": "local", "service": server.url}


@pytest.mark.parametrize(("workers", "status"), sparse_rows([(0, 3), (0, 0), (1, 0)], 3))
@pytest.mark.parametrize("name", sparse(["service", "local"], 2))
def test_an_unfinished_pass_ends_quietly(
    sources: dict[str, str], name: str, workers: int, status: int
) -> None:
    command = [sys.executable, "-c", OPEN, sources[name], str(workers), str(status)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout) == (status, b"", b"")
