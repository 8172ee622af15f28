"""What a person sees of a running engine: where each stream is, what workers do, which batches failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from apportion.service.engine.kept.library import Entry
from apportion.service.engine.kept.state import Epoch, Iteration, Job

#: iterations of a stream that are shown: behind its front, and in all
BEHIND, SHOWN = 8, 64
#: failed batches that are remembered
FAILED = 64

#: states of an iteration as one letter each; a dot where it was not submitted
LETTERS = {"queued": "q", "planning": "p", "ready": "r", "refused": "x", "quarantined": "x"}


class StreamView(msgspec.Struct, frozen=True):
    """A stream of a job. front: 1 + the highest iteration that a rank was given; ahead: iterations from there on that
    are ready, without a gap; states: a letter of `LETTERS` for each iteration from `first` on; step_s: seconds between
    iterations, as ranks take them; waiting: readers that wait."""

    stream: str
    run: str
    epoch: int
    front: int
    ahead: int
    held: int
    queued: int
    waiting: int
    step_s: float
    first: int
    states: str


class JobView(msgspec.Struct, frozen=True):
    """A job and its streams."""

    name: str
    recipe: str
    ranks: int
    lookahead: int
    streams: list[StreamView]


class BusyView(msgspec.Struct, frozen=True):
    """A worker plans this iteration since so many seconds."""

    job: str
    epoch: int
    iteration: int
    since_s: float


class FailedView(msgspec.Struct, frozen=True):
    """A batch that cannot be planned. type: refused or quarantined; detail: why."""

    job: str
    epoch: int
    iteration: int
    type: str
    detail: str


def job_view(job: Job) -> JobView:
    spec, state = job.state.spec, job.state
    streams = [_stream_view(epoch) for epoch in job.open.values()]
    return JobView(state.name, spec.policy.recipe.name, spec.ranks, state.lookahead, streams)


def _stream_view(epoch: Epoch) -> StreamView:
    state, first = epoch.state(), max(epoch.floor, epoch.front - BEHIND, 0)
    last = epoch.numbers[-1] if epoch.numbers else -1
    end = min(first + SHOWN, max(epoch.front + epoch.job.state.lookahead, last + 1))
    return StreamView(
        state.stream,
        state.run,
        state.epoch,
        state.front,
        _ahead(epoch),
        state.held,
        state.queued,
        sum(gate.readers for gate in epoch.gates.values()),
        epoch.step_s,
        first,
        "".join(_letter(epoch.iterations.get(number)) for number in range(first, end)),
    )


def _ahead(epoch: Epoch) -> int:
    """Ready iterations from the front on, up to the first that is not."""
    number = epoch.front
    while (held := epoch.iterations.get(number)) is not None and held.entry.state == "ready":
        number += 1
    return number - epoch.front


def _letter(held: Iteration | None) -> str:
    return "." if held is None else LETTERS[held.entry.state]


class Failures:
    """The latest batches that could not be planned, newest first."""

    def __init__(self) -> None:
        self._held: deque[tuple[Iteration, ...]] = deque(maxlen=FAILED)

    def add(self, entry: Entry) -> None:
        """The entry has a problem."""
        self._held.appendleft(tuple(entry.users))

    def views(self) -> list[FailedView]:
        """Of iterations that still are there."""
        return [_failed(held) for group in self._held for held in group if _is_there(held)][:FAILED]


def _is_there(held: Iteration) -> bool:
    return held.epoch.iterations.get(held.number) is held and held.entry.problem is not None


def _failed(held: Iteration) -> FailedView:
    problem = held.entry.problem
    assert problem is not None  # for mypy: `_is_there`
    place = (held.epoch.job.name, held.epoch.number, held.number)
    return FailedView(*place, problem.type, problem.detail)


def failed_in(jobs: Iterable[Job]) -> list[Entry]:
    """Entries with a problem, of jobs that a server found in its store."""
    held = (held for job in jobs for epoch in job.open.values() for held in epoch.iterations.values())
    return list({id(one.entry): one.entry for one in held if one.entry.problem is not None}.values())
