"""Tasks that kill, block or fill their worker, in a module that workers can import."""

from __future__ import annotations

import os
import resource
import signal
import time

from apportion.service.workers import Completion, Refusal


def die(request: bytes) -> Completion:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(request: bytes) -> Completion:
    time.sleep(600)
    raise AssertionError


def address_space(request: bytes) -> Completion:
    return Completion(str(resource.getrlimit(resource.RLIMIT_AS)[0]).encode(), 0.0)


def hog(request: bytes) -> Completion | Refusal:
    return Completion(bytes(64 << 30), 0.0)
