"""Faulty tasks that harm their worker, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import time

from apportion.service.workers import Done, Refusal


def die(request: bytes) -> Done:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(request: bytes) -> Done:
    time.sleep(600)
    raise AssertionError


def hog(request: bytes) -> Done | Refusal:
    return Done(bytes(64 << 30), 0.0)
