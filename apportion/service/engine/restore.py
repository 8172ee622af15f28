"""A server's jobs, as its store has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.ir.bytes.job import Job as Spec
from apportion.ir.errors import ConfigError, DecodeError
from apportion.service.engine.library import Library
from apportion.service.engine.records import (
    EpochRecord,
    IterationRecord,
    JobRecord,
    PastRecord,
    decode,
    place,
)
from apportion.service.engine.state import Epoch, Iteration, Job, JobState
from apportion.service.store import Store


@dataclass
class Restored:
    """jobs by name; past: last epochs of deleted ones, by name; stale: keys of records that belong to nothing."""

    jobs: dict[str, Job] = field(default_factory=dict)
    past: dict[str, int] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)


def restore(store: Store, library: Library, now_s: float) -> Restored:
    """All that the store has; what was not planned yet waits again. Reads the whole store but its packs. Raises
    StoreError, DecodeError."""
    library.index(store.packs())
    found = Restored()
    for key, data in store.records("past/"):
        found.past[place(key)[0]] = decode(key, data, PastRecord).epoch
    for key, data in store.records("job/"):
        job = _job(key, data, found.past)
        found.jobs[job.name] = job
    for key, data in store.records("epoch/"):
        _add_epoch(found, key, decode(key, data, EpochRecord), now_s)
    for key, data in store.records("iteration/"):
        _add_iteration(found, key, decode(key, data, IterationRecord), library, now_s)
    return found


def _job(key: str, data: bytes, past: Mapping[str, int]) -> Job:
    record = decode(key, data, JobRecord)
    try:
        spec = Spec.from_data(record.spec)
    except ConfigError as error:
        raise DecodeError(f"store: the record of {key!r} is no job of this release: {error}") from None
    name, _, _ = place(key)
    return Job(JobState(name, spec, record.lookahead, record.key_digest, past=past.get(name, 0)))


def _add_epoch(found: Restored, key: str, record: EpochRecord, now_s: float) -> None:
    """Keys are sorted: the last one of a stream is the one that goes on."""
    name, number, _ = place(key)
    job = found.jobs.get(name)
    if job is None:
        found.stale.append(key)
        return
    job.switch(Epoch(job, number, record, now_s))


def _add_iteration(
    found: Restored, key: str, record: IterationRecord, library: Library, now_s: float
) -> None:
    name, number, iteration = place(key)
    job = found.jobs.get(name)
    epoch = None if job is None else job.open.get(number)
    if epoch is None or iteration < epoch.floor:
        found.stale.append(key)
        return
    held = Iteration(epoch, iteration, record.asked, now_s)
    library.need(record.key, held, record.request)
    if record.problem is not None:
        library.given_up(held.entry, record.problem)
    epoch.add(held)
    if held.waits:
        epoch.enqueue(iteration)
