"""Plans that `apportion precompute` made, in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.loops.jit import compiling
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Sampling
from apportion.service.offline import Offline, open_offline
from apportion.service.protocol import TRAIN


@dataclass(frozen=True)
class FolderSource:
    """Plans that `apportion precompute` made; found by what is asked, so the order of the samples is free."""

    folder: Path
    job: Job
    seed: int
    shuffle: bool
    shared = True

    @staticmethod
    def open(folder: str | Path) -> FolderSource:
        """Raises as `open_offline`, and ConfigError where another release made the plans."""
        with open_offline(folder) as offline:
            offline.check(offline.job, None)
            return FolderSource(Path(folder), offline.job, offline.facts.seed, offline.facts.shuffle)

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        seed, shuffle = self.seed if seed is None else seed, self.shuffle if shuffle is None else shuffle
        found = Sampling(lengths, self.job.tokens, self.job.microbatches, seed, shuffle)
        with open_offline(self.folder) as offline:
            offline.check(self.job, found)
        return found

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> FolderFeed:
        return FolderFeed(open_offline(self.folder), rank)


@dataclass(frozen=True)
class FolderFeed:
    offline: Offline
    rank: int

    @property
    def compiled_s(self) -> float:
        return compiling.seconds

    def knows(self, iteration: int) -> bool:
        return True

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        """Nothing to do: all was planned before."""

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        return self.offline.slice(self.offline.job.request_key(batches), self.rank)

    def stop(self) -> None:
        """Reading does not wait for others."""

    def close(self) -> None:
        self.offline.close()
