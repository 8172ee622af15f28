"""Pool of eight worker processes for multi-rank tests, started once per session.

A forkserver that has imported the modules of jobs starts the workers in about a second; a job then costs milliseconds.
Jobs are functions `job(comm, *args)` of modules, sent by name; arguments and results are plain data and numpy arrays.
The pool waits for all ranks at once: it raises the first traceback, and is rebuilt after a failure, since the other
ranks may hang in a collective.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from apportion.ir.errors import ApportionError

RANKS = 8
TIMEOUT_S = 300  # enough for a loaded machine and a cold start


class RankError(AssertionError):
    """A job failed on a rank; the message is its traceback."""


class Pool:
    """A pool. timeout_s: for a job; size: number of workers; env: environment variables of the workers."""

    def __init__(self, timeout_s: int = TIMEOUT_S, size: int = RANKS, **env: str) -> None:
        self._timeout_s, self._size, self._env = timeout_s, size, env
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.ranks.preloaded"])
        self._workers = []

    def run(self, job: Callable[..., Any], ranks: int, *args: Any, each: Any = None) -> list[Any]:
        """Runs `job(comm, *args)` on ranks 0..ranks-1; returns their results in order. each: one more argument per
        rank."""
        if not self._workers:
            self._start()
        name = (job.__module__, job.__qualname__)
        pipes = [pipe for _, pipe in self._workers[:ranks]]
        for rank, pipe in enumerate(pipes):
            pipe.send((name, ranks, (*args, *([each[rank]] if each is not None else []))))
        return self._collect(pipes)

    def errors(self, job: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
        """Like `run`: the error of each rank, as "type: message", or "" if there is none."""
        ranks, *rest = args
        return self.run(_error_of, ranks, job.__module__, job.__qualname__, *rest, **options)

    def _collect(self, pipes: list[Any]) -> list[Any]:
        results, waiting = {}, list(pipes)
        while waiting:
            ready = wait(waiting, self._timeout_s)
            if not ready:
                self._fail(f"no answer in {self._timeout_s} s from ranks {[*map(pipes.index, waiting)]}")
            for pipe in ready:
                results[pipe] = self._answer(pipe, pipes.index(pipe))
                waiting.remove(pipe)
        return [results[pipe] for pipe in pipes]

    def _answer(self, pipe: Any, rank: int) -> Any:
        try:
            ok, value = pipe.recv()
        except EOFError:
            self._fail(f"rank {rank} died")
        if not ok:
            self._fail(f"rank {rank}:\n{value}")
        return value

    def _fail(self, message: str) -> None:
        self.close()
        raise RankError(message)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._size):
            parent_end, child_end = self._context.Pipe()
            args = (child_end, rank, self._size, self._folder.name, self._timeout_s, self._env)
            process = self._context.Process(target=_work, args=args, daemon=True)
            process.start()
            child_end.close()
            self._workers.append((process, parent_end))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        if self._workers:
            self._folder.cleanup()
        self._workers = []


def _work(pipe: Any, rank: int, size: int, folder: str, timeout_s: int, env: dict[str, str]) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s / 2)
    store = dist.FileStore(str(Path(folder) / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    groups = [dist.new_group(list(range(ranks))) for ranks in range(1, size + 1)]
    while True:
        try:
            (module, function), ranks, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_attempt(module, function, groups[ranks - 1], args))


def _error_of(comm: Any, module: str, function: str, *args: Any) -> str:
    try:
        getattr(importlib.import_module(module), function)(comm, *args)
    except (ApportionError, OSError, UserWarning) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _attempt(module: str, function: str, group: Any, args: tuple[Any, ...]) -> tuple[bool, Any]:
    from apportion.backends.torch.transport import Communicator
    from apportion.trainer.step import wiring
    from tests.ranks.one_gpu import OneGpu

    wiring.watch = wiring.Watch()  # ranks may have run different jobs before
    try:
        job = getattr(importlib.import_module(module), function)
        communicator = OneGpu if os.environ.get("APPORTION_TEST_DEVICE") else Communicator
        return True, job(communicator(group), *args)
    except BaseException:
        return False, traceback.format_exc()
