"""Pool jobs with the transport."""

from __future__ import annotations

import torch

from apportion.backends.torch.memory.arenas import Post
from apportion.trainer.step.attention import Communicator


def batches(comm: Communicator) -> bool:
    """Sends two messages of different sizes to every other rank at once; True if each arrives at its listed place."""
    size = 16 * (1 + comm.rank)
    posts, wanted = [], []
    for peer in range(comm.ranks):
        if peer == comm.rank:
            continue
        for turn in (1, 2):
            arrives = torch.zeros(16 * (1 + peer), dtype=torch.uint8)
            posts.append(Post(False, peer, arrives))
            wanted.append((arrives, 10 * peer + turn))
            posts.append(Post(True, peer, torch.full((size,), 10 * comm.rank + turn, dtype=torch.uint8)))
    comm.start(1)
    comm.batch(0, posts).wait()
    return all((arrived == number).all() for arrived, number in wanted)


def exchange(comm: Communicator) -> bool:
    """Sends 16 (r + 1) bytes of value p from rank r to peer p; True if they arrive."""
    out, into = [[16 * (comm.rank + 1)] * comm.ranks, [16 * (peer + 1) for peer in range(comm.ranks)]]
    sent = torch.arange(comm.ranks, dtype=torch.uint8).repeat_interleave(out[0])
    received = torch.full((sum(into),), comm.rank, dtype=torch.uint8)
    comm.all_to_all(0, sent, received, (out, into)).wait()
    return bool((received == comm.rank).all())


def channels(comm: Communicator) -> tuple[int, bool, bool]:
    """The number of groups after starting three channels, whether a repeat keeps them, and an agreement among hosts."""
    shared = Communicator.shared()
    shared.start(3)
    rows = shared.all_gather([shared.rank, 7], "numbers")
    return len(shared._groups), Communicator.shared() is shared, rows == [[rank, 7] for rank in range(8)]


def gathers(comm: Communicator, sizes: list[int]) -> list[list[list[int]]]:
    """The results of gathers of these numbers of integers on rank 0, one more on each following rank."""
    return [comm.all_gather(range(size + comm.rank), f"{size} numbers") for size in sizes]
