"""Transport of rounds over torch.distributed, with the same code for gloo and NCCL.

A sparse round is one batch of sends and receives among the ranks that take part; a dense round is one all-to-all of
bytes that every rank enters. A transport moves bytes and does not interpret them.

A channel is a process group, and on NCCL a stream: rounds of two channels overlap, as in the simulator. Every rank
launches its rounds in ascending order over all channels together, so one group is enough for correctness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apportion.backends.torch.calls import Calls, by_value, calls_of
from apportion.backends.torch.memory.arenas import Pool, Post
from apportion.ir.errors import ConfigError, ExecutionError

#: bytes of an exchange to each peer, and from each
Sizes = tuple[list[int], list[int]]


class Flight:
    """A round in flight; an instance of this class itself has no messages."""

    def wait(self) -> None:
        """Waits until the round is complete: received data is available, sent data may be overwritten. On a GPU the
        current stream waits, not the host."""


class Transport(ABC):
    """Moves bytes between ranks. An implementation must pass the conformance tests of the backend.

    rank, ranks: this rank and the number of ranks. pool: buffers that calls share, one per call in flight.
    """

    rank: int
    ranks: int
    pool: Pool

    @abstractmethod
    def start(self, channels: int) -> None:
        """Initialises channels 0 to channels - 1, a collective: a round must not be a group's first operation."""

    @abstractmethod
    def batch(self, channel: int, posts: Sequence[Post]) -> Flight:
        """Starts sends and receives, matched in order between two ranks. Ranks without either do not take part."""

    @abstractmethod
    def all_to_all(self, channel: int, sent: Tensor, received: Tensor, sizes: Sizes) -> Flight:
        """Starts an exchange that every rank enters."""

    @abstractmethod
    def all_gather(self, numbers: Sequence[int], about: str) -> list[list[int]]:
        """Gathers any number of integers from every rank; a collective on CPU tensors. about: describes them in errors.
        Raises ExecutionError if ranks gather different things, or made different calls before."""

    def call(self, name: str) -> AbstractContextManager[None]:
        """Scope of one call's messages, which every rank enters; its name must be equal on all ranks. If it
        raises, the calls of the other ranks raise too. Raises ExecutionError if another thread is in a call."""
        return _NO_PEERS

    def gather_texts(self, text: str, about: str) -> list[str]:
        """Gathers a text from every rank; a collective on CPU tensors."""
        return [_text(row) for row in self.all_gather(_numbers(text), about)]

    def gather_floats(self, values: Sequence[float], about: str) -> list[list[float]]:
        """Gathers float64 numbers from every rank; a collective on CPU tensors."""
        return [as_floats(row) for row in self.all_gather(as_bits(values), about)]


def as_bits(values: Sequence[float]) -> list[int]:
    """The bit patterns of float64 numbers, as int64."""
    return np.array(values, np.float64).view(np.int64).tolist()  # type: ignore[no-any-return]


def as_floats(bits: Sequence[int]) -> list[float]:
    """The inverse of `as_bits`."""
    return np.array(bits, np.int64).view(np.float64).tolist()  # type: ignore[no-any-return]


def _numbers(text: str) -> list[int]:
    """The text's length in bytes, and its bytes as 8-byte integers."""
    data = text.encode()
    return [len(data), *np.frombuffer(data + bytes(-len(data) % 8), "<i8").tolist()]


def _text(numbers: Sequence[int]) -> str:
    """The inverse of `_numbers`."""
    return np.array(numbers[1:], "<i8").tobytes()[: numbers[0]].decode()


#: calls of a single rank, which has no peers
_NO_PEERS: AbstractContextManager[None] = nullcontext()
#: numbers per rank in the first exchange of `_gather_lists`, besides their count
_FIRST_EXCHANGE = 63


@dataclass(frozen=True)
class DistributedFlight(Flight):
    """A round of pending `torch.distributed.Work` handles: messages between this rank and `peers`. buffers: kept alive
    until the round is complete."""

    works: Sequence[Any]
    buffers: Sequence[Tensor]
    calls: Calls
    group: Any
    peers: Collection[int]

    def wait(self) -> None:
        self.calls.wait(self.works, self.group, self.peers)


