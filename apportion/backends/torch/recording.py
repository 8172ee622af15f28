"""A device that computes nothing and counts launches and messages: for one rank of any plan, on any machine.

device = RecordingDevice(rank=3, ranks=64)
handle = PlanHandle(plan.for_rank(3), device, engine=device.engine)
planned_attention(q, k, v, handle)         # results are uninitialised; the host's work is the same as on a GPU
device.launches, device.posts, device.rounds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from apportion.backends.torch.engines import StageEngine
from apportion.backends.torch.memory.arenas import Pool, Post
from apportion.backends.torch.transport import Flight, Sizes, Transport


class RecordingDevice(Transport):
    """The transport and launcher of one rank without peers."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.pool = rank, ranks, Pool()
        self.engine = StageEngine(self._launched)
        self.reset()

    def reset(self) -> None:
        """Resets the counts. launches: by kernel; posts: messages; rounds: batches and all-to-alls."""
        self.launches: Counter[str] = Counter()
        self.posts = self.rounds = 0

    def _launched(
        self, kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]
    ) -> None:
        self.launches[kernel] += 1

    def start(self, channels: int) -> None:
        return

    def batch(self, channel: int, posts: Sequence[Post]) -> Flight:
        self.posts += len(posts)
        self.rounds += 1
        return Flight()

    def all_to_all(self, channel: int, sent: Tensor, received: Tensor, sizes: Sizes) -> Flight:
        self.posts += sum(size > 0 for side in sizes for size in side)
        self.rounds += 1
        return Flight()

    def all_gather(self, numbers: Sequence[int], about: str) -> list[list[int]]:
        """Returns this rank's numbers for every rank."""
        return [list(numbers)] * self.ranks
