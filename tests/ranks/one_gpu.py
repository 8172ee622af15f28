"""Communicator for ranks that share one GPU: NCCL refuses that, so messages go through the host, over gloo.

It waits for the device in each round, so it is only for tests of results, not of times.
"""

from __future__ import annotations

from typing import Any

import torch

from apportion.backends.torch.memory.arenas import Post
from apportion.backends.torch.transport import Communicator, Flight


class OneGpu(Communicator):
    """A gloo communicator whose posts are copied to the host and back."""

    def batch(self, channel: Any, posts: Any) -> Any:
        copies = [Post(post.send, post.peer, post.data.cpu()) for post in posts]
        pairs = zip(posts, copies, strict=True)
        received = [(post.data, copy.data) for post, copy in pairs if not post.send]
        return _Copied(super().batch(channel, copies), received)

    def all_to_all(self, channel: Any, sent: Any, received: Any, sizes: Any) -> Any:
        copy = torch.empty_like(received, device="cpu")
        return _Copied(super().all_to_all(channel, sent.cpu(), copy, sizes), [(received, copy)])


class _Copied(Flight):
    def __init__(self, flight: Any, received: Any) -> None:
        self._flight, self._received = flight, received

    def wait(self) -> None:
        self._flight.wait()
        for target, copy in self._received:
            target.copy_(copy)
