"""Errors as problem+json, RFC 9457.

Every answer of 400 and above has this form, whoever found the fault: the engine, FastAPI or the HTTP parser.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from starlette.types import Send

from apportion.ir.errors import ApportionError, CapacityError, ConfigError, DecodeError
from apportion.service.errors import ServiceError, StoreError
from apportion.service.protocol import PROBLEM

Headers = list[tuple[bytes, bytes]]

URN = "urn:apportion:problem:"
_UNREAD = (408, 413)


class SlowBodyError(ServiceError, TimeoutError):
    """The body did not come in time."""

    status, type, title = 408, "slow-body", "The body did not come in time"


class MediaTypeError(ServiceError, ValueError):
    """A body that is not plain JSON."""

    status, type, title = 415, "media-type", "The body must be JSON"


class MethodError(ServiceError):
    """The resource has other methods. allow: them."""

    status, type, title = 405, "method-not-allowed", "Method Not Allowed"

    def __init__(self, method: str, allow: str) -> None:
        self.allow = allow
        super().__init__(f"{method} is not among the methods of this resource: {allow}")


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """problem+json. `type` is `urn:apportion:problem:` and the kind of problem."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    retry_after: float | None = None
    request_id: str | None = None


def problem_of(error: Exception, request_id: str | None = None) -> Problem:
    """What the client is told of an error."""
    if isinstance(error, ServiceError):
        return Problem(
            URN + error.type,
            error.title,
            error.status,
            error.detail,
            error.field,
            error.retry_after,
            request_id,
        )
    if isinstance(error, ConfigError | CapacityError | DecodeError):
        field = getattr(error, "field", None)
        return Problem(URN + "invalid", "The request is wrong", 422, str(error), field, request_id=request_id)
    if isinstance(error, StoreError):
        title = "The store does not answer"
        return Problem(URN + "store", title, 503, str(error), retry_after=1.0, request_id=request_id)
    return internal(request_id)


def internal(request_id: str | None) -> Problem:
    """Of an error that is ours: the log has it, the client gets its place there."""
    detail = "the server failed over this request; its log says why, under the request id"
    return Problem(URN + "internal", "The server failed", 500, detail, request_id=request_id)


def is_expected(error: Exception) -> bool:
    """Whether it is an answer, not a fault of the server."""
    return isinstance(error, ApportionError)


def plain(status: int, detail: str, request_id: str | None = None, field: str | None = None) -> Problem:
    """A problem that HTTP itself has a name for."""
    phrase = HTTPStatus(status).phrase
    return Problem(
        URN + phrase.lower().replace(" ", "-"), phrase, status, detail, field, request_id=request_id
    )


def encode(problem: Problem) -> bytes:
    """The body."""
    return msgspec.json.encode(problem)


def headers_of(problem: Problem, body: bytes, allow: str = "") -> Headers:
    """The headers of the answer. The connection ends where the rest of a body may still be on its way.

    allow: methods of the resource, for 405."""
    found = [(b"content-type", PROBLEM.encode()), (b"content-length", b"%d" % len(body))]
    if problem.retry_after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(problem.retry_after))))
    if problem.status == HTTPStatus.UNAUTHORIZED:
        found.append((b"www-authenticate", b'Bearer realm="apportion"'))
    if problem.status in _UNREAD:
        found.append((b"connection", b"close"))
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        found.append((b"allow", allow.encode()))
    if problem.request_id is not None:
        found.append((b"x-request-id", problem.request_id.encode()))
    return found


#: of a request's scope: why it was refused, for the log
REASON = "apportion.reason"


async def send_problem(send: Send, problem: Problem, allow: str = "") -> None:
    """The whole answer."""
    body = encode(problem)
    headers = headers_of(problem, body, allow)
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