class Communicator(Transport):
    """The ranks that execute plans together: rank r of a plan is rank r of the groups.

    groups: process groups of the same ranks in the same order; channel c uses `groups[c % len(groups)]`. hosts: a group
    that moves CPU tensors, for checks; required if `groups` move only GPU tensors. Without arguments: all ranks of
    the job, on as many groups as their plans have channels, or a single rank if torch.distributed is not initialised.
    Any number of plans may share a communicator. `global_ranks`: the members' ranks in the job, in the groups' order.
    """

    def __init__(self, *groups: Any, hosts: Any = None) -> None:
        self._creates_groups = not groups
        if not groups and dist.is_initialized():
            groups = (dist.group.WORLD,)
        # a GPU channel is never the job's own group: the trainer uses it too, and its stream waits for computation
        self._base, self._hosts = (groups[0] if groups else None), hosts
        self._groups = (
            [] if self._creates_groups and groups and _has_backend(groups[0], "nccl") else list(groups)
        )
        self.pool = Pool()
        self.ranks = dist.get_world_size(groups[0]) if groups else 1
        self.rank = dist.get_rank(groups[0]) if groups else 0
        self.global_ranks: list[int] = dist.get_process_group_ranks(groups[0]) if groups else [0]
        self._calls = calls_of(groups[0]) if self.ranks > 1 else None
        self._started = 0

    @staticmethod
    def shared() -> Communicator:
        """The communicator of all ranks of the job, one per process, so that plans share its groups and buffers."""
        return _communicator(dist.group.WORLD if dist.is_initialized() else None)

    @property
    def device(self) -> torch.device:
        """The device that the groups' collectives require."""
        nccl = self._base is not None and _has_backend(self._base, "nccl")
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def start(self, channels: int) -> None:
        if self.ranks == 1:
            return
        options = None
        if _has_backend(self._base, "nccl"):  # with streams of higher priority than computation
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        while self._creates_groups and len(self._groups) < channels:
            self._groups.append(dist.new_group(pg_options=options))
        for group in self._groups[self._started : channels]:
            if _has_backend(group, "nccl"):  # a batch of only some ranks must not be its first operation
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            self._started += 1

    def call(self, name: str) -> AbstractContextManager[None]:
        return _NO_PEERS if self._calls is None else self._calls.call(name)

    def batch(self, channel: int, posts: Sequence[Post]) -> Flight:
        if self._calls is None or not posts:
            return Flight()
        group, tag = self._group(channel), self._calls.tag
        ops = [
            dist.P2POp(dist.isend if send else dist.irecv, data, self.global_ranks[peer], group, tag)
            for send, peer, data in posts
        ]
        works, buffers = dist.batch_isend_irecv(ops), [post.data for post in posts]
        return DistributedFlight(works, buffers, self._calls, group, {post.peer for post in posts})

    def all_to_all(self, channel: int, sent: Tensor, received: Tensor, sizes: Sizes) -> Flight:
        if self._calls is None:
            return Flight()
        if sent.device.type == "cpu":  # messages of gloo's own exchange have no tags
            return self._exchange_parts(channel, sent, received, sizes)
        group = self._group(channel)
        work = dist.all_to_all_single(received, sent, sizes[1], sizes[0], group=group, async_op=True)
        return DistributedFlight([work], [sent, received], self._calls, group, range(self.ranks))

    def _exchange_parts(self, channel: int, sent: Tensor, received: Tensor, sizes: Sizes) -> Flight:
        """Starts an exchange message by message."""
        incoming, outgoing = torch.split(received, sizes[1]), torch.split(sent, sizes[0])
        incoming[self.rank].copy_(outgoing[self.rank])
        sides = ((False, incoming), (True, outgoing))
        posts = [Post(send, peer, part) for send, parts in sides for peer, part in enumerate(parts)]
        return self.batch(channel, [post for post in posts if post.peer != self.rank and len(post.data)])

    def all_gather(self, numbers: Sequence[int], about: str) -> list[list[int]]:
        if self._calls is None:
            return [list(numbers)]
        with self.call(f"all_gather of {about}"):
            rows = self._gather_lists(self._calls, [self._calls.history, *numbers])
            if len({row[0] for row in rows}) > 1:
                call_lists = self._gather_lists(self._calls, _numbers(self._calls.recent_calls()))
                raise self._calls.mismatch_error(list(map(_text, call_lists)))
            return [row[1:] for row in rows]

    def _gather_lists(self, calls: Calls, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, any number per rank: a second exchange if one has many."""
        rows = self._gather(calls, [len(numbers), *numbers[:_FIRST_EXCHANGE]], 1 + _FIRST_EXCHANGE)
        longest = max(row[0] for row in rows) - _FIRST_EXCHANGE
        if longest > 0:
            rest = self._gather(calls, numbers[_FIRST_EXCHANGE:], longest)
            rows = [row + tail for row, tail in zip(rows, rest, strict=True)]
        return [row[1 : 1 + row[0]] for row in rows]

    def _gather(self, calls: Calls, numbers: Sequence[int], count: int) -> list[list[int]]:
        """`count` numbers of every rank, padded with zeros."""
        values = torch.tensor([*numbers, *[0] * (count - len(numbers))], dtype=torch.int64, device="cpu")
        outputs, group = [torch.empty_like(values) for _ in range(self.ranks)], self._host_group()
        work = dist.all_gather(outputs, values, group=group, async_op=True)
        DistributedFlight([work], [values, *outputs], calls, group, range(self.ranks)).wait()
        return [row.tolist() for row in outputs]

    def _group(self, channel: int) -> Any:
        return self._groups[channel % len(self._groups)]

    def _host_group(self) -> Any:
        """A group whose collectives wait for no GPU. Raises ConfigError if there is none."""
        if self._hosts is None and _has_backend(self._base, "gloo"):
            self._hosts = self._base
        if self._hosts is None and self._creates_groups:
            self._hosts = dist.new_group(backend="gloo")
        if self._hosts is None:
            raise ConfigError(
                "hosts", None, "the groups move only GPU tensors", "pass a gloo group of the same ranks"
            )
        return self._hosts


@lru_cache(maxsize=1)
def _communicator(world: Any) -> Communicator:
    """The communicator of a world; a new one if torch.distributed was initialised again."""
    return Communicator()


def _has_backend(group: Any, backend: str) -> bool:
    """True if a group has that backend, for all or for one kind of device."""
    return backend in str(dist.distributed_c10d.get_backend_config(group))


def different_plans_error(texts: Sequence[str]) -> ExecutionError:
    """The error for ranks with different plans. texts: description of each rank's plans."""
    plan_lists = by_value(dict(enumerate(texts)))
    return ExecutionError(
        f"ranks hold different plans: {plan_lists}. Give every rank its slice of the same plan"
    )
