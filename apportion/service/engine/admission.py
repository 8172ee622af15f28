"""What the server takes, and when it has enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from apportion.ir.bytes.job import Job as Spec, encode_batches
from apportion.ir.bytes.wire import encode_section
from apportion.ir.hashing import digest
from apportion.ir.request.batch import Batch
from apportion.service.engine.kept.library import Library
from apportion.service.engine.kept.state import Epoch, Job
from apportion.service.engine.metrics import Counters
from apportion.service.errors import LimitError, OverloadError, QuotaError
from apportion.service.limits import Limits

_OVERLOAD_RETRY_S = 1.0
_FULL_RETRY_S = 30.0
_QUOTA_RETRY_S = (0.1, 5.0)
_FEW_SEQUENCES = 512  # take at most a millisecond to encode


@dataclass(frozen=True)
class Asked:
    """A submission. key: content address of its plan, which depends on the release; digest: of the batches, which does
    not; request: `ir.job.encode_batches`."""

    key: bytes
    digest: bytes
    request: bytes


async def asked(spec: Spec, batches: Sequence[Batch]) -> Asked:
    """The submission of these batches; made in a thread where it takes long enough to hold up others."""
    long = sum(len(batch.lengths) for batch in batches) > _FEW_SEQUENCES
    if long or any(batch.own_positions or batch.own_labels for batch in batches):
        return await asyncio.to_thread(_asked, spec, batches)
    return _asked(spec, batches)


def _asked(spec: Spec, batches: Sequence[Batch]) -> Asked:
    batches_digest = digest(encode_section([batch.to_data() for batch in batches]))
    return Asked(spec.request_key(batches), batches_digest, encode_batches(batches))


@dataclass(frozen=True)
class Admission:
    """Raises LimitError for what is never taken, QuotaError and OverloadError for what is not taken now."""

    limits: Limits
    library: Library
    counters: Counters

    def check_job(self, spec: Spec, lookahead: int, jobs: int) -> None:
        """A new job beside so many others."""
        _check("job.cluster", spec.ranks, self.limits.ranks, "ranks")
        _check("lookahead", lookahead, self.limits.lookahead, "iterations ahead")
        if jobs >= self.limits.jobs:
            raise QuotaError(f"there are {jobs} jobs, the most that this server takes: delete one")

    def check_stream(self, job: Job, stream: str) -> None:
        """An epoch of that stream, perhaps its first."""
        if job.current(stream) is None and len(job.open) >= self.limits.job_streams:
            names = ", ".join(sorted(job.state.streams))
            raise LimitError(
                f"job {job.name} has {len(job.open)} streams, the most that this server takes ({names}): begin a new "
                "run of one of these, or make another job",
                field="stream",
            )

    def check_batches(self, spec: Spec, batches: Sequence[Batch]) -> None:
        """Raises also ConfigError and CapacityError, where they are no iteration of the job."""
        _check("batches", sum(len(batch.lengths) for batch in batches), self.limits.sequences, "sequences")
        _check("batches", sum(batch.tokens for batch in batches), self.limits.tokens, "tokens")
        spec.check(batches)

    def check_room(self, epoch: Epoch, number: int, request_bytes: int) -> None:
        """For one iteration more."""
        self._check_quota(epoch, number)
        if self.library.record_bytes > self.limits.store_bytes:
            self.counters.overload += 1
            raise OverloadError(
                f"the records of jobs take {self.library.record_bytes} bytes, this server keeps "
                f"{self.limits.store_bytes} (--store-gb): delete jobs that have ended",
                retry_after=_FULL_RETRY_S,
            )
        waiting, waiting_bytes = self.library.unplanned, self.library.unplanned_bytes
        if waiting >= self.limits.queue_total or waiting_bytes + request_bytes > self.limits.queue_bytes:
            self.counters.overload += 1
            raise OverloadError(
                f"{waiting} iterations of {waiting_bytes} bytes wait to be planned, this server takes "
                f"{self.limits.queue_total} of {self.limits.queue_bytes}",
                retry_after=_OVERLOAD_RETRY_S,
            )

    def _check_quota(self, epoch: Epoch, number: int) -> None:
        """What a rank waits for, or what comes before all others, is taken beyond the quota, lest all wait for ever."""
        wanted, most = number in epoch.gates or number < epoch.front, self._share(epoch.job)
        if epoch.pending >= most * (2 if wanted else 1):
            self.counters.quota += 1
            low, high = _QUOTA_RETRY_S
            raise QuotaError(
                f"stream {epoch.stream} of job {epoch.job.name} has {epoch.pending} iterations that no rank has been "
                f"given yet, {most} are allowed: wait until ranks come to iteration {epoch.front}",
                retry_after=min(max(epoch.step_s, low), high),
            )

    def _share(self, job: Job) -> int:
        """Of the job's quota, for each of its streams: one that everybody has left takes nothing from the others'."""
        least = min(job.state.lookahead, self.limits.pending)
        return max(self.limits.pending // len(job.open), least)


def _check(field: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise LimitError(f"{value} {what}, this server takes {most}", field=field)
