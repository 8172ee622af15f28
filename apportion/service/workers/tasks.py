"""What goes to a worker and what comes back: msgpack in frames.

frame: length of the rest, u32 little endian | a Task one way, a Reply the other
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

import msgspec

from apportion.ir.bytes.wire import encode_struct, unpack
from apportion.ir.errors import DecodeError
from apportion.service.workers.errors import RefusedError, WorkerDiedError

HEAD = struct.Struct("<I")
#: begins a frame that a launcher sends unasked: how many workers there can be from now on
TOLD = b"="
MAX_TASK = 256 << 20
MAX_REPLY = 2 << 30


class Task(msgspec.Struct, frozen=True):
    """plan: `payload` is an encoded request (`ir.job`), and `verify` says whether the plan is checked against the
    rules; lower: `payload` is an assignment (`planner.jobs`)."""

    kind: Literal["plan", "lower"]
    payload: bytes
    verify: bool = True


class Done(msgspec.Struct, frozen=True, tag="done"):
    """bodies: of each rank, its encoded `IterationSlice`; assignment: the compact form, None where the recipe has none
    and from a "lower" task; id: of the iteration plan, 32 bytes; ms: that the worker took; compiled_s: seconds that its
    process has spent compiling loops so far."""

    bodies: tuple[bytes, ...]
    assignment: bytes | None
    id: bytes
    ms: float
    compiled_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """kind: name of the exception; field: of the request."""

    kind: str
    message: str
    field: str | None


class Died(msgspec.Struct, frozen=True, tag="died"):
    """From one who had the task done elsewhere: that worker died."""

    message: str


Reply: TypeAlias = Done | Refused | Died

_decode_task = msgspec.msgpack.Decoder(Task).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode(message: Task | Reply) -> bytes:
    return encode_struct(message)


def read_task(data: bytes) -> Task:
    """Raises DecodeError."""
    task: Task = unpack(_decode_task, data, "task")
    return task


def read_reply(data: bytes) -> Done:
    """Raises RefusedError, WorkerDiedError where the reply says so, and DecodeError."""
    reply: Reply = unpack(_decode_reply, data, "reply")
    if isinstance(reply, Refused):
        raise RefusedError(reply.kind, reply.message, reply.field)
    if isinstance(reply, Died):
        raise WorkerDiedError(reply.message)
    return reply


def size_of(head: bytes | bytearray, most: int) -> int:
    """Length of the frame that begins with `head`. Raises DecodeError beyond `most`."""
    (size,) = HEAD.unpack(head)
    if size > most:
        raise DecodeError(f"frame of {size} bytes between server and worker, at most {most}")
    return int(size)
