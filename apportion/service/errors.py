"""What the service answers with, one class a kind of answer; `problem+json` is made of their fields.

    ServiceError
    ├── NotFoundError 404            no job, epoch or rank of that name
    ├── ConflictError 409            the name is taken by something else
    │   ├── RefusedBatchError        the planner refused the batch, or took too long over it
    │   ├── QuarantinedError         the batch killed its worker again and again
    │   └── DamagedJobError          what the store has of the job is damaged
    ├── GoneError 410                a later epoch of the stream has begun, or the iteration is no longer kept
    ├── EarlyError 425               what is read only is not there yet: who may write is to begin it
    ├── QuotaError 429               this job has enough under way
    ├── OverloadError 503            the server has enough under way
    │   ├── StoppingError            it is shutting down
    │   └── StoreGoneError           its store does not answer
    ├── AuthError 401                no key, or not a key of this server
    ├── ForbiddenError 403           the key is for something else
    ├── NotAcceptableError 406       the client reads another major version of the format
    └── LimitError 422               more than the server takes
        └── TooLargeError 413        a body of too many bytes

Each is also the nearest builtin. StoreError is no answer: the engine makes a StoreGoneError of it.
"""

from __future__ import annotations

from typing import ClassVar

from apportion.ir.errors import ApportionError


class ServiceError(ApportionError):
    """Root of the answers. detail: a sentence for this case. field: of the request that is wrong, None where there is
    none. retry_after: seconds after which the same request may succeed, None where it never will."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "error"  # the last part of the problem's type URI
    title: ClassVar[str] = "The request failed"

    def __init__(self, detail: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        self.detail, self.field, self.retry_after = detail, field, retry_after
        super().__init__(detail)


class NotFoundError(ServiceError, LookupError):
    """No job, epoch or rank of that name."""

    status, type, title = 404, "not-found", "There is nothing of that name"


class ConflictError(ServiceError, ValueError):
    """The name is taken by something else."""

    status, type, title = 409, "conflict", "The name is taken by something else"


class RefusedBatchError(ConflictError):
    """The planner refused the batch; `detail` is what it said."""

    type, title = "refused", "The batch cannot be planned"


class QuarantinedError(ConflictError):
    """The batch killed its worker again and again."""

    type, title = "quarantined", "The batch kills the planner"


class DamagedJobError(ConflictError):
    """What the store has of the job is damaged."""

    type, title = "damaged", "What the server kept of the job is damaged"


class GoneError(ServiceError, LookupError):
    """A later epoch of the stream has begun, or the iteration is no longer kept."""

    status, type, title = 410, "gone", "This is over"


class EarlyError(ServiceError, LookupError):
    """A key that only reads asks for an epoch that has not begun."""

    status, type, title = 425, "too-early", "It has not begun yet"


class QuotaError(ServiceError, RuntimeError):
    """The job has enough under way: read its plans, or wait."""

    status, type, title = 429, "quota", "The job has enough under way"


class OverloadError(ServiceError, RuntimeError):
    """The server has enough under way."""

    status, type, title = 503, "overload", "The server has enough under way"


class StoppingError(OverloadError):
    """The server is shutting down; what it accepted is kept."""

    type, title = "stopping", "The server is shutting down"


class StoreGoneError(OverloadError):
    """The store does not answer; nothing was changed, or nobody can tell: ask again."""

    type, title = "store", "The store does not answer"


class AuthError(ServiceError, PermissionError):
    """No key, or not a key of this server."""

    status, type, title = 401, "auth", "A key is needed"


class ForbiddenError(ServiceError, PermissionError):
    """The key is for something else."""

    status, type, title = 403, "forbidden", "The key does not open this"


class NotAcceptableError(ServiceError, ValueError):
    """The client reads another major version of the format."""

    status, type, title = 406, "not-acceptable", "The format versions do not meet"


class LimitError(ServiceError, ValueError):
    """More than the server takes; `detail` has the numbers."""

    status, type, title = 422, "limit", "More than this server takes"


class TooLargeError(LimitError):
    """A body of too many bytes."""

    status, type, title = 413, "too-large", "More than this server takes"


class StoreError(ApportionError, RuntimeError):
    """A store cannot be read or written: its server or disk is gone or full, another process holds it, it is damaged.
    What a commit or put that raised it has done is unknown: do it again, both are idempotent."""


class StoreBusyError(StoreError):
    """Another process works on the store."""


class StoreLostError(StoreError):
    """Another process has taken the store over, or it was wiped: who has it open may write nothing more."""
