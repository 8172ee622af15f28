"""Rank pool jobs with the transport."""

from __future__ import annotations

from apportion.trainer.step.attention import Communicator


def channels(comm: Communicator) -> tuple[int, bool, bool]:
    """The number of groups after starting three channels, whether a second call shares them, and whether ranks
    gather."""
    shared = Communicator.shared()
    shared.start(3)
    rows = shared.all_gather([shared.rank, 7], "numbers")
    return len(shared._groups), Communicator.shared() is shared, rows == [[rank, 7] for rank in range(8)]


def gathers(comm: Communicator, sizes: list[int]) -> list[list[list[int]]]:
    """Gathers `sizes` integers on rank 0, and one more on each following rank; returns the results."""
    return [comm.all_gather(range(size + comm.rank), f"{size} numbers") for size in sizes]
