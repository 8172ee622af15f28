"""What a client raises.

    ClientError
    ├── ServiceProblem (RuntimeError)      the server refused: status, type, detail, field, remedy
    ├── UnreachableError (ConnectionError) no answer within the time given
    ├── PlanTimeoutError (TimeoutError)    no plan within the time given, whatever the reason
    ├── BadAnswerError (ValueError)        an answer that is not what was asked for
    │   └── ChangedPlanError               another plan of an iteration than the one received before
    └── ClosedError (RuntimeError)         the client was closed

None of them has a key in its text.
"""

from __future__ import annotations

from typing import Any

from apportion.ir.errors import ApportionError

_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_REMEDIES = {
    401: "pass a key of the job (admin_key= for what the admin does)",
    403: "pass the key of this job, or the admin key",
    404: "check the job's name in the url, the epoch and the rank",
    406: "install the release of Apportion that the server runs, here or there",
    408: "raise timeout_s",
    409: "keep to what was there first (of a job also its key), or take a new name or epoch",
    410: "begin a new epoch: the stream has a later one, or the iteration is no longer kept; passes side by side need "
    "streams of their own",
    413: "send fewer sequences, or raise the server's limits",
    422: "correct the field",
    429: "read plans before submitting more, or raise timeout_s",
    503: "raise timeout_s, or give the server more workers",
}
_REMEDIES_OF_TYPES = {
    "refused": "change the sequences that it names; no rank gets a plan of this iteration",
    "damaged": "delete the job, create it anew and begin a new epoch",
    "quarantined": "leave the batch out and report it; no rank gets a plan of this iteration",
}


class ClientError(ApportionError):
    """Root of what a client raises, beside ConfigError for its arguments."""


class ServiceProblem(ClientError, RuntimeError):
    """The server refused. status: of HTTP; type: the last part of the problem's type URI; detail: a sentence; field:
    of the request that is wrong, None where there is none; remedy: what to do."""

    def __init__(self, status: int, type: str, detail: str, field: str | None = None) -> None:
        self.status, self.type, self.detail, self.field = status, type, detail, field
        self.remedy = _REMEDIES_OF_TYPES.get(type) or _REMEDIES.get(status, "look into the server's log")
        where = f"{field}: " if field and not detail.startswith(field) else ""
        super().__init__(f"{status} {type}: {where}{detail}; {self.remedy}")

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later: it outlasted the time given to the call."""
        return self.status in _TRANSIENT

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.type, self.detail, self.field)


class UnreachableError(ClientError, ConnectionError):
    """No answer, or none that could be read."""


class PlanTimeoutError(ClientError, TimeoutError):
    """No plan within the time given; the last failure, where there was one, is its cause."""

    def __init__(self, epoch: int, iteration: int, rank: int, timeout_s: float, reason: str) -> None:
        self.epoch, self.iteration, self.rank, self.timeout_s = epoch, iteration, rank, timeout_s
        self.reason = reason
        super().__init__(
            f"epoch {epoch}, iteration {iteration}, rank {rank}: no plan within {timeout_s:g} s ({reason}); "
            "give it more time, or the service more workers or look-ahead"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.epoch, self.iteration, self.rank, self.timeout_s, self.reason)


class BadAnswerError(ClientError, ValueError):
    """An answer that is not what was asked for: of another rank, undecodable, changed on the way."""


class ChangedPlanError(BadAnswerError):
    """Another plan of an iteration than the one received before: ranks would run plans that do not fit."""


class ClosedError(ClientError, RuntimeError):
    """The client was closed, perhaps by another thread while it waited."""
