"""What a loader asks of whoever plans: a source, and of it a feed for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Sampling
from apportion.service.protocol import TRAIN


class Feed(Protocol):
    """One rank's plans of one pass. One thread submits and another asks; any may stop them."""

    @property
    def compiled_s(self) -> float:
        """Seconds up to now that went into compiling loops, here and where this feed alone has its plans made: a wait
        that nobody's look-ahead can shorten. Differences of two readings are meant, of which those below 0 are none:
        until the first plan says what was compiled in a process beside this one, all of its time counts."""

    def knows(self, iteration: int) -> bool:
        """Whether the iteration was submitted, by any rank of a shared source. Raises TimeoutError where nobody
        answers."""

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        """Has the iteration planned, once however often it is submitted. Raises TimeoutError where nobody answers."""

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        """The rank's slice. Raises TimeoutError where it is not there after `timeout_s` seconds."""

    def stop(self) -> None:
        """Ends what other threads wait for here."""

    def close(self) -> None:
        """Frees everything, when no other thread is here any more."""


class Source(Protocol):
    """Who plans a job."""

    @property
    def job(self) -> Job: ...

    @property
    def shared(self) -> bool:
        """Whether what one rank submits is planned for all ranks."""

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        """The order of the samples where nobody gives another; None is the source's own. Raises ConfigError where there
        are no plans for it."""

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> Feed:
        """A pass; equal runs of a stream share their plans, and a new one ends the stream's pass before."""


def sampling_of(job: Job, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
    """The default order of a job's samples; None is the job's seed, and shuffled."""
    seed = job.policy.seed if seed is None else seed
    return Sampling(lengths, job.tokens, job.microbatches, seed, shuffle is not False)
