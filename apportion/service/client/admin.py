"""A server's jobs: made, listed, deleted."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apportion.ir.bytes.job import Job
from apportion.ir.fields import integer
from apportion.ir.fields import name as checked_name
from apportion.service import protocol
from apportion.service.client import answers, arguments
from apportion.service.client.caller import Caller
from apportion.service.client.job import PACE, Client
from apportion.service.client.waits import Pace

_TIMEOUT_S = 30.0


def create_job(
    server: str,
    name: str,
    job: Job,
    *,
    key: str | None = None,
    admin_key: str | None = None,
    lookahead: int = 8,
    timeout_s: float = _TIMEOUT_S,
    ca: str | Path | None = None,
    proxy: str | None = None,
    pace: Pace = PACE,
) -> Client:
    """A client of the job `name`, created on `server` ("https://host:port"); one of that name, job and key that is
    there already is taken. key: of the job; by default a random one, made here so that a repeated request is the
    same one. lookahead: iterations planned before they are asked for. Raises ConfigError, ClientError."""
    key = secrets.token_urlsafe(32) if key is None else key
    url = "".join(arguments.split("server", server)) + protocol.job_path(checked_name("name", name))
    client = Client(url, key, timeout_s=timeout_s, ca=ca, proxy=proxy, pace=pace)
    data = {"name": name, "job": job.to_data(), "lookahead": integer("lookahead", lookahead), "key": key}
    with _caller(server, admin_key, ca, proxy, timeout_s, pace) as caller:
        caller.send("POST", protocol.JOBS, data, answers.Empty)
    return client


def list_jobs(
    server: str, *, admin_key: str | None = None, ca: str | Path | None = None, proxy: str | None = None
) -> list[protocol.JobSummary]:
    """The jobs of `server`, by name. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, proxy) as caller:
        return caller.get(protocol.JOBS, answers.JobList).jobs


def delete_job(
    server: str,
    name: str,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    proxy: str | None = None,
) -> None:
    """Delete the job `name` of `server`, and its plans. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, proxy) as caller:
        caller.send("DELETE", protocol.job_path(checked_name("name", name)), None, answers.Empty)


@contextmanager
def _caller(
    server: str,
    admin_key: str | None,
    ca: str | Path | None,
    proxy: str | None,
    timeout_s: float = _TIMEOUT_S,
    pace: Pace = PACE,
) -> Iterator[Caller]:
    base, path = arguments.split("server", server)
    headers = arguments.authorization("admin_key", admin_key)
    caller = Caller(
        arguments.peer(base, ca, proxy), path, headers, arguments.seconds("timeout_s", timeout_s), pace
    )
    try:
        yield caller
    finally:
        caller.close()
