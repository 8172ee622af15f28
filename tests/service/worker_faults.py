"""A runner whose workers do what their task says: `kind:argument`. Anything else is planned as always."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from apportion.service.workers import Done, Task
from apportion.service.workers.worker import run as plan


def warm() -> None:
    if b"APPORTION_TEST_NO_START" in os.environb:
        sys.exit("told not to start")


def run(task: Task) -> Done:
    kind, _, argument = task.payload.partition(b":")
    return _ACTS[kind](argument) if kind in _ACTS else plan(task)


def _done(*bodies: bytes) -> Done:
    return Done(bodies, None, b"", 0.0)


def _die(argument: bytes) -> Done:
    os.kill(os.getpid(), signal.SIGKILL)
    return _done()


def _die_once(argument: bytes) -> Done:
    """Leaves a file behind; the next worker that finds it lives."""
    if not os.path.exists(argument):
        Path(argument.decode()).touch()
        _die(argument)
    return _done(b"alive")


def _spin(argument: bytes) -> Done:
    """Never gives the interpreter's lock away, and has a child; notes the pids of both in a file."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if argument:
        _noted(argument, child.pid)
    while True:
        pass


def _sleep(argument: bytes) -> Done:
    time.sleep(float(argument))
    return _done(b"slept")


def _noted(path: bytes, child: int) -> None:
    part = Path(path.decode() + ".part")
    part.write_text(f"{os.getpid()} {child}")
    part.rename(path.decode())


def _print(argument: bytes) -> Done:
    print("on stdout", flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    os.write(1, b"on descriptor 1\n")
    return _done(b"printed")


def _threads(argument: bytes) -> Done:
    return _done(os.environ["OMP_NUM_THREADS"].encode(), os.environ["NUMBA_NUM_THREADS"].encode())


def _bug(argument: bytes) -> Done:
    raise IndexError("a bug")


def _echo(argument: bytes) -> Done:
    return _done(argument)


_ACTS = {
    b"die": _die,
    b"die once": _die_once,
    b"spin": _spin,
    b"sleep": _sleep,
    b"print": _print,
    b"threads": _threads,
    b"bug": _bug,
    b"echo": _echo,
}
