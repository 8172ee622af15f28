"""Errors of the service. Both sides use the same classes: the server sends an error as problem+json (RFC 9457), and the
client raises it again.

    ServiceError (RuntimeError)          type, status, detail, field, remedy
    ├── UnknownPlanError (LookupError)   404: submit the request, then retry
    └── BadAnswerError                   an answer that violates the protocol
    NotReadyError (TimeoutError)         the plan is not ready yet
    UnreachableError (ConnectionError)   no answer
"""

from __future__ import annotations

from typing import NamedTuple

from apportion.ir.errors import ApportionError


class Kind(NamedTuple):
    """A type of problem. status: the HTTP status; remedy: for the user."""

    status: int
    title: str
    remedy: str


KINDS = {
    "bad-answer": Kind(502, "Not an answer of this protocol", "check which program answers at this URL"),
    "unauthorized": Kind(
        401, "A token is needed", "set APPORTION_TOKEN or --token-file; in HTTP: Authorization: Bearer TOKEN"
    ),
    "unknown-plan": Kind(404, "No request has this key", "submit the request, then retry"),
    "not-found": Kind(404, "This path does not exist", "see /docs"),
    "method": Kind(405, "This path does not support the method", "see /docs"),
    "slow-body": Kind(408, "The body did not arrive in time", "send it without pauses"),
    "wrong-key": Kind(409, "The key does not match the request", "compute the key with Job.request_key"),
    "length": Kind(411, "The request has no Content-Length", "send the body in one piece, not chunked"),
    "too-large": Kind(413, "The request is too large for this server", "send fewer sequences at once"),
    "media-type": Kind(
        415, "The media type is not supported", "send application/json or application/msgpack"
    ),
    "invalid": Kind(422, "A field of the request is invalid", "correct the field"),
    "refused": Kind(
        422, "The request cannot be planned", "change the batch or the job as described in the detail"
    ),
    "too-long": Kind(
        422, "Planning took too long", "choose a cheaper recipe, or raise the server's --plan-s"
    ),
    "memory": Kind(
        422, "Planning takes too much memory", "use larger blocks, or raise the server's --worker-gb"
    ),
    "quarantined": Kind(422, "The request kills its workers", "leave the batch out, and report it"),
    "queue-full": Kind(429, "The queue of this server is full", "fetch plans before submitting more"),
    "failed": Kind(500, "Internal server error", "see the server's log"),
    "overloaded": Kind(503, "This server receives too many requests at once", "try again"),
}
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class ServiceError(ApportionError, RuntimeError):
    """A refused request. type: a key of `KINDS`, or another name if a proxy answered; field: the wrong field of the
    request, or None; retry_after: seconds after which to retry, None: do not retry."""

    def __init__(
        self,
        type: str,
        detail: str,
        *,
        field: str | None = None,
        status: int = 0,
        retry_after: float | None = None,
    ) -> None:
        kind = KINDS.get(type, Kind(status or 500, "The request failed", "see the server's or proxy's log"))
        self.type, self.detail, self.field, self.retry_after = type, detail, field, retry_after
        self.status, self.title, self.remedy = status or kind.status, kind.title, kind.remedy

    def __str__(self) -> str:  # `args` must remain the constructor's arguments, for pickling
        return f"{self.status} {self.type}: {self.detail}; {self.remedy}"

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed later."""
        return self.status in TRANSIENT


class BadAnswerError(ServiceError):
    """An answer that violates the protocol: from another program, or corrupted in transit."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad-answer", detail)

    @property
    def is_transient(self) -> bool:
        return False


class NotReadyError(ApportionError, TimeoutError):
    """The plan is not ready when the caller's wait ends."""


class UnreachableError(ApportionError, ConnectionError):
    """No answer in time: no server listens there, or it does not speak HTTP."""


class UnknownPlanError(ServiceError, LookupError):
    """The server does not know the key: it was never submitted there, or has since been dropped."""

    def __init__(self, key: bytes) -> None:
        super().__init__("unknown-plan", f"no request with the key {key.hex()[:16]} is known here")
        self.key = key
