"""A pass that is left open does not disturb the interpreter's exit, whoever plans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apportion.service.client import create_job
from apportion.service.http.run.child import serving
from tests.ranks.loading import job

ROOT = Path(__file__).parents[2]
OPEN = """
import sys
from tests.ranks.loading import MODEL, Recorded
import apportion as ap
source, key, workers, status = sys.argv[1:]
told = (ap.Cluster(1, 1), MODEL, 64) if source == "local" else ()
held = iter(ap.PlannedLoader(Recorded(), *told, source=source, key=key or None, workers=int(workers)))
next(held)
if status != "0":
    raise SystemExit(int(status))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    with serving(tmp_path_factory.mktemp("server")) as server, create_job(server.url, "run", job()) as client:
        yield {"local": ("local", ""), "service": (client.url, client.key)}


@pytest.mark.parametrize(("workers", "status"), [(0, 0), (0, 3), (1, 0)])
@pytest.mark.parametrize("name", ["local", "service"])
def test_an_open_pass_leaves_no_traceback_at_exit(
    sources: dict[str, tuple[str, str]], name: str, workers: int, status: int
) -> None:
    source, key = sources[name]
    command = [sys.executable, "-c", OPEN, source, key, str(workers), str(status)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    said = [line for line in done.stderr.decode().splitlines() if "apportion warmup" not in line]
    assert (done.returncode, said, done.stdout) == (status, [], b"")
