"""The worker's end of its socket: blocking, and bound to life and death to the server's end."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from apportion.service.workers.tasks import HEAD, MAX_TASK, size_of


def receive(line: socket.socket) -> bytes | None:
    """The next frame, None at the end. Raises DecodeError, OSError."""
    head = _exactly(line, HEAD.size)
    return None if head is None else _exactly(line, size_of(head, MAX_TASK))


def _exactly(line: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = line.recv_into(rest)
        if not count:
            return None
        rest = rest[count:]
    return bytes(data)


def send(line: socket.socket, data: bytes) -> None:
    """A frame. Raises OSError where nobody listens any more."""
    line.sendall(HEAD.pack(len(data)))
    line.sendall(data)


@contextmanager
def dies_with(line: socket.socket) -> Iterator[None]:
    """While this lasts, the kernel ends our process group as soon as the other end hangs up, whatever we are doing.

    Python need not get a turn for that: SIGIO's default action is the end. Nothing may arrive meanwhile.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(line, fcntl.F_GETFL)
    fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(line, fcntl.F_SETFL, flags | os.O_ASYNC)
    if _hung_up(line):  # before the signal was asked for
        os.killpg(os.getpgrp(), signal.SIGIO)
    try:
        yield
    finally:
        fcntl.fcntl(line, fcntl.F_SETFL, flags)


def _hung_up(line: socket.socket) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLHUP)
    return bool(poll.poll(0))
