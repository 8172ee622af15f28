"""The process that workers are forked from: everything is imported and compiled once, a worker is there in
milliseconds.

    server ── control ──► zygote ── fork ──► worker
       └─────────── its own socket ────────────┘

`python -m apportion.service.workers.zygote FD RUNNER BYTES`: FD is the control socket, on which a frame with the
number of cores says that it is ready; then each byte brings a socket, and the frame that answers has the pid of the
worker that serves it. RUNNER is a module with `warm()` and `run(task)`; BYTES is the memory that a worker may map
beyond what it is forked with, 0 for no limit. Where the machine's memory ends, the kernel kills workers first.
Workers outlive the zygote, neither outlives the server.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from apportion.service.workers.pipes import dies_with, send
from apportion.service.workers.worker import serve

_KILLED_FIRST = "800"  # of 1000; the server has 0


def main(control: socket.socket, runner: Any, memory_bytes: int) -> None:
    """Forks until the server hangs up, then kills what is left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends us, after its own drain
        signal.signal(signum, signal.SIG_IGN)
    with dies_with(control):
        runner.warm()
    gc.collect()
    gc.freeze()  # pages stay shared with the workers
    workers: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(workers))
    send(control, str(os.cpu_count() or 1).encode())
    while (fd := _next(control)) is not None:
        with socket.socket(fileno=fd) as line:
            workers.add(pid := _fork(control, line, runner, memory_bytes))
        send(control, str(pid).encode())
    for pid in workers:
        _kill_group(pid)
        os.waitpid(pid, 0)


def _next(control: socket.socket) -> int | None:
    """The next socket to serve; workers are buried only while it is waited for."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
    asked, fds, _, _ = socket.recv_fds(control, 1, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    return fds[0] if asked else None


def _fork(control: socket.socket, line: socket.socket, runner: Any, memory_bytes: int) -> int:
    pid = os.fork()
    if pid:
        with suppress(OSError):  # it did so itself and may be gone
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
        os.setpgid(0, 0)
        _confine(memory_bytes)
        control.close()
        serve(line, runner.run)
        status = 0
    except OSError:  # nobody listens any more
        status = 0
    finally:
        os._exit(status)


def _confine(memory_bytes: int) -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_KILLED_FIRST)
    if memory_bytes:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)


def _reap(workers: set[int]) -> None:
    """Buries workers that died, and before that kills what they had started: until then the group's id is theirs."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _kill_group(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            workers.discard(ended.si_pid)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), import_module(sys.argv[2]), int(sys.argv[3]))
