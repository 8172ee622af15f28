"""A server's jobs, as its store has them."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from apportion.ir.bytes.job import Job as Spec
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.fields import name as checked_name
from apportion.service.engine.kept.build import build
from apportion.service.engine.kept.library import Library
from apportion.service.engine.kept.records import (
    BORN,
    BornRecord,
    EpochRecord,
    IterationRecord,
    JobKey,
    JobRecord,
    PastRecord,
    decode,
    encode,
    job_key,
    past_key,
    place,
)
from apportion.service.engine.kept.state import Epoch, Iteration, Job, JobState
from apportion.service.store import Store

#: 2026; more seconds than an epoch takes, while numbers have 8 digits
_SINCE_S, _EVERY_S = 1_767_225_600.0, 10.0

log = logging.getLogger(__name__)


@dataclass
class Restored:
    """jobs by name; past: last epochs of those that are gone or set aside, by name; stale: keys of records that belong
    to nothing; aside: by name, why a job cannot go on: a damaged record of it; former: keys of these, where they are
    known; born: above which epoch new jobs begin; news: records that are still to be written; orphans: last epochs of
    jobs without a sound record, by name; unsure: whether some number was lost."""

    jobs: dict[str, Job] = field(default_factory=dict)
    past: dict[str, int] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    former: dict[str, tuple[JobKey, ...]] = field(default_factory=dict)
    born: BornRecord = field(default_factory=lambda: BornRecord(0))
    news: dict[str, bytes] = field(default_factory=dict)
    orphans: dict[str, int] = field(default_factory=dict)
    unsure: bool = False

    def lose(self, key: str, why: str) -> None:
        """The job of a damaged record is set aside."""
        name = _named(key)
        if key.startswith(("past/", "epoch/")):  # whose it was, or which, may be what is damaged
            self.orphan(name, 0)
            self.unsure = True
        self.aside.setdefault(name, why)

    def orphan(self, name: str, epoch: int) -> None:
        """That job has had this epoch, and does not go on."""
        self.orphans[name] = max(epoch, self.orphans.get(name, 0))

    def settle(self) -> None:
        """Whoever is made anew begins above all epochs of its name; everybody does above all that there can have been,
        where a number or whose it is was lost."""
        late = _late() if self.unsure else 0
        for name, epoch in self.orphans.items():
            self.past[name] = max(epoch, self.past.get(name, 0), self.born.epoch, late)
            with suppress(ConfigError):  # a damaged name, which nobody can ask for
                self.news[past_key(checked_name("name", name))] = encode(PastRecord(self.past[name]))
        if late:
            self.born = BornRecord(late)
            self.news[BORN] = encode(self.born)
            for job in self.jobs.values():
                job.state = replace(job.state, past=max(job.state.past, late))


def restore(store: Store, library: Library, now_s: float) -> Restored:
    """All that the store has; what was not planned yet waits again. Reads the whole store but its packs. A job with a
    damaged record is set aside, the others go on. Raises StoreError."""
    library.index(store.packs())
    found, damaged = _begin(store), list[str]()

    def past(key: str, data: bytes) -> None:
        found.past[place(key)[0]] = decode(key, data, PastRecord).epoch

    def job(key: str, data: bytes) -> None:
        one = _job(key, data, found)
        found.jobs[one.name] = one

    def epoch(key: str, data: bytes) -> None:
        _add_epoch(found, key, decode(key, data, EpochRecord), now_s)

    def iteration(key: str, data: bytes) -> None:
        _add_iteration(found, key, decode(key, data, IterationRecord), library, now_s)

    for prefix, add in (("past/", past), ("job/", job), ("epoch/", epoch), ("iteration/", iteration)):
        for key, data in store.records(prefix, damaged):
            try:
                add(key, data)
            except DecodeError as error:
                found.lose(key, str(error))
        for key in damaged:
            found.lose(key, f"store: the record of {key!r} is damaged: it is not what was written")
        damaged.clear()
    for name in found.aside:
        _set_aside(found, name, library)
    found.settle()
    return found


def _begin(store: Store) -> Restored:
    """Where jobs may have been before (in a Redis that was wiped, a folder whose index was lost) new ones must not
    begin again at 1: ranks may still ask for the first ones' plans."""
    lost = list[str]()
    for _, data in store.records(BORN, lost):
        return Restored(born=decode(BORN, data, BornRecord))
    is_empty = next(store.records("", []), None) is None
    was_wiped = is_empty and (store.may_be_wiped or next(store.packs(), None) is not None)
    return Restored(unsure=was_wiped or bool(lost))


def _late() -> int:
    """An epoch that no job can have had."""
    return int((time.time() - _SINCE_S) / _EVERY_S)


def _named(key: str) -> str:
    """The job in a key, however damaged."""
    return key.split("/")[1] if "/" in key else key


def _set_aside(found: Restored, name: str, library: Library) -> None:
    """Its last epoch stays known."""
    job = found.jobs.pop(name, None)
    log.error("job %s is set aside: %s", name, found.aside[name])
    if job is None:
        return
    found.former[name] = job.state.keys
    found.orphan(name, job.state.last)
    for epoch in job.open.values():
        for held in epoch.iterations.values():
            library.release(held)


def keys_of(store: Store, name: str) -> list[str]:
    """Of all records of a job, the damaged ones too, but for its past."""
    found = list[str]()
    for prefix in (f"epoch/{name}/", f"iteration/{name}/"):
        found += [key for key, _ in store.records(prefix, found)]
    return [job_key(name), *found]


def _job(key: str, data: bytes, found: Restored) -> Job:
    record = decode(key, data, JobRecord)
    try:
        spec = Spec.from_data(record.spec)
    except ConfigError as error:
        raise DecodeError(f"store: the record of {key!r} is no job of this release: {error}") from None
    name, _, _ = place(key)
    keys = record.keys or (JobKey(record.key_digest),)
    past = max(found.past.get(name, 0), found.born.epoch)
    return Job(JobState(name, spec, record.lookahead, keys, past=past))


def _add_epoch(found: Restored, key: str, record: EpochRecord, now_s: float) -> None:
    """Keys are sorted: the last one of a stream is the one that goes on."""
    name, number, _ = place(key)
    job = found.jobs.get(name)
    if job is None:
        found.stale.append(key)
        found.orphan(name, number)
        return
    job.switch(Epoch(job, number, record, now_s))
    if record.release not in ("", build()):  # its plans may have other bytes here
        why = (
            f"epoch {number} of job {name} was planned by release {record.release}, this server is {build()}"
        )
        job.end(number, f"{why}: begin a new epoch (a new run)")
        log.warning("%s: it is over", why)


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
