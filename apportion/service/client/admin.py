"""A server's jobs: made, listed, deleted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from msgspec.structs import replace

from apportion.ir.bytes.job import Job
from apportion.ir.fields import integer, name as checked_name
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
    cert: str | Path | None = None,
    proxy: str | None = None,
    pace: Pace = PACE,
) -> Client:
    """A client of the job `name`, created on `server` ("https://host:port"); one of that name, job and key that is
    there already is taken. key: of the job; by default a random one, made here so that a repeated request is the same
    one. admin_key: found where the server is one of this user on this machine. lookahead: iterations planned before
    they are asked for. Raises ConfigError, ClientError."""
    key = secrets.token_urlsafe(32) if key is None else key
    url = "".join(arguments.split("server", server)) + protocol.job_path(checked_name("name", name))
    client = Client(url, key, timeout_s=timeout_s, ca=ca, cert=cert, proxy=proxy, pace=pace)
    data = {"name": name, "job": job.to_data(), "lookahead": integer("lookahead", lookahead), "key": key}
    with _caller(server, admin_key, ca, proxy, timeout_s, pace, cert) as caller:
        caller.send("POST", protocol.JOBS, data, answers.Empty)
    return client


def list_jobs(
    server: str,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    proxy: str | None = None,
) -> list[protocol.JobSummary]:
    """The jobs of `server`, by name. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, proxy, cert=cert) as caller:
        found = caller.get(protocol.JOBS, answers.JobList).jobs
    base = "".join(arguments.split("server", server))
    return [replace(job, url=base + job.url) if job.url.startswith("/") else job for job in found]


def delete_job(
    server: str,
    name: str,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    proxy: str | None = None,
) -> None:
    """Delete the job `name` of `server`, and its plans. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, proxy, cert=cert) as caller:
        caller.delete(protocol.job_path(checked_name("name", name)))


def export_store(
    server: str,
    file: BinaryIO,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> None:
    """Write a copy of what `server` keeps, while it works, as `apportion store import` reads it. progress: called with
    the bytes so far. Raises ConfigError, ClientError, OSError."""
    with _caller(server, admin_key, ca, None, cert=cert) as caller:
        caller.download(protocol.EXPORT, protocol.TAR, file, progress)


def add_key(
    server: str,
    name: str,
    *,
    role: Literal["submit", "read"] = "submit",
    key: str | None = None,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
) -> protocol.JobKey:
    """A further key of the job `name`: to rotate, add a new one, hand it out, and revoke the one before. role: `read`
    for one that fetches plans and submits nothing. Raises ConfigError, ClientError."""
    key = secrets.token_urlsafe(32) if key is None else key
    with _caller(server, admin_key, ca, None, cert=cert) as caller:
        return caller.send("POST", _keys(name), {"role": role, "key": key}, protocol.JobKey)


def list_keys(
    server: str,
    name: str,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
) -> list[protocol.JobKey]:
    """The keys of the job `name`, without what opens it. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, None, cert=cert) as caller:
        return caller.get(_keys(name), answers.KeyList).keys


def revoke_key(
    server: str,
    name: str,
    id: str,
    *,
    admin_key: str | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
) -> None:
    """The key of that id opens nothing from now on. Raises ConfigError, ClientError."""
    with _caller(server, admin_key, ca, None, cert=cert) as caller:
        caller.delete(f"{_keys(name)}/{checked_name('id', id)}")


def _keys(name: str) -> str:
    return f"{protocol.job_path(checked_name('name', name))}/keys"


@contextmanager
def _caller(
    server: str,
    admin_key: str | None,
    ca: str | Path | None,
    proxy: str | None,
    timeout_s: float = _TIMEOUT_S,
    pace: Pace = PACE,
    cert: str | Path | None = None,
) -> Iterator[Caller]:
    base, path = arguments.split("server", server)
    base, admin_key = arguments.nearby(base, admin_key)
    headers = arguments.authorization("admin_key", admin_key)
    caller = Caller(
        arguments.peer(base, ca, proxy, cert), path, headers, arguments.seconds("timeout_s", timeout_s), pace
    )
    try:
        yield caller
    finally:
        caller.close()
