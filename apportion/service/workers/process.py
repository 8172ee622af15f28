"""A planner process: `main`, in its own interpreter with the arguments PARENT MEMORY_BYTES.

    stdin: (module, function, request), …      stdout: outcomes      frames: length u32, little endian · msgpack

Ends when stdin or the process PARENT ends. MEMORY_BYTES: address space to map above its size at start, 0: no limit.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from struct import Struct
from typing import IO, Any

import msgspec

from apportion.service.workers.work import Completion, Refusal

_SIZE = Struct("<I")
_KILLED_FIRST = (
    b"800"  # out of 1000: if memory runs out, the system kills workers before servers and trainers
)


def write_frame(file: IO[bytes], data: Any) -> None:
    body = msgspec.msgpack.encode(data)
    file.write(_SIZE.pack(len(body)) + body)
    file.flush()


def read_frame(file: IO[bytes]) -> Any:
    """The content of the next frame. Raises EOFError after the last frame."""
    head = file.read(_SIZE.size)
    body = file.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else b""
    if not body:
        raise EOFError
    return msgspec.msgpack.decode(body)


def write_task(file: IO[bytes], fn: Callable[..., Any], request: bytes) -> None:
    write_frame(file, (fn.__module__, fn.__qualname__, request))


def read_outcome(fields: Any) -> Completion | Refusal:
    """Decodes an outcome. Raises RuntimeError for a function that failed."""
    kind, *values = fields
    if kind == "failed":
        raise RuntimeError(values[0])
    return Completion(*values) if kind == "done" else Refusal(*values)


def _outcome(module: str, name: str, request: bytes) -> tuple[Any, ...]:
    try:
        result = getattr(import_module(module), name)(request)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return ("done" if isinstance(result, Completion) else "refused"), *result


def main() -> None:
    """Runs tasks from stdin until it ends."""
    parent, memory_bytes = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    threading.Thread(target=_watch, args=[parent], daemon=True).start()
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_KILLED_FIRST)
    if memory_bytes:
        with open("/proc/self/statm") as file:
            mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + memory_bytes,) * 2)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that the output of solvers does not mix with the answers
    with suppress(EOFError, BrokenPipeError):
        while True:
            write_frame(answers, _outcome(*read_frame(sys.stdin.buffer)))
    os._exit(0)


def _watch(parent: int) -> None:
    """Ends this process, whatever it is doing, when its parent has ended."""
    with suppress(OSError):
        poller = select.poll()
        poller.register(os.pidfd_open(parent), select.POLLIN)
        poller.poll()
    os._exit(1)
