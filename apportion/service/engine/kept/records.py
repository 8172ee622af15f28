"""What the engine keeps in its store, so that a server that was killed goes on where it was.

    job/NAME                              the job, its look-ahead, the digest of its key
    past/NAME                             the last epoch of a job of that name that was deleted
    epoch/NAME/00000001                   its stream and run, how far ranks have come, what is no longer kept
    iteration/NAME/00000001/0000000000000012   what was asked for, and why it cannot be planned, if so

    born                                  the number above which all epochs begin

A plan is there when its pack is: no record says so. Of records under the keys of a job that is gone or of an epoch
that is over nothing is read; they are dropped when the server starts.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from apportion.ir.errors import DecodeError
from apportion.ir.hashing import SIZE
from apportion.service.errors import ConflictError, QuarantinedError, RefusedBatchError
from apportion.service.protocol import TRAIN

T = TypeVar("T", bound=msgspec.Struct)

MAX_ITERATION = 2**53  # what JSON's numbers hold


class JobKey(msgspec.Struct, frozen=True):
    """A key of a job. digest: 32 bytes; role: `submit`, or `read` for one that fetches plans alone."""

    digest: bytes
    role: Literal["submit", "read"] = "submit"

    @property
    def id(self) -> str:
        """What it is called where keys are listed and revoked."""
        return self.digest.hex()[:16]


class JobRecord(msgspec.Struct, frozen=True):
    """`spec` is `Job.to_data()`. key_digest: of its first key, for releases that know no others; keys: all of them,
    none in records of such releases."""

    spec: dict[str, Any]
    lookahead: int
    key_digest: bytes
    keys: tuple[JobKey, ...] = ()


class BornRecord(msgspec.Struct, frozen=True):
    """epoch: those of new jobs begin above it."""

    epoch: int


class PastRecord(msgspec.Struct, frozen=True):
    """epoch: the next job of this name begins above it, lest a rank of the deleted one read its plans."""

    epoch: int


class EpochRecord(msgspec.Struct, frozen=True):
    """front: 1 + the highest iteration that a rank had when this was written, 0 before the first; it may lag behind.
    Iterations below `floor` are no longer kept. stream: older records have none. release: that plans it, "" where an
    older record does not say."""

    run: str
    front: int = 0
    floor: int = 0
    stream: str = TRAIN
    release: str = ""


class ProblemRecord(msgspec.Struct, frozen=True):
    """Why an iteration cannot be planned. type: that of the error that readers get."""

    type: str
    detail: str
    field: str | None = None

    def error(self) -> ConflictError:
        """What readers get."""
        kind = QuarantinedError if self.type == QuarantinedError.type else RefusedBatchError
        return kind(self.detail, field=self.field)


class IterationRecord(msgspec.Struct, frozen=True):
    """key: content address of the plan; asked: digest of the request; both 32 bytes. request: `ir.job.encode_batches`
    (with the job in records of older releases), empty where there is a problem."""

    key: bytes
    asked: bytes
    request: bytes
    problem: ProblemRecord | None = None


#: of a `BornRecord`
BORN = "born"


def job_key(name: str) -> str:
    """The key of a job's record."""
    return f"job/{name}"


def past_key(name: str) -> str:
    """The key of what is left of a deleted job."""
    return f"past/{name}"


def epoch_key(name: str, epoch: int) -> str:
    """The key of an epoch's record."""
    return f"epoch/{name}/{epoch:08d}"


def iteration_key(name: str, epoch: int, iteration: int) -> str:
    """The key of an iteration's record; sorted keys are sorted by number."""
    return f"iteration/{name}/{epoch:08d}/{iteration:016d}"


def place(key: str) -> tuple[str, int, int]:
    """(job, epoch, iteration) of a key, 0 for what it has not. Raises DecodeError."""
    kind, *parts = key.split("/")
    try:
        name, *numbers = parts
        epoch, iteration = (*map(int, numbers), 0, 0)[:2]
    except ValueError:
        raise DecodeError(f"store: {key!r} is not the key of a {kind}") from None
    return name, epoch, iteration


def encode(record: msgspec.Struct) -> bytes:
    """A record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(key: str, data: bytes, kind: type[T]) -> T:
    """The record under `key`. Raises DecodeError."""
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"store: the record of {key!r} is damaged: {error}") from None
    if isinstance(found, IterationRecord) and {len(found.key), len(found.asked)} != {SIZE}:
        raise DecodeError(f"store: the record of {key!r} has digests that are not of {SIZE} bytes")
    return found
