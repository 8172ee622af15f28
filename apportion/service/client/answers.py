"""What an answer says: a plan that is checked, data, or a problem."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from urllib3 import HTTPHeaderDict

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.hashing import digest
from apportion.service import protocol
from apportion.service.client.errors import (
    BadAnswerError,
    ChangedPlanError,
    ServiceProblem,
    UnreachableError,
)
from apportion.service.client.link import Answer
from apportion.service.client.waits import TransientError, retry_after

T = TypeVar("T")

_SHOWN = 1000
_REMEMBERED = 4096


class _ProblemWire(msgspec.Struct):
    """RFC 9457; members that are not there or of another type do not matter."""

    type: Any = ""
    title: Any = ""
    status: Any = 0
    detail: Any = ""
    field: Any = None
    retry_after: Any = None


class JobData(msgspec.Struct):
    """Of a job; `job` is what Job.from_data reads."""

    job: Any


class EpochData(msgspec.Struct):
    epoch: int


class JobList(msgspec.Struct):
    jobs: list[protocol.JobSummary]


class KeyList(msgspec.Struct):
    keys: list[protocol.JobKey]


class Empty(msgspec.Struct):
    """Data of which nothing is needed."""


def read(answer: Answer, kind: type[T]) -> T:
    """The JSON data of an answer. Raises BadAnswerError, and what `check` raises."""
    check(answer)
    try:
        return msgspec.json.decode(answer.body or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadAnswerError(f"not the JSON that protocol v1 has here: {error}") from None


def check(answer: Answer) -> None:
    """Raises TransientError where another attempt may mend it, else ServiceProblem, for an answer above 299."""
    if answer.status > 299:
        failure = problem(answer.body, answer.status)
        if isinstance(failure, TransientError) and "Retry-After" in answer.headers:
            failure.retry_after = retry_after(answer.headers["Retry-After"], answer.headers.get("Date"))
        raise failure


def problem(body: bytes, status: int | None = None) -> TransientError | ServiceProblem:
    """What is raised for the problem in `body`, under HTTP's own status where there is one."""
    try:
        found = msgspec.json.decode(body, type=_ProblemWire)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = _ProblemWire(detail=body[:200].decode("ascii", "replace"))
    failure = _problem(found, status)
    if not failure.transient:
        return failure
    asked = found.retry_after
    return TransientError(failure, max(0.0, asked) if isinstance(asked, int | float) else None)


def _problem(found: _ProblemWire, status: int | None) -> ServiceProblem:
    own = found.status if isinstance(found.status, int) else 0
    text = found.detail or found.title or "the answer does not say why"
    named = found.field[:_SHOWN] if isinstance(found.field, str) else None
    type_ = re.split("[/:]", str(found.type))[-1][:64] or "problem"
    return ServiceProblem(status or own or 500, type_, str(text)[:_SHOWN], named)


def not_yet(answer: Answer) -> TransientError:
    """Of a 202: the plan is not there yet."""
    asked = retry_after(answer.headers.get("Retry-After"), answer.headers.get("Date"))
    error = UnreachableError("it is not planned yet, or its batches are not submitted")
    return TransientError(error, 1.0 if asked is None else asked)


def check_type(headers: HTTPHeaderDict, kind: str) -> None:
    """Raises BadAnswerError where the answer is not of that media type."""
    found = headers.get("Content-Type", "").split(";")[0].strip()
    if found != kind:
        raise BadAnswerError(f"{kind} was asked for, the answer is {found[:64] or 'of no media type'}")


def plan_of(answer: Answer) -> bytes:
    """The body of a plan, as its ETag says. Raises TransientError where it was changed on the way."""
    check_type(answer.headers, protocol.PLAN)
    told, found = answer.headers.get("ETag", ""), protocol.etag(digest(answer.body))
    if told != found:
        what = f"the ETag of a plan is {told[:80] or 'missing'}, its body's is {found}"
        raise TransientError(BadAnswerError(f"{what}: it was changed on the way"))
    return answer.body


class Received:
    """Which plan each iteration was received as; the last few thousand. Safe for threads, without a lock: one that
    another thread held when the process was forked would stay locked in the child."""

    def __init__(self) -> None:
        self._newer: dict[tuple[int, int, int], bytes] = {}
        self._older: dict[tuple[int, int, int], bytes] = {}

    def decode(self, body: bytes, epoch: int, iteration: int, rank: int) -> IterationSlice:
        """The rank's slice in `body`. Raises BadAnswerError, ChangedPlanError."""
        what = f"epoch {epoch}, iteration {iteration}, rank {rank}"
        try:
            found = IterationSlice.decode(body)
        except (DecodeError, ConfigError) as error:
            raise BadAnswerError(f"{what}: {error}") from error
        if found.rank != rank:
            raise BadAnswerError(f"{what}: the plan is of rank {found.rank}")
        self.check(digest(body), epoch, iteration, rank)
        self.check(found.id, epoch, iteration, -1)
        return found

    def check(self, found: bytes, epoch: int, iteration: int, rank: int) -> None:
        """found: 32 bytes, the digest of the rank's body; the plan's id where rank is -1. Raises ChangedPlanError."""
        place = (epoch, iteration, rank)
        first = self._older.get(place) or self._newer.setdefault(place, found)
        if len(self._newer) > _REMEMBERED:
            self._older, self._newer = self._newer, {}
        if first != found:
            what = f"the plan of rank {rank}" if rank >= 0 else "the plan's id"
            raise ChangedPlanError(
                f"epoch {epoch}, iteration {iteration}: {what} is {found.hex()}, before it was {first.hex()}: ranks "
                "would run plans that do not fit; begin a new epoch, and look for two servers on one store"
            )
