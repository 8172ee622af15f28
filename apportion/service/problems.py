"""Errors of the service, the same class on both sides of the wire: problem+json (RFC 9457) by the server, raised again
by the client.

    ServiceError (RuntimeError)          type, status, detail, field, remedy
    ├── UnknownPlanError (LookupError)   404: submit the request, then ask again
    └── BadAnswerError                   an answer that is none of this protocol
    NotReadyError (TimeoutError)         the plan is not there yet
    UnreachableError (ConnectionError)   no answer came
"""

from __future__ import annotations

from typing import Any, NamedTuple

from apportion.ir.errors import ApportionError


class Kind(NamedTuple):
    """A type of problem. status: of HTTP; remedy: what its reader can do."""

    status: int
    title: str
    remedy: str


KINDS = {
    "bad-answer": Kind(502, "Not an answer of this protocol", "see what answers at this URL"),
    "unauthorized": Kind(401, "A token is needed", "send the header Authorization: Bearer TOKEN"),
    "unknown-plan": Kind(404, "No request has this key", "submit the request, then ask again"),
    "not-found": Kind(404, "There is nothing at this address", "see /docs"),
    "method": Kind(405, "This address has other methods", "see /docs"),
    "slow-body": Kind(408, "The body did not come in time", "send it at once"),
    "wrong-key": Kind(409, "The key is not that of the request", "compute the key with Job.request_key"),
    "length": Kind(411, "The request has no Content-Length", "send the body in one piece, not chunked"),
    "too-large": Kind(413, "The request is larger than this server takes", "send fewer sequences at once"),
    "media-type": Kind(
        415, "The body is of another media type", "send application/json or application/msgpack"
    ),
    "invalid": Kind(422, "A field of the request is wrong", "correct the field"),
    "refused": Kind(422, "The request cannot be planned", "change the batch or the job as the detail says"),
    "too-long": Kind(
        422, "Planning took too long", "choose a cheaper recipe, or raise --plan-s of the server"
    ),
    "memory": Kind(
        422, "Planning takes too much memory", "take larger blocks, or raise --worker-gb of the server"
    ),
    "quarantined": Kind(422, "The request kills the planner", "leave the batch out, and report it"),
    "queue-full": Kind(429, "This server has enough requests queued", "fetch plans before submitting more"),
    "failed": Kind(500, "The server made a mistake", "see the log of the server"),
    "overloaded": Kind(503, "This server receives too much at once", "try again"),
}
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class ServiceError(ApportionError, RuntimeError):
    """A refused request. type: a key of `KINDS`, or another one a proxy answered with; field: of the request that is
    wrong, None where there is none; retry_after: seconds after which to try again, None where that is of no use."""

    def __init__(
        self,
        type: str,
        detail: str,
        *,
        field: str | None = None,
        status: int = 0,
        retry_after: float | None = None,
    ) -> None:
        kind = KINDS.get(type, Kind(status or 500, "The request failed", "see the log of the server"))
        self.type, self.detail, self.field, self.retry_after = type, detail, field, retry_after
        self.status, self.title, self.remedy = status or kind.status, kind.title, kind.remedy
        super().__init__(f"{self.status} {type}: {detail}; {self.remedy}")

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in TRANSIENT

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.type, self.detail, self.field, self.status, self.retry_after)


class BadAnswerError(ServiceError):
    """An answer that is none of this protocol: of another program, or changed on its way."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad-answer", detail, status=502)

    def __reduce__(self) -> tuple[Any, ...]:
        return BadAnswerError, (self.detail,)

    @property
    def transient(self) -> bool:
        return False


class NotReadyError(ApportionError, TimeoutError):
    """A plan that is not there after the time that its caller waits."""


class UnreachableError(ApportionError, ConnectionError):
    """No answer came in time: nobody listens there, or the other side does not speak HTTP."""


class UnknownPlanError(ServiceError, LookupError):
    """The server does not know the key: it was never submitted there, or dropped since."""

    def __init__(self, key: bytes) -> None:
        super().__init__("unknown-plan", f"no request with the key {key.hex()[:16]} is known here")
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownPlanError, (self.key,)


def _rebuilt(
    type: str, detail: str, field: str | None, status: int, retry_after: float | None
) -> ServiceError:
    return ServiceError(type, detail, field=field, status=status, retry_after=retry_after)
