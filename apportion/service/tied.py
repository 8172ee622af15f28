"""Commands of Python that end with the process that starts them, however that ends.

    python tied.py PARENT SIGNAL ARGUMENTS…  ──exec──►  python ARGUMENTS…

Linux keeps the request over exec, so the kernel has it before the command imports anything, which can take minutes.
Other systems have no such request: there a command must look for itself.
"""

import ctypes
import os
import sys

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def tied(number: int, *arguments: str) -> list[str]:
    """The command `python ARGUMENTS…` that gets a signal when the thread that starts it has ended."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *arguments]


def main(parent: int, number: int, *arguments: str) -> None:
    """Becomes the command; ends where the parent has ended before the kernel was asked."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_DEATH_SIGNAL, ctypes.c_ulong(number), *(ctypes.c_ulong(0),) * 3)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
