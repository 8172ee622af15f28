"""A month of a busy server in an hour: jobs are made, run and deleted, with retention on; memory, descriptors and disk
stay what they were, and a server that is started again at the end is ready at once."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import urllib3

from apportion.service.http.run.child import serving
from apportion.service.private import admin_key_of
from tests.service.attacks import pauses_of
from tests.service.load import KEY, Figures, Run, descriptors, job_of, rss_mib
from tests.service.stores import free_port

JOBS, PROCESSES = 40, 2
_LIFE = 500  # iterations of a job, before it is deleted and another one is made
_AHEAD = 8
_OPTIONS = ("--keep", "64", "--store-gb", "0.1", "--store-days", "0.005", "--job-days", "1")
MOST_MIB, MOST_RESTART_S = 300.0, 2.0


class _Life:
    """A job, from its creation to its deletion, one iteration at a time."""

    def __init__(self, link: http.client.HTTPConnection, admin: str, name: str, seed: int) -> None:
        self._link, self._admin, self.name = link, admin, name
        self._rng, self._next, self._epoch = Random(seed), 0, 0
        self._lives = 0

    def step(self) -> None:
        if self._next == 0:
            job = job_of(4, 2048, 256).to_data()
            self._ask("POST", "/v1/jobs", {"name": self.name, "job": job, "key": KEY}, self._admin, (201,))
            said = self._ask(
                "POST", f"/v1/jobs/{self.name}/epochs", {"run": f"run{self._lives}"}, KEY, (201,)
            )
            self._epoch = json.loads(said)["epoch"]
        self._submit(self._next)
        if self._next >= _AHEAD:
            self._read(self._next - _AHEAD)
        self._next += 1
        if self._next == _LIFE:
            self._ask("DELETE", f"/v1/jobs/{self.name}", None, self._admin, (204,))
            self._next, self._lives = 0, self._lives + 1

    def _path(self, number: int) -> str:
        return f"/v1/jobs/{self.name}/epochs/{self._epoch}/iterations/{number}"

    def _submit(self, number: int) -> None:
        lengths = [self._rng.randrange(1, 1000) for _ in range(self._rng.randrange(1, 9))]
        self._ask("PUT", self._path(number), {"batches": [{"lengths": lengths}]}, KEY, (201,))

    def _read(self, number: int) -> None:
        for rank in (0, 3):
            while not self._ask(
                "GET", f"{self._path(number)}/ranks/{rank}/plan?wait_s=30", None, KEY, (200, 202)
            ):
                pass

    def _ask(self, method: str, path: str, body: Any, key: str, good: tuple[int, ...]) -> bytes:
        """The body of 200 and 201, b"" for "not yet"."""
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        again: tuple[int, ...] = ()
        while True:
            try:
                self._link.request(method, path, data, headers)
                answer = self._link.getresponse()
                said = answer.read()
            except (OSError, http.client.HTTPException):  # idle for too long, where the machine stood still
                self._link.close()
                again = (200, 201, 401, 404)  # it may have arrived
                continue
            if answer.status in (429, 503):
                time.sleep(0.05)
                continue
            if answer.status not in good + again:
                raise AssertionError(f"{answer.status} for {method} {path}: {said[:500]!r}")
            return said if answer.status in (200, 201) else b""


def _living(
    host: str, port: int, admin: str, names: list[str], iterations: int, seed: int, pipe: Any
) -> None:
    link = http.client.HTTPConnection(host, port, timeout=120.0)
    lives = [_Life(link, admin, name, seed * 1000 + i) for i, name in enumerate(names)]
    try:
        for done in range(iterations):
            lives[done % len(lives)].step()
            if done % 100 == 99:
                pipe.send(done + 1)
        pipe.send("done")
    except AssertionError as error:
        pipe.send(str(error))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@contextmanager
def _answering(port: int) -> Iterator[list[float]]:
    """Seconds from now until a server answers there, in a list, at the end."""
    began_s, found = time.monotonic(), list[float]()

    def look() -> None:
        while not found:
            with suppress(urllib3.exceptions.HTTPError):
                urllib3.request("GET", f"http://127.0.0.1:{port}/healthz", timeout=1.0, retries=False)
                found.append(time.monotonic() - began_s)
            time.sleep(0.01)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    yield found
    looking.join(60.0)


def case(seed: int, folder: Path, iterations: int = 300_000) -> Figures:
    """Raises AssertionError where something grows, or the restart is slow."""
    samples: list[tuple[float, int, float]] = []  # (MiB, descriptors, MiB of disk)
    store, began_s = folder / "store", time.monotonic()
    with serving(store, workers=2, options=_OPTIONS) as server:
        run = Run(server.url, server.pid, "", None, 0, job_of(4, 2048))
        done = _whole(run, admin_key_of(server.url) or "", seed, iterations, lambda: samples.append(
            (rss_mib(server.pid), descriptors(server.pid), _size(store) / 2**20)
        ))  # fmt: skip
        pauses, bound_s = pauses_of(run)
    took_s, port = time.monotonic() - began_s, free_port()
    with _answering(port) as answered, serving(store, port=port, workers=2, options=_OPTIONS) as server:
        after_mib = rss_mib(server.pid)
    (restart_s,) = answered
    third = samples[len(samples) // 3 : 2 * len(samples) // 3], samples[2 * len(samples) // 3 :]
    middle, last = ([max(column) for column in zip(*part, strict=True)] for part in third)
    figures = {
        "iterations": done,
        "seconds": round(took_s),
        "per_s": round(done / took_s, 1),
        "mib": [round(middle[0], 1), round(last[0], 1)],
        "descriptors": [middle[1], last[1]],
        "disk_mib": [round(middle[2], 1), round(last[2], 1)],
        "pauses": pauses,
        "longest_pause_s_below": bound_s,
        "restart_s": round(restart_s, 2),
        "restart_mib": round(after_mib, 1),
    }
    grown = last[0] > 1.1 * middle[0] or last[1] > middle[1] + 8 or last[2] > 1.2 * middle[2] + 4
    assert not grown, figures
    assert restart_s <= MOST_RESTART_S, figures
    assert max(after_mib, last[0]) <= MOST_MIB, figures
    return figures


def _whole(run: Run, admin: str, seed: int, iterations: int, sample: Any) -> int:
    context = multiprocessing.get_context("spawn")
    names, children = [f"job{number}" for number in range(JOBS)], []
    for i in range(PROCESSES):
        ours, theirs = context.Pipe()
        mine = names[i::PROCESSES]
        arguments = (*run.address, admin, mine, iterations // PROCESSES, seed * PROCESSES + i, theirs)
        child = context.Process(target=_living, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    done, every = 0, max(iterations // PROCESSES // 100, 1)
    for child, ours in children:
        looked = 0
        while (said := ours.recv()) != "done":
            assert isinstance(said, int), said
            if said - looked >= every:
                looked = said
                sample()
        done += iterations // PROCESSES
        child.join()
    return done
