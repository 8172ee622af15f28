"""Requests to the control plane: what they are about, and who may make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Path, Request, Response
from pydantic import BeforeValidator

from apportion.service.engine import Engine, JobState
from apportion.service.http.api import models
from apportion.service.http.api.bodies import Patience, Room, parse, read
from apportion.service.http.api.models import MAX_EPOCH, MAX_ITERATION
from apportion.service.http.audit import JOB, WHO
from apportion.service.http.auth import Keys, given
from apportion.service.http.export import Exports
from apportion.service.http.metrics import Figures
from apportion.service.http.watch.events import Watchers
from apportion.service.http.watch.reports import Reports
from apportion.service.limits import Limits
from apportion.service.protocol import JSON, job_path

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")


@dataclass(frozen=True)
class Parts:
    """What the routes work on."""

    engine: Engine
    keys: Keys
    limits: Limits
    patience: Patience
    room: Room
    figures: Figures
    watchers: Watchers
    reports: Reports
    exports: Exports
    public_url: str = ""  # before the paths of jobs in answers


@dataclass(frozen=True)
class Call:
    """A request that may do what it asks for."""

    parts: Parts
    request: Request

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def reads(self) -> bool:
        """Whether the key sent only reads."""
        return str(self.request.scope.get(WHO, "")).startswith("read:")

    async def body(self, kind: type[T], then: Callable[[T], R]) -> R:
        """What `then` makes of the body; in a thread where it is large."""
        most, wait_s = self.parts.limits.body_bytes, self.parts.patience.body_s
        with self.parts.room.part() as take:
            data = await read(self.request.scope, self.request.receive, most, wait_s, take)
            async with self.parts.room.turn(len(data)):
                return await parse(data, kind, then)

    def url(self, job: str) -> str:
        """A path where the server was told no URL of its own: what a client writes as Host is no URL to pass on."""
        return self.parts.public_url + job_path(job)

    def is_by(self, who: str, job: str = "") -> Call:
        """Tells the audit log who asks, and of what job."""
        self.request.scope[WHO] = who
        self.request.scope[JOB] = job
        return self

    def reply(self, job: JobState) -> models.JobReply:
        own = (job.name, self.url(job.name), job.spec.ranks, job.lookahead)
        return models.JobReply(*own, job.epoch, dict(job.streams), job.spec.to_data())


def _digits(value: Any) -> Any:
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise ValueError("must be written in decimal digits")
    return value


Name = Annotated[str, Path(pattern=models.NAME)]
KeyId = Annotated[str, Path(pattern=models.KEY_ID)]
EpochNumber = Annotated[int, BeforeValidator(_digits), Path(ge=1, le=MAX_EPOCH)]
IterationNumber = Annotated[int, BeforeValidator(_digits), Path(ge=0, le=MAX_ITERATION)]


def _call(request: Request) -> Call:
    return Call(request.app.state.parts, request)


def _authorization(request: Request) -> bytes | None:
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


async def _anyone(request: Request) -> Call:
    return _call(request)


async def _admin(request: Request) -> Call:
    call = _call(request)
    call.parts.keys.check_admin(_authorization(request), request.headers.get("host", ""))
    return call.is_by("admin")


async def _figures(request: Request) -> Call:
    call = _call(request)
    call.parts.keys.check_figures(_authorization(request), request.headers.get("host", ""))
    return call


def _member_of(request: Request, job: str, writes: bool) -> Call:
    call, sent = _call(request), given(_authorization(request))
    return call.is_by(call.parts.keys.check_job(call.engine.keys(job), sent, writes), job)


async def _member(request: Request, job: Name) -> Call:
    return _member_of(request, job, writes=False)


async def _writer(request: Request, job: Name) -> Call:
    return _member_of(request, job, writes=True)


async def _owner(request: Request, job: Name) -> Call:
    call, host = _call(request), request.headers.get("host", "")
    call.parts.keys.check_owner(call.engine.keys(job), _authorization(request), host)
    return call.is_by("admin", job)


async def _reader(request: Request, job: Name) -> Call:
    """Who may look at a job: its key or the admin's; without keys whoever is on this machine."""
    call, host = _call(request), request.headers.get("host", "")
    call.parts.keys.check_reader(call.engine.keys(job), _authorization(request), host)
    return call


Anyone = Annotated[Call, Depends(_anyone)]
Admin = Annotated[Call, Depends(_admin)]
Scraper = Annotated[Call, Depends(_figures)]
Member = Annotated[Call, Depends(_member)]
Writer = Annotated[Call, Depends(_writer)]
Owner = Annotated[Call, Depends(_owner)]
Reader = Annotated[Call, Depends(_reader)]


def reply(value: msgspec.Struct, status: int = 200) -> Response:
    """JSON that nobody keeps."""
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, JSON)
