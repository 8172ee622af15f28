"""Threads that have plans made, and fetch them, before the trainer asks.

submitting  … n+7        at most `lookahead` iterations before the trainer's own
fetching    … n+1        at most `DEPTH` that nobody has taken
the trainer     n        `take`
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import NamedTuple, Self

from torch._utils import ExceptionWrapper

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.service.client import PlanTimeoutError
from apportion.trainer.loading.iterations import Iterations, Wanted
from apportion.trainer.loading.rows import Rows
from apportion.trainer.loading.sources.source import Feed

DEPTH = 2
POLL_S = 2.0
AGAIN_S = 0.5
GRACE_S = 2.0
STAGGER_S = 0.25  # from one rank to the next: as a rule one submits, and serves the others
MAX_GRACE_S = 10.0
LEAVING_S = 10.0  # a thread that takes longer is in the trainer's sampler, which nobody can end


class Fetched(NamedTuple):
    """A rank's share of an iteration. Of each microbatch, where somebody has made them: its rows, and the handle of its
    plan, ready to run. wrong: why a process could not make the rows."""

    piece: IterationSlice
    rows: tuple[Rows, ...] | None = None
    handles: tuple[PlanHandle, ...] | None = None
    wrong: ExceptionWrapper | None = None


class Late:
    """Why a plan is not there yet, as far as the last attempt knows."""

    def __init__(self) -> None:
        self.why = "its source has not answered yet"

    def __call__(self, error: TimeoutError) -> None:
        self.why = error.reason if isinstance(error, PlanTimeoutError) else str(error)


class Progress:
    """Where the trainer is, for the threads that work ahead of it, and where the first of them failed."""

    def __init__(self, start: int) -> None:
        self.changed, self.own, self.over = Condition(), start, False
        self.late = Late()
        self._accepted = start  # iterations before this one were submitted by this rank
        self._failed: tuple[int, Exception] | None = None

    def comes_to(self, number: int) -> bool:
        """Waits until the trainer asks for this iteration; False where it is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or number <= self.own)
            return not self.over

    def awaits(self, number: int) -> bool:
        """Whether the trainer will still ask for this iteration."""
        with self.changed:
            return not self.over and number >= self.own

    def reach(self, number: int) -> None:
        """The trainer asks for this iteration now."""
        with self.changed:
            self.own = number
            self.changed.notify_all()

    def accept(self, number: int) -> None:
        """The iteration is submitted, or the trainer is beyond it."""
        with self.changed:
            self._accepted = number + 1
            self.changed.notify_all()

    def is_accepted(self, number: int) -> bool:
        """Waits for that; False where it will not be."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.failed(number) or number < self._accepted)
            return number < self._accepted

    def fail(self, number: int, error: Exception) -> None:
        """A thread cannot go on with this iteration: the trainer is told when it asks for it."""
        with self.changed:
            if self._failed is None or number < self._failed[0]:
                self._failed = number, error
            self.changed.notify_all()

    def failed(self, number: int) -> Exception | None:
        """Why the trainer cannot have this iteration."""
        with self.changed:
            return self._failed[1] if self._failed is not None and self._failed[0] <= number else None

    def end(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()


class Stopwatch:
    """Seconds since it was made, without those that loops were compiled in. compiled_s: of a feed, up to now."""

    def __init__(self, compiled_s: Callable[[], float]) -> None:
        self._compiled_s, self._before_s, self._begun_s = compiled_s, compiled_s(), time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_s - self.compiled_s

    @property
    def compiled_s(self) -> float:
        return max(0.0, self._compiled_s() - self._before_s)


class Threads:
    """The threads of a pass, and the feed that they use; closed when the `with` is left, whatever they wait for, or
    when the interpreter exits: an iterator that somebody still holds does not keep the process."""

    def __init__(self, feed: Feed, iterations: Iterations, progress: Progress) -> None:
        self.feed, self._iterations, self._progress = feed, iterations, progress
        self._threads = list[Thread]()

    def run(self, each: Callable[[Wanted], None], depth: int) -> None:
        """Calls `each` in a thread, for one iteration after another, at most `depth` from the trainer's own on."""
        thread = Thread(target=self._run, args=(each, depth), name="apportion-plans", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, each: Callable[[Wanted], None], depth: int) -> None:
        number = self._iterations.start
        try:
            while self._progress.comes_to(number - depth + 1):
                wanted = self._iterations.at(number)
                if wanted is None:
                    return
                number = wanted.number
                each(wanted)
                number += 1
        except Exception as error:
            self._progress.fail(number, error)

    def __enter__(self) -> Self:
        atexit.register(self.close)
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; again is no error."""
        atexit.unregister(self.close)
        self._progress.end()
        self.feed.stop()
        for thread in self._threads:
            thread.join(LEAVING_S)
        self.feed.close()


@dataclass(frozen=True)
class Waits:
    """How a rank waits, in seconds. timeout_s: the trainer, for a plan; grace_s: without a plan, before the rank
    submits what nobody has: whoever should have may be lost."""

    timeout_s: float
    grace_s: float

    @staticmethod
    def of(rank: int, timeout_s: float) -> Waits:
        return Waits(timeout_s, min(GRACE_S + STAGGER_S * rank, MAX_GRACE_S))

    @property
    def again_s(self) -> float:
        """After a time-out, until a plan comes again: enough for one look."""
        return min(AGAIN_S, self.timeout_s / 4)

    @property
    def poll_s(self) -> float:
        """A wait is cut in such parts, to look whether it is still of use."""
        return min(POLL_S, self.timeout_s / 10)

    def fetch(
        self, feed: Feed, wanted: Wanted, goes_on: Callable[[], bool], late: Late
    ) -> IterationSlice | None:
        """The plan of an iteration, None where it is not there when `goes_on` says no; `late` is told why."""
        begin = time.monotonic()
        while goes_on():
            try:
                return feed.plan(wanted.number, wanted.batches, self.poll_s)
            except TimeoutError as error:
                late(error)
            if time.monotonic() - begin > self.grace_s:
                with suppress(TimeoutError):
                    if not feed.knows(wanted.number):
                        feed.submit(wanted.number, wanted.batches)
        return None


def submit(feed: Feed, wanted: Wanted, progress: Progress) -> None:
    """Tries until it is accepted, or the trainer is beyond it."""
    while progress.awaits(wanted.number):
        try:
            feed.submit(wanted.number, wanted.batches)
            break
        except TimeoutError as error:
            progress.late(error)
    progress.accept(wanted.number)


class Fetching:
    """The plans of a pass, fetched in a thread, at most `DEPTH` of them before the trainer takes them.

    submits: whether this rank submits, too; then it takes no plan before its own batches were accepted, since a run of
    that name may have had others. ready: makes of a plan what the trainer takes.
    """

    def __init__(
        self,
        feed: Feed,
        progress: Progress,
        waits: Waits,
        submits: bool,
        ready: Callable[[IterationSlice], Fetched] = Fetched,
    ) -> None:
        self._feed, self._progress, self._waits, self._submits = feed, progress, waits, submits
        self._ready, self._fetched = ready, dict[int, Fetched]()
        self._is_away = False  # the trainer waited in vain, and no plan has come since

    def take(self, number: int) -> Fetched:
        """What the trainer asks for next. Raises TimeoutError after its time-out, and what went wrong in a
        thread. After one time-out the next iterations are hardly waited for, until the thread has got a plan again."""
        progress, waited = self._progress, Stopwatch(lambda: self.compiled_s)
        with progress.changed:
            patience_s = self._waits.again_s if self._is_away else self._waits.timeout_s
            while not self._is_there(number) and (left_s := patience_s - waited.seconds) > 0:
                progress.changed.wait_for(lambda: self._is_there(number), min(left_s, POLL_S))
            error, found = progress.failed(number), self._fetched.pop(number, None)
            self._is_away |= found is None
        if error is not None:
            raise error
        if found is None:
            raise TimeoutError(progress.late.why)
        return found

    @property
    def compiled_s(self) -> float:
        """Seconds that went into compiling, see `Feed`."""
        return self._feed.compiled_s

    def _is_there(self, number: int) -> bool:
        return number in self._fetched or self._progress.failed(number) is not None

    def fetch(self, wanted: Wanted) -> None:
        """For a thread, iteration by iteration."""
        if self._submits and not self._progress.is_accepted(wanted.number):
            return
        progress = self._progress
        piece = self._waits.fetch(self._feed, wanted, partial(progress.awaits, wanted.number), progress.late)
        found = None if piece is None else self._ready(piece)
        with progress.changed:
            self._is_away &= found is None
            for number in [held for held in self._fetched if held < progress.own]:
                del self._fetched[number]
            if found is not None and wanted.number >= progress.own:
                self._fetched[wanted.number] = found
            progress.changed.notify_all()
