"""Plans as they become ready: over a stream of frames, and one by one where streams fail.

           ┌───────── END, or it failed with plans ────────┐
           ▼                                               │
        stream ── failed `stream_tries` times without one ─┴─► one by one, for poll_s, then twice as long, ...
           ▲                                                        │
           └────────────────────────────────────────────────────────┘

Both resume at the iteration after the last one that was given, so nothing is lost or doubled by changing over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from urllib.parse import urlencode

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.service import protocol
from apportion.service.client import answers
from apportion.service.client.answers import Received
from apportion.service.client.caller import Caller
from apportion.service.client.errors import PlanTimeoutError, UnreachableError
from apportion.service.client.link import Opened
from apportion.service.client.waits import TransientError
from apportion.service.frames import Frame, FrameError, FrameReader, Kind

log = logging.getLogger(__name__)


class Stream:
    """One rank's plans from iteration `start` on."""

    def __init__(
        self,
        caller: Caller,
        received: Received,
        epoch: int,
        rank: int,
        start: int,
        window: int,
        patience_s: float,
    ) -> None:
        self._caller, self._received = caller, received
        self._epoch, self._rank, self._next, self._window = epoch, rank, start, window
        self._waits = caller.waits(patience_s, self._given_up)
        self._poll_s = caller.pace.poll_s
        self._tries = caller.pace.stream_tries

    def plans(self) -> Generator[tuple[int, IterationSlice], None, None]:
        """(iteration, the rank's slice), without end."""
        self._waits.restart()
        while True:
            with closing(self._by_frames() if self._tries > 0 else self._one_by_one()) as source:
                for body in source:
                    found = self._received.decode(body, self._epoch, self._next, self._rank)
                    self._next += 1
                    yield self._next - 1, found
                    self._waits.restart()  # the time until here was the caller's

    def _one_by_one(self) -> Generator[bytes, None, None]:
        until = time.monotonic() + self._poll_s
        self._poll_s, self._tries = min(2 * self._poll_s, self._caller.pace.poll_most_s), 1
        while time.monotonic() < until:
            yield self._caller.plan(protocol.plan_path(self._epoch, self._next, self._rank), self._waits)

    def _by_frames(self) -> Generator[bytes, None, None]:
        start = self._next
        try:
            with closing(self._open()) as opened:
                yield from self._bodies(opened)
            if self._next == start:
                raise TransientError(UnreachableError("a stream ended without a plan"))
        except TransientError as failure:
            self._failed(failure, self._next > start)

    def _failed(self, failure: TransientError, some: bool) -> None:
        """some: whether plans came before it failed."""
        self._tries = self._caller.pace.stream_tries if some else self._tries - 1
        log.info("epoch %d, rank %d: the stream broke: %s", self._epoch, self._rank, failure)
        if self._tries <= 0:
            log.warning(
                "epoch %d, rank %d: streams fail (%s): asking for plans one by one for %g s",
                self._epoch,
                self._rank,
                failure,
                self._poll_s,
            )
        self._waits.pause(failure)

    def _open(self) -> Opened:
        query = urlencode({"from": self._next, "window": self._window})
        path = f"{protocol.stream_path(self._epoch, self._rank)}?{query}"
        return self._caller.stream(path, self._waits)

    def _bodies(self, opened: Opened) -> Iterator[bytes]:
        for frame in self._frames(opened):
            if frame.kind is Kind.PROBLEM:
                raise answers.problem(frame.body)
            if frame.kind is Kind.PLAN and self._is_next(frame):
                yield frame.body
                self._tries, self._poll_s = self._caller.pace.stream_tries, self._caller.pace.poll_s

    def _is_next(self, frame: Frame) -> bool:
        """False for a plan that was given already, by another stream that broke."""
        if frame.iteration > self._next:
            raise TransientError(
                UnreachableError(f"iteration {frame.iteration} came where {self._next} is the next")
            )
        self._received.check(frame.digest, self._epoch, frame.iteration, self._rank)
        return frame.iteration == self._next

    def _frames(self, opened: Opened) -> Iterator[Frame]:
        """Whole frames, up to the END. Raises TransientError where the stream breaks before it."""
        reader, silence_s, ended = FrameReader(), _silence_s(opened), False
        try:
            while data := self._read(opened, silence_s):
                for frame in reader.feed(data):
                    ended = ended or frame.kind is Kind.END
                    yield frame
            reader.close()
        except FrameError as error:
            raise TransientError(UnreachableError(str(error))) from error
        if not ended:
            raise TransientError(UnreachableError("a stream was cut between two frames"))

    def _read(self, opened: Opened, silence_s: float) -> bytes:
        left = self._waits.left()
        if left <= 0:
            raise self._given_up(TransientError(UnreachableError("the stream is alive, but no plan came")))
        return opened.read(min(silence_s, left))

    def _given_up(self, failure: TransientError) -> PlanTimeoutError:
        return PlanTimeoutError(self._epoch, self._next, self._rank, self._waits.timeout_s, str(failure))


def _silence_s(opened: Opened) -> float:
    """After so many seconds without a byte the other side is dead."""
    try:
        heartbeat_s = float(opened.headers.get(protocol.HEARTBEAT, ""))
    except ValueError:
        heartbeat_s = protocol.HEARTBEAT_S
    return protocol.SILENT_HEARTBEATS * min(max(heartbeat_s, 0.01), 60.0)
