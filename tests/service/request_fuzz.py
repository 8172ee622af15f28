"""Requests that know the schema and break it: every route, bodies deep, wide, of other types and sizes, headers twice.

Each answer is one that HTTP allows, none but 503 says that the server is at fault, and the event loop is never held up
for more than 250 ms.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from apportion.service.private import admin_key_of
from tests.service.attacks import MOST_MIB, pauses_of
from tests.service.load import KEY, Figures, job_of, rss_mib, running

PROCESSES = 2
_MASKS: tuple[Any, ...] = (
    None,
    "causal",
    {"causal": {}},
    {"window": {"left": 128, "right": 0}},
    {"documents": {"lengths": [8, 8], "mask": {"causal": {}}}},
    {"tree": {"nodes": [[-1, 4], [0, 4], [0, 8]]}},
)
_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda rng: None,
    lambda rng: True,
    lambda rng: rng.choice((-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30)),
    lambda rng: rng.choice((0.5, -0.0, 1e308, 1e-320)),
    lambda rng: rng.choice(("", "x" * rng.choice((1, 64, 5000)), "é\u0000\ud83d", "../..", "causal")),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [rng.randrange(-2, 4096)] * rng.choice((1, 1000, 100_000)),
    lambda rng: {f"k{i}": i for i in range(rng.choice((1, 100, 20_000)))},
    lambda rng: _deep(rng.choice((10, 100, 2000)), rng.choice("[{")),
    lambda rng: {"documents": {"lengths": [64] * 64, "mask": rng.choice(_MASKS)}},
)


def _deep(levels: int, kind: str) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found] if kind == "[" else {"documents": {"lengths": [1], "mask": found}}
    return found


def _mutated(rng: Random, value: Any) -> Any:
    """A value with some of its parts replaced, removed or said twice as often."""
    if rng.random() < 0.1:
        return rng.choice(_VALUES)(rng)
    if isinstance(value, dict):
        found = {key: _mutated(rng, held) for key, held in value.items() if rng.random() > 0.05}
        if rng.random() < 0.05:
            found[rng.choice(("", "mask", "lengths", "x" * 300))] = rng.choice(_VALUES)(rng)
        return found
    if isinstance(value, list):
        few = [_mutated(rng, held) for held in value[:4]] + value[4:]
        return few * rng.choice((0, 1, 1, 1, 2, 50))
    return value


def _body(rng: Random, job: dict[str, Any], route: str) -> bytes:
    valid: dict[str, Any]
    if route == "jobs":
        valid = {"name": f"fuzz{rng.randrange(8)}", "job": deepcopy(job), "lookahead": 4, "key": KEY}
    elif route == "epochs":
        valid = {"run": f"run{rng.randrange(4)}", "stream": rng.choice(("train", "eval"))}
    elif route == "keys":
        valid = {"role": rng.choice(("read", "submit"))}
    else:
        lengths = [rng.randrange(1, 2048) for _ in range(rng.choice((1, 4, 64)))]
        valid = {"batches": [{"lengths": lengths, "mask": rng.choice(_MASKS)}]}
    data = bytearray(json.dumps(_mutated(rng, valid) if rng.random() < 0.6 else valid).encode())
    if rng.random() < 0.05:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.03 else data)


def _request(
    rng: Random, job: dict[str, Any], admin: str
) -> tuple[str, str, bytes | None, list[tuple[str, str]]]:
    number = rng.choice((0, 1, 7, 63, 300, 2**53, -1, "x", "%00", "1e9"))
    job_name = rng.choice(("load", "load", "fuzz0", "fuzz1", "nobody", ".", "x" * 65, "%2e%2e"))
    epoch = rng.choice((1, 1, 1, 2, 0, 10**8, "x"))
    one, route = (
        f"/v1/jobs/{job_name}/epochs/{epoch}",
        rng.choice(("jobs", "epochs", "iteration", "keys", "get")),
    )
    body: bytes | None = None
    if route == "get":
        method = rng.choice(("GET", "GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE"))
        wait = rng.choice(("", "?wait_s=0.01", "?wait_s=x", "?wait_s=0&wait_s=1", "?from=3&window=0"))
        path = rng.choice(
            (
                f"{one}/iterations/{number}/ranks/{rng.choice((0, 3, 10**5, 'x'))}/plan{wait}",
                f"{one}/ranks/{rng.choice((64, 10**6))}/stream{wait}",
                f"{one}/iterations/{number}",
                f"{one}/iterations/{number}/report",
                one,
                f"/v1/jobs/{job_name}",
                f"/v1/jobs/{job_name}/keys",
                "/healthz",
                "/readyz",
                "/metrics",
                "/openapi.json",
                "/docs",
                "/",
                "/v1/jobs",
                "/%ff/\\",
            )
        )
        if path.startswith(("/v1/jobs/load", "/v1/jobs/fuzz")) and method == "DELETE" and "load" in path:
            method = "GET"
    else:
        method = {"iteration": "PUT"}.get(route, "POST")
        path = {
            "jobs": "/v1/jobs",
            "epochs": f"/v1/jobs/{job_name}/epochs",
            "keys": f"/v1/jobs/{job_name}/keys",
            "iteration": f"{one}/iterations/{number}",
        }[route]
        if job_name == "load" and route == "epochs":
            path = "/v1/jobs/fuzz0/epochs"  # the others' epoch shall go on
        body = _body(rng, job, route)
    key = rng.choice((KEY, KEY, admin, admin, "wrong", ""))
    headers = [("Authorization", f"Bearer {key}")] if rng.random() < 0.97 else []
    if rng.random() < 0.02:
        headers += [("Authorization", f"Bearer {KEY}")]
    if body is not None:
        headers += [("Content-Type", "application/json" if rng.random() < 0.98 else "text/plain")]
    if rng.random() < 0.05:
        name = rng.choice(("Accept", "X-Request-Id", "If-None-Match", "Range"))
        headers += [(name, "x" * rng.choice((1, 500, 9000)))]
    return method, path, body, headers


def _send(link: http.client.HTTPConnection, rng: Random, job: dict[str, Any], admin: str) -> int:
    """The status; 0 where the server has hung up, as it may on what is no HTTP or too large."""
    method, path, body, headers = _request(rng, job, admin)
    try:
        link.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers:
            link.putheader(name, value)
        if body is not None:
            link.putheader("Content-Length", str(len(body)))
        link.endheaders(body)
        answer = link.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        link.close()
        return 0
    if answer.status >= 500 and answer.status != 503:
        raise AssertionError(f"{answer.status} for {method} {path} {headers} {(body or b'')[:2000]!r}")
    return answer.status


def _fuzzing(seed: int, requests: int, host: str, port: int, admin: str, pipe: Any) -> None:
    sys.setrecursionlimit(50_000)  # for what is written deep
    rng, job, statuses = Random(seed), job_of(4, 2048).to_data(), Counter[int]()
    link = http.client.HTTPConnection(host, port, timeout=60.0)
    try:
        for _ in range(requests):
            statuses[_send(link, rng, job, admin)] += 1
        pipe.send_bytes(json.dumps(statuses).encode())
    except AssertionError as error:
        pipe.send_bytes(json.dumps({"error": str(error)}).encode())


def case(seed: int, requests: int = 100_000, timed: bool = True) -> Figures:
    """So many requests, by two processes. timed: pauses count: nothing else may run then. Raises AssertionError."""
    context = multiprocessing.get_context("spawn")
    with running(job_of(64, 8192), workers=1, options=("--worker-gb", "2", "--deadline", "5")) as run:
        admin, children = admin_key_of(run.url) or "", []
        for i in range(PROCESSES):
            ours, theirs = context.Pipe()
            arguments = (seed * PROCESSES + i, requests // PROCESSES, *run.address, admin, theirs)
            child = context.Process(target=_fuzzing, args=arguments, daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        statuses, most = Counter[str](), 0.0
        for child, ours in children:
            while not ours.poll(1.0):
                most = max(most, rss_mib(run.pid))
                if not child.is_alive() and not ours.poll():
                    raise AssertionError("a client died")
            said = json.loads(ours.recv_bytes())
            assert "error" not in said, said["error"]
            statuses.update(said)
            child.join()
        pauses, bound_s = pauses_of(run)
    figures = {
        "requests": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
        "server_mib": round(most, 1),
        "pauses": pauses,
        "longest_pause_s_below": bound_s,
    }
    assert not pauses or not timed, figures
    assert most <= MOST_MIB, figures
    return figures
