"""How long a client waits: for one attempt, between attempts, in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import SystemRandom
from typing import TypeVar

from apportion.ir.fields import integer, number
from apportion.service.client.errors import ClientError

T = TypeVar("T")

_LEAST_S = 0.25  # an attempt with less would end in a time-out of its own, which says less than the failure before it

# Neither seeded by the training run, alike on all ranks, nor copied by a fork.
_random = SystemRandom()


@dataclass(frozen=True)
class Pace:
    """How long a client waits, in seconds. Raises ConfigError.

    connect_s, read_s: for a connection and for the first byte of an answer, in one attempt; wait_s: how long the server
    may hold a request for a plan that is not there yet; backoff_s, backoff_most_s: before the second attempt, and at
    most; poll_s, poll_most_s: for how long plans are asked for one by one after a stream failed `stream_tries` times
    in a row, at first and at most.
    """

    connect_s: float = 5.0
    read_s: float = 10.0
    wait_s: float = 10.0
    backoff_s: float = 0.1
    backoff_most_s: float = 5.0
    poll_s: float = 5.0
    poll_most_s: float = 300.0
    stream_tries: int = 3

    def __post_init__(self) -> None:
        integer("pace.stream_tries", self.stream_tries)
        for item in fields(self):
            number(f"pace.{item.name}", getattr(self, item.name), 1e-3)


class TransientError(Exception):
    """A failure that another attempt may mend. error: what to raise where there is no time for one; retry_after:
    seconds that the server asks to wait."""

    def __init__(self, error: ClientError, retry_after: float | None = None) -> None:
        self.error, self.retry_after = error, retry_after
        super().__init__(str(error))


def _own_error(failure: TransientError) -> ClientError:
    return failure.error


@dataclass
class Waits:
    """The time given to one call, and the pauses between its attempts. sleep: for so many seconds, unless the client is
    closed; given_up: makes what is raised where the time does not suffice for another attempt."""

    pace: Pace
    timeout_s: float
    sleep: Callable[[float], None]
    given_up: Callable[[TransientError], ClientError] = _own_error
    failures: int = 0
    _since: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._since + self.timeout_s - time.monotonic())

    def restart(self) -> None:
        """Give the whole time again."""
        self._since, self.failures = time.monotonic(), 0

    def pause(self, failure: TransientError) -> None:
        """Wait before the next attempt: a random time up to a bound that doubles (full jitter, so that clients that
        failed together do not come back together), after what the server asked for. Raises what `given_up` makes of
        the failure where the time does not suffice, ClosedError."""
        bound = min(self.pace.backoff_most_s, self.pace.backoff_s * 2 ** min(self.failures, 30))
        delay = _random.uniform(0, bound) + (failure.retry_after or 0)
        self.failures += 1
        if delay + min(_LEAST_S, self.timeout_s / 4) >= self.left():
            error = self.given_up(failure)
            raise error from (failure.error.__cause__ if error is failure.error else failure.error)
        self.sleep(delay)

    def repeat(self, once: Callable[[], T]) -> T:
        """What `once` gives, asked again after each TransientError. Of an attempt that ended because the time did, the
        failure before it is told, which says more."""
        last: TransientError | None = None
        while True:
            try:
                return once()
            except TransientError as failure:
                self.pause(last if last and not self.left() else failure)
                last = failure


def retry_after(value: str | None, now: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date as seen from `now`, the answer's Date (its clock
    may differ from ours). None where there is none that can be read."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value.strip()[:9])
    at = _date(value)
    return None if at is None else max(0.0, (at - (_date(now) or datetime.now(UTC))).total_seconds())


def _date(value: str | None) -> datetime | None:
    try:
        found = parsedate_to_datetime(value or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
