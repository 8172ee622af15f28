"""Jobs, their keys and their epochs: what the engine has before anybody submits or reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from apportion.ir.bytes.job import Job as Spec
from apportion.ir.fields import integer, name as checked_name
from apportion.service.engine.kept.records import (
    EpochRecord,
    JobKey,
    PastRecord,
    encode,
    epoch_key,
    job_key,
    past_key,
)
from apportion.service.engine.kept.restore import keys_of
from apportion.service.engine.kept.state import Epoch, Iteration, Job, JobState
from apportion.service.engine.life import Life
from apportion.service.engine.tasks import shared
from apportion.service.errors import (
    ConflictError,
    EarlyError,
    GoneError,
    LimitError,
    NotFoundError,
    ServiceError,
    StoreError,
)
from apportion.service.protocol import TRAIN, EpochState
from apportion.service.store import Store

log = logging.getLogger(__name__)

_EPOCHS_SINCE = 10_000  # that may begin after a copy was made, before it is used
_MOST_KEYS = 64  # of a job
_MOST_FORMER = 1024  # deleted jobs whose keys are remembered, until the server ends


class Jobs(Life):
    """Jobs and epochs. Arguments and errors: as of `Engine`."""

    # ---- jobs

    def job(self, name: str) -> JobState:
        """The job of that name."""
        return self._job(name).state

    def jobs(self) -> list[JobState]:
        """All jobs, in the order in which they were made."""
        return [job.state for job in self._jobs.values()]

    async def create_job(self, name: str, spec: Spec, lookahead: int, key_digest: bytes) -> bool:
        """Whether it was made now; False where there is the same. Raises ConflictError, LimitError, QuotaError."""
        keys = (JobKey(key_digest),)
        state = JobState(checked_name("name", name), spec, integer("lookahead", lookahead), keys)
        return await shared(self._planning.tasks.spawn(self._create(state)))

    async def _create(self, state: JobState) -> bool:
        async with self._control:
            self._check_whole(state.name)
            there = self._jobs.get(state.name)
            if there is not None:
                _check_same(there.state, state)
                return False
            self._check_running()
            self._admission.check_job(state.spec, state.lookahead, len(self._jobs))
            state = replace(state, past=max(self._past.get(state.name, 0), self._born))
            await self._commit(job_key(state.name), state.record())
            self._jobs[state.name] = Job(state)
        return True

    def keys(self, name: str) -> Sequence[JobKey]:
        """Of the job of that name; of one that was set aside or deleted, where they are known; else none."""
        job = self._jobs.get(name)
        return self._former.get(name, ()) if job is None else job.state.keys

    async def add_key(self, name: str, key: JobKey) -> bool:
        """Whether it is new. Raises LimitError where there are too many, ConflictError where it has another role."""
        return await shared(self._planning.tasks.spawn(self._add_key(name, key)))

    async def _add_key(self, name: str, key: JobKey) -> bool:
        async with self._control:
            job = self._job(name)
            for held in job.state.keys:
                if held.digest == key.digest and held.role != key.role:
                    raise ConflictError(f"the key is there with the role `{held.role}`", field="role")
            if key in job.state.keys:
                return False
            if len(job.state.keys) >= _MOST_KEYS:
                rule = f"job {name} has {_MOST_KEYS} keys, the most that this server takes"
                raise LimitError(f"{rule}: revoke one", field="key")
            await self._rekey(job, (*job.state.keys, key))
        return True

    async def drop_key(self, name: str, id: str) -> None:
        """The key opens nothing from now on. Raises NotFoundError, ConflictError for the last one that submits."""
        await shared(self._planning.tasks.spawn(self._drop_key(name, id)))

    async def _drop_key(self, name: str, id: str) -> None:
        async with self._control:
            job = self._job(name)
            left = tuple(key for key in job.state.keys if key.id != id)
            if left == job.state.keys:
                raise NotFoundError(f"job {name} has no key {id[:32]!r}", field="key")
            if all(key.role == "read" for key in left):
                raise ConflictError(
                    "it is the job's last key that submits: add another one first", field="key"
                )
            await self._rekey(job, left)

    async def _rekey(self, job: Job, keys: tuple[JobKey, ...]) -> None:
        self._check_running()
        state = replace(job.state, keys=keys)
        await self._guarded(self._journal.commit({job_key(job.name): state.record()}))
        job.state = replace(job.state, keys=keys)

    async def delete_job(self, name: str) -> None:
        """Forgets the job but for the number of its last epoch: the next one of this name begins above it, so that a
        rank that did not hear of the deletion never gets its plans. Packs stay while there is room."""
        async with self._control:
            self._check_running()
            if checked_name("name", name) in self._aside:
                await self._delete_aside(name)
                return
            job = self._jobs.pop(name, None)
            if job is None:
                if name not in self._leaving:
                    raise self._no_job(name)
                await self._guarded(self._journal.flush())
                self._leaving.discard(name)
                return
            self._leaving.add(name)
            drops = [job_key(name)]
            drops += [epoch_key(name, number) for number in job.runs.values()]
            self._former = dict([*self._former.items(), (name, job.state.keys)][-_MOST_FORMER:])
            gone = NotFoundError(f"job {name} was deleted", field="job")
            held = [iteration for epoch in job.open.values() for iteration in self._close(epoch, gone)]
            drops += [iteration.key for iteration in held]
            unused = {iteration.entry for iteration in held if not iteration.entry.users}
            for entry in unused:
                self._planning.give_up(entry)
            self._journal.later(self._remember(job.state), drops)
            if self._journal.trouble:  # the store is full, say: what nobody needs goes first
                await self._make_room([entry.key for entry in unused])
            await self._guarded(self._journal.flush())
            self._leaving.discard(name)
            with suppress(StoreError):
                await self._journal.call(self._journal.store.keep_room)

    async def _make_room(self, packs: Sequence[bytes]) -> None:
        """Now, for the deletion to be written; what fails is told by the commit that follows."""
        with suppress(StoreError):
            await self._journal.call(self._journal.store.make_room)
            for key in self._library.discard(packs):
                await self._drop_pack(key)

    async def _delete_aside(self, name: str) -> None:
        drops = await self._guarded(self._journal.call(keys_of, self._journal.store, name))
        last = self._past.get(name, 0)
        self._journal.later({past_key(name): encode(PastRecord(last))} if last else {}, drops)
        await self._guarded(self._journal.flush())
        del self._aside[name]

    def _remember(self, state: JobState) -> dict[str, bytes]:
        """The record of what is left of a job."""
        if not state.last:
            return {}
        self._past[state.name] = state.last
        return {past_key(state.name): encode(PastRecord(state.last))}

    def backup(self) -> tuple[Store, dict[str, bytes]]:
        """The store, and the records of a copy that is made while ranks go on: jobs, and epochs that none of theirs may
        have."""
        past = self._past | {name: job.state.last for name, job in self._jobs.items() if job.state.last}
        kept = {job_key(name): job.state.record() for name, job in self._jobs.items()}
        return self._journal.store, kept | {
            past_key(name): encode(PastRecord(last + _EPOCHS_SINCE)) for name, last in past.items()
        }

    # ---- epochs

    async def begin_epoch(
        self, name: str, run: str, stream: str = TRAIN, reads: bool = False
    ) -> tuple[int, bool]:
        """(number of the epoch of that run of the stream, whether it began now). The stream's epoch before is over
        then; those of other streams go on. reads: only where it has begun. Raises LimitError where there are too many
        streams, EarlyError."""
        record = EpochRecord(checked_name("run", run), stream=checked_name("stream", stream))
        return await shared(self._planning.tasks.spawn(self._begin(name, record, reads)))

    async def _begin(self, name: str, record: EpochRecord, reads: bool) -> tuple[int, bool]:
        async with self._control:
            job = self._job(name)
            there = job.runs.get((record.stream, record.run))
            if there is not None:
                return there, False
            self._check_running()
            if reads:
                what = f"run {record.run} of stream {record.stream} has not begun"
                raise EarlyError(
                    f"{what}, and this key only reads: a key that submits begins it", retry_after=1.0
                )
            self._admission.check_stream(job, record.stream)
            epoch = Epoch(job, job.state.last + 1, record, self._clock())
            await self._commit(epoch.key, epoch.record())
            self._switch(job, epoch)
        return epoch.number, True

    def epoch_state(self, name: str, epoch: int) -> EpochState:
        """How far an epoch is."""
        return self._job(name).epoch(epoch).state()

    def _switch(self, job: Job, epoch: Epoch) -> None:
        before = job.switch(epoch)
        drops = [epoch_key(job.name, number) for number in job.forget(self.limits.epochs)]
        if before is not None:
            what = f"epoch {before.number} of job {job.name}, stream {epoch.stream}"
            held = self._close(before, GoneError(f"{what} is over, {epoch.number} has begun"))
            drops += [iteration.key for iteration in held]
        self._journal.later({}, drops)

    def _close(self, epoch: Epoch, why: ServiceError) -> list[Iteration]:
        """Ends the epoch; what it had. What is at workers is still finished and stored: whoever restarts a run asks for
        much of the same again."""
        held = epoch.close(why)
        for iteration in held:
            self._library.release(iteration)
        self._trim()
        return held

    async def tidy(self) -> None:
        """Nor jobs that nobody has asked anything of for too long."""
        await super().tidy()
        limits, now_s = self.limits, self._clock()
        for job in [*self._jobs.values()] if limits.job_s else []:
            job.used_s = now_s if job.used_s is None else job.used_s
            if now_s - job.used_s > limits.job_s:
                log.warning(
                    "job %s is deleted: nobody has asked anything of it for %.0f s", job.name, limits.job_s
                )
                await self.delete_job(job.name)


def _check_same(there: JobState, wanted: JobState) -> None:
    parts = {
        "job": there.spec.to_data() == wanted.spec.to_data(),
        "lookahead": there.lookahead == wanted.lookahead,
        "key": wanted.keys[0] in there.keys,
    }
    for field, same in parts.items():
        if not same:
            raise ConflictError(f"job {there.name} is there with another {field}", field=field)
