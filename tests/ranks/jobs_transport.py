"""Rank pool jobs with the transport."""

from __future__ import annotations

import torch

from apportion.backends.torch.memory.arenas import Post
from apportion.trainer.step.attention import Communicator


def batches(comm: Communicator) -> bool:
    """Sends two messages to every other rank at once, with sizes that depend on the sender; returns whether each
    arrives in its buffer."""
    size = 16 * (1 + comm.rank)
    posts, expected = [], []
    for peer in range(comm.ranks):
        if peer == comm.rank:
            continue
        for turn in (1, 2):
            buffer = torch.zeros(16 * (1 + peer), dtype=torch.uint8)
            posts.append(Post(False, peer, buffer))
            expected.append((buffer, 10 * peer + turn))
            posts.append(Post(True, peer, torch.full((size,), 10 * comm.rank + turn, dtype=torch.uint8)))
    comm.start(1)
    comm.batch(0, posts).wait()
    return all((received_bytes == number).all() for received_bytes, number in expected)


def exchange(comm: Communicator) -> bool:
    """Sends 16 (r + 1) bytes of value p from rank r to each peer p; returns whether they arrive."""
    out, into = [[16 * (comm.rank + 1)] * comm.ranks, [16 * (peer + 1) for peer in range(comm.ranks)]]
    sent = torch.arange(comm.ranks, dtype=torch.uint8).repeat_interleave(out[0])
    received = torch.full((sum(into),), comm.rank, dtype=torch.uint8)
    comm.all_to_all(0, sent, received, (out, into)).wait()
    return bool((received == comm.rank).all())


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
