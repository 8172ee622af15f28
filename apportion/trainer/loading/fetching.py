"""Threads that have plans made, and fetch them, before the trainer asks.

submitting  … n+7        at most `lookahead` iterations before the trainer's own
fetching    … n+1        at most `DEPTH` that nobody has taken
the trainer     n        `take`
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple, Self

from torch._utils import ExceptionWrapper

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ApportionError
from apportion.service.problems import UnknownPlanError
from apportion.trainer.loading.iterations import Iterations, Wanted
from apportion.trainer.loading.rows import Rows
from apportion.trainer.loading.sources.source import Source

DEPTH = 2
POLL_S = 2.0
AGAIN_S = 0.5
LEAVING_S = 10.0  # a thread that takes longer is in the trainer's sampler, which nobody can end


class PlanTimeoutError(ApportionError, TimeoutError):
    """No plan within the loader's `timeout_s`; reason: what its source said last."""

    def __init__(self, iteration: int, rank: int, timeout_s: float, reason: str) -> None:
        self.iteration, self.rank, self.timeout_s, self.reason = iteration, rank, timeout_s, reason
        super().__init__(
            f"iteration {iteration}, rank {rank}: no plan within {timeout_s:g} s ({reason}); give it more time, or the "
            "service more workers or look-ahead"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.iteration, self.rank, self.timeout_s, self.reason)


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
        self.why = str(error)


class Stopwatch:
    """Seconds since it was made, without those that loops were compiled in, as `compiled_s` gives them up to now."""

    def __init__(self, compiled_s: Callable[[], float]) -> None:
        self._compiled_s, self._before_s, self._begun_s = compiled_s, compiled_s(), time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_s - self.compiled_s

    @property
    def compiled_s(self) -> float:
        return max(0.0, self._compiled_s() - self._before_s)


class Ahead:
    """Threads that work ahead of the trainer, iteration by iteration, on a source that they alone use. They end when
    the `with` is left, whatever they wait for, or when the interpreter exits: an iterator that somebody still holds
    does not keep the process. own: the iteration that the trainer asks for; over: it asks for no more."""

    def __init__(self, source: Source, iterations: Iterations) -> None:
        self.source, self._iterations = source, iterations
        self.changed, self.own, self.over, self.late = Condition(), iterations.start, False, Late()
        self._failed: tuple[int, Exception] | None = None
        self._threads = list[Thread]()

    def run(self, each: Callable[[Wanted], None], depth: int) -> None:
        """Calls `each` in a thread, for one iteration after another, at most `depth` from the trainer's own on."""
        thread = Thread(target=self._run, args=(each, depth), name="apportion-plans", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, each: Callable[[Wanted], None], depth: int) -> None:
        number = self._iterations.start
        try:
            while self._comes_to(number - depth + 1):
                wanted = self._iterations.at(number)
                if wanted is None:
                    return
                number = wanted.number
                each(wanted)
                number += 1
        except Exception as error:
            with self.changed:  # the trainer is told when it asks for this iteration
                if self._failed is None or number < self._failed[0]:
                    self._failed = number, error
                self.changed.notify_all()

    def _comes_to(self, number: int) -> bool:
        """Waits until the trainer asks for this iteration; False where it is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or number <= self.own)
            return not self.over

    def submit(self, wanted: Wanted) -> None:
        """Tries until it is accepted, or the trainer is beyond it."""
        while self.awaits(wanted.number):
            try:
                self.source.submit(wanted.key, wanted.request, max(0, wanted.number - self.own))
                break
            except TimeoutError as error:
                self.late(error)

    def awaits(self, number: int) -> bool:
        """Whether the trainer will still ask for this iteration."""
        with self.changed:
            return not self.over and number >= self.own

    def reach(self, number: int) -> None:
        """The trainer asks for this iteration now."""
        with self.changed:
            self.own = number
            self.changed.notify_all()

    def failed(self, number: int) -> Exception | None:
        """Why the trainer cannot have this iteration."""
        with self.changed:
            return self._failed[1] if self._failed is not None and self._failed[0] <= number else None

    def __enter__(self) -> Self:
        atexit.register(self.close)
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads; again is no error."""
        atexit.unregister(self.close)
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.source.close()
        for thread in self._threads:
            thread.join(LEAVING_S)


