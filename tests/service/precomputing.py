"""Folders of plans for tests: small jobs, the command in a process of its own, and all bytes of a folder."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from apportion import bench
from apportion.ir.bytes.job import Job
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.request.sampling import Masks
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.precompute import Work

DEADLINE_S = 300.0


def lengths(samples: int, seed: int, longest: int = 900) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest, samples, endpoint=True).tolist()


def work_of(
    samples: Sequence[int],
    iterations: int,
    *,
    ranks: int = 4,
    tokens_per_rank: int = 512,
    microbatches: int = 1,
    recipe: str = "fcp",
    seed: int = 0,
    shuffle: bool = True,
    masks: Masks = None,
    **policy: object,
) -> Work:
    held = Policy(find_recipe(recipe), seed=seed, **policy)
    job = Job(bench.cluster_of(ranks), Model(), held, tokens_per_rank, microbatches)
    return Work(job, samples, masks, iterations, shuffle)


def bytes_of(folder: Path) -> dict[str, str]:
    """Name -> digest of every file in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def packs_in(folder: Path) -> int:
    return sum(1 for _ in folder.glob("packs/*/*.pack"))


def command(out: Path, lengths: Path, iterations: int, *more: object) -> list[str]:
    words = ["precompute", "--lengths", lengths, "--iterations", iterations, "--out", out, *more]
    return [sys.executable, "-m", "apportion", *map(str, words)]


@contextmanager
def running(
    words: Sequence[str], stderr: IO[bytes] | int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process group of its own; killed at the end where it still runs."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, env=env, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def until(reached: Callable[[], bool], deadline_s: float = DEADLINE_S, every_s: float = 0.01) -> None:
    """Poll until `reached`. Raises TimeoutError."""
    end = time.monotonic() + deadline_s
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"not after {deadline_s} s")
        time.sleep(every_s)