@dataclass(frozen=True)
class Waits:
    """How a rank waits. timeout_s: the trainer, for a plan."""

    timeout_s: float

    @property
    def again_s(self) -> float:
        """After a time-out, until a plan comes again: enough for one look."""
        return min(AGAIN_S, self.timeout_s / 4)

    @property
    def poll_s(self) -> float:
        """A wait is cut in such parts, to look whether it is still of use."""
        return min(POLL_S, self.timeout_s / 10)

    def fetch(
        self,
        source: Source,
        wanted: Wanted,
        rank: int,
        goes_on: Callable[[], bool],
        late: Late,
        then: Callable[[], Sequence[bytes]] = tuple,
    ) -> IterationSlice | None:
        """The rank's plan of an iteration, submitted where nobody has; None where it is not there when `goes_on` says
        no, and `late` is told why."""
        while goes_on():
            try:
                try:
                    return source.fetch(wanted.key, rank, self.poll_s, then())
                except UnknownPlanError:
                    source.submit(wanted.key, wanted.request, 0)
            except TimeoutError as error:
                late(error)
        return None


class Fetching:
    """The plans of a pass, fetched in a thread, at most `DEPTH` of them before the trainer takes them. ready: makes of
    a plan what the trainer takes."""

    def __init__(
        self,
        ahead: Ahead,
        iterations: Iterations,
        waits: Waits,
        rank: int,
        ready: Callable[[IterationSlice], Fetched] = Fetched,
    ) -> None:
        self._ahead, self._iterations, self._waits, self._rank = ahead, iterations, waits, rank
        self._ready, self._fetched = ready, dict[int, Fetched]()
        self._is_away = False  # the trainer waited in vain, and no plan has come since
        ahead.run(self._fetch, DEPTH)

    def take(self, number: int) -> Fetched:
        """What the trainer asks for next. Raises TimeoutError after its time-out, and what went wrong in a
        thread. After one time-out the next iterations are hardly waited for, until the thread has got a plan again."""
        ahead, waited = self._ahead, Stopwatch(lambda: self.compiled_s)
        with ahead.changed:
            patience_s = self._waits.again_s if self._is_away else self._waits.timeout_s
            while not self._is_there(number) and (left_s := patience_s - waited.seconds) > 0:
                ahead.changed.wait_for(lambda: self._is_there(number), min(left_s, POLL_S))
            error, found = ahead.failed(number), self._fetched.pop(number, None)
            self._is_away |= found is None
        if error is not None:
            raise error
        if found is None:
            raise TimeoutError(ahead.late.why)
        return found

    @property
    def compiled_s(self) -> float:
        """Seconds that went into compiling, see `Source`."""
        return self._ahead.source.compiled_s

    def _is_there(self, number: int) -> bool:
        return number in self._fetched or self._ahead.failed(number) is not None

    def _fetch(self, wanted: Wanted) -> None:
        """For a thread, iteration by iteration."""
        ahead, number = self._ahead, wanted.number
        goes_on, then = partial(ahead.awaits, number), partial(self._iterations.keys_after, number)
        piece = self._waits.fetch(ahead.source, wanted, self._rank, goes_on, ahead.late, then)
        found = None if piece is None else self._ready(piece)
        with ahead.changed:
            self._is_away &= found is None
            for held in [held for held in self._fetched if held < ahead.own]:
                del self._fetched[held]
            if found is not None and number >= ahead.own:
                self._fetched[number] = found
            ahead.changed.notify_all()
