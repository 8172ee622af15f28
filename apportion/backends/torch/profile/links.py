"""Measures links between the ranks of a job, over gloo or NCCL.

pair      ping-pong of two ranks, one message at a time                     latency
crowd     every rank sends to all peers of its node at once, or to its       bandwidth of plans' rounds;
          counterparts on all other nodes, and receives from them            NIC count: crowd's rate / pair's
peers     one, two, four and eight peers on other nodes, even or many-to-one  incast, one_peer
posting   rounds of many short messages                                      post_us
overlap   a matrix product while a round is on the wire                      contention
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apportion.backends.torch.memory.arenas import Post
from apportion.backends.torch.profile.clock import overlapped_us, wall_us
from apportion.backends.torch.profile.peers import PatternShares, congestion, patterns
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ExecutionError
from apportion.ir.request.figures import Figure
from apportion.ir.request.hardware import MOST_CONTENTION, Hardware

MESSAGES = tuple(2**i for i in range(10, 25, 2))  # bytes, 1 KiB to 16 MiB
POSTS = (1, 4, 16, 64)  # messages each way of one round
SHORT = 64  # bytes of a message whose cost is only its posting
CPU_SIDE, CUDA_SIDE = 256, 4096  # side of the square matrix product during transfers


@dataclass(frozen=True)
class Line:
    """alpha + bytes / rate: latency in microseconds, 1e9 bytes/s."""

    latency_us: float
    gbs: float


@dataclass(frozen=True)
class Links:
    """Measured links within a node and between nodes; None if the group has no such pair. latency: a single pair's;
    gbs: with all peers at once, per rank inside a node, per NIC (of `nics`) between nodes. post_us: per message of a
    round; contention: slowdown of kernels during transfers, see `Hardware`. sweep: rates by number of peers; crowd:
    senders per receiver when inter was measured."""

    intra: Line | None
    inter: Line | None
    backend: str
    nics: int
    post_us: float
    contention: float
    sweep: tuple[PatternShares, ...] = ()
    crowd: int = 0


def profile_links(
    group: Any = None, node: int | None = None, messages: Sequence[int] = MESSAGES, runs: int = 10
) -> Links:
    """Measures the links of a group. A collective of `group` (None: the default one), which must also move CPU tensors;
    all ranks get the same numbers.

    node: the number of this rank's node, equal on all its ranks; None: from the host's name. messages: sizes in bytes
    for the ping-pong; the crowd uses the largest. runs: tries; the best one counts. Raises ExecutionError for one rank.
    """
    comm = Communicator(*([] if group is None else [group]))
    if comm.ranks < 2:
        raise ExecutionError(
            "links are measured between ranks: start two or more, as in torchrun --nproc-per-node 2"
        )
    group = dist.group.WORLD if group is None else group
    comm.start(1)
    nodes = [number for (number,) in comm.all_gather([_host() if node is None else node], "nodes of ranks")]
    job = _LinkJob(comm, group, nodes, messages, runs)
    intra, pair = job.line(same=True), job.line(same=False)
    intra_gbs, inter_gbs = job.crowd_gbs(same=True), job.crowd_gbs(same=False)
    on_node = max(map(job.nodes.count, job.nodes))
    nics, inter = 1, None
    if pair is not None and inter_gbs is not None:
        node_gbs = on_node * inter_gbs  # bandwidth beyond a single pair's comes from several NICs
        nics = min(max(round(node_gbs / pair.gbs), 1), on_node)
        inter = Line(pair.latency_us, round(node_gbs / nics, 4))
    if intra is not None and intra_gbs is not None:
        intra = replace(intra, gbs=intra_gbs)
    backend = str(dist.get_backend(group))
    sweep = () if inter is None or inter_gbs is None else job.sweep(inter_gbs, inter.gbs)
    peers = len(set(nodes)) - 1
    return Links(intra, inter, backend, nics, job.post_us(), job.contention(), sweep, peers)


def with_links(hardware: Hardware, links: Links) -> Hardware:
    """The hardware with measured links; figures that were not measured are unchanged."""
    over = f"over {links.backend}"
    pair = f"measured: ping-pong of two ranks {over}, linear fit"
    source = f"measured: all ranks to all peers at once {over}"
    changes: dict[str, Any] = {
        "post_us": Figure(links.post_us, f"measured: rounds of 1 to {POSTS[-1]} messages {over}"),
        "contention": Figure(links.contention, f"measured: matrix products during transfers {over}"),
    }
    for scope, line in (("intra", links.intra), ("inter", links.inter)):
        if line is not None:
            changes[f"{scope}_gbs"] = Figure(line.gbs, source)
            changes[f"{scope}_latency_us"] = Figure(line.latency_us, pair)
    if links.inter is not None:
        changes["nics_per_node"] = Figure(links.nics, f"{source}, divided by the rate of a single pair")
        changes |= congestion(links.sweep, links.crowd, links.backend)
        if "incast" in changes:  # the rate of a single sender, so that crowds keep their measured time
            slowdown = 1 + changes["incast"].value * min(links.crowd - 1, changes["incast_peers"].value)
            changes["inter_gbs"] = Figure(round(slowdown * links.inter.gbs, 4), f"{source}, without incast")
    return replace(hardware, **changes)


def fit(message_bytes: Sequence[int], times_us: Sequence[float]) -> Line:
    """Fits a line to one-way times by least relative squares; latency at least 0."""
    size, times = np.asarray(message_bytes, np.float64), np.asarray(times_us, np.float64)
    design = np.stack([1 / times, size / times], axis=1)
    (latency, us_per_byte), *_ = np.linalg.lstsq(design, np.ones(len(times)), rcond=None)
    if latency < 0 or us_per_byte <= 0:
        latency, us_per_byte = max(latency, 0.0), times[-1] / size[-1]
    return Line(round(float(latency), 3), round(1 / float(us_per_byte) / 1e3, 4))


@dataclass(frozen=True)
class _LinkJob:
    """The measurements of one group. nodes: the node of each rank."""

    comm: Communicator
    group: Any
    nodes: list[int]
    messages: Sequence[int]
    runs: int

    # --- a pair

    def line(self, same: bool) -> Line | None:
        """The line of the first pair of ranks on the same node, or on different nodes; None if there is no pair."""
        pairs = itertools.combinations(range(self.comm.ranks), 2)
        pair = next((pair for pair in pairs if (self.nodes[pair[0]] == self.nodes[pair[1]]) is same), None)
        if pair is None:
            return None
        times = [0.0] * len(self.messages)
        if self.comm.rank in pair:
            first = self.comm.rank == pair[0]
            peer = dist.get_global_rank(self.group, pair[1] if first else pair[0])
            times = [self._ping_pong_us(peer, first, size) for size in self.messages]
        return fit(self.messages, self._slowest(times))

    def _ping_pong_us(self, peer: int, first: bool, size: int) -> float:
        """One-way time in microseconds, the best of `runs` after a warm-up."""
        buffer = self._bytes(size)
        calls = (dist.send, dist.recv) if first else (dist.recv, dist.send)

        def round_trip() -> None:
            for call in calls:
                call(buffer, peer, group=self.group)

        return min(self._run_us(round_trip)) / 2

    # --- all peers at once

    def crowd_gbs(self, same: bool) -> float | None:
        """1e9 bytes/s that a rank sends, and receives, with all its peers at once: the others of its node, or its
        counterparts on the other nodes. Ranks without peers wait; None if no rank has any."""
        peers = self._peers(same)
        posts, size = self._posts(peers, peers), self._message_bytes(peers)
        elapsed = self._round_us(posts)
        gathered = self._gather([len(peers) * size / elapsed / 1e3 if posts else 0.0])
        rates = [rate for (rate,) in gathered if rate > 0]
        return round(min(rates), 4) if rates else None

    def _peers(self, same: bool) -> list[int]:
        rank, nodes = self.comm.rank, self.nodes
        position = [nodes[:owner].count(nodes[owner]) for owner in range(self.comm.ranks)]
        return [
            other
            for other in range(self.comm.ranks)
            if (nodes[other] == nodes[rank], position[other] == position[rank]) == (same, not same)
        ]

    def _message_bytes(self, peers: Sequence[int]) -> int:
        """The bytes per message with which the messages to all peers add up to the largest size."""
        return max(max(self.messages) // max(len(peers), 1), 1)

    def _posts(self, targets: Sequence[int], sources: Sequence[int], size: int | None = None) -> list[Post]:
        """Messages to `targets` and from `sources`, each with its own memory, in an order common to all ranks. size:
        bytes of each, by default `_message_bytes(targets)`."""
        size = self._message_bytes(targets) if size is None else size
        sides = ((True, targets), (False, sources))
        return [Post(sends, peer, self._bytes(size)) for sends, peers in sides for peer in peers]

    def _round_us(self, posts: Sequence[Post]) -> float:
        """The best time of a round in `runs` tries."""
        return min(self._run_us(lambda: self.comm.batch(0, posts).wait()))

    # --- few peers

    def sweep(self, rank_gbs: float, nic_gbs: float) -> tuple[PatternShares, ...]:
        """Rates by number of peers, as shares of the crowd's. rank_gbs, nic_gbs: the crowd's rates in 1e9 bytes/s per
        rank and per NIC; a single receiver can use a whole NIC."""
        nodes = [
            [rank for rank, owner in enumerate(self.nodes) if owner == node]
            for node in sorted(set(self.nodes))
        ]
        shares = []
        for pattern in patterns(nodes):
            part = max(self.messages) // pattern.peers
            posts = self._posts(*pattern.ends(nodes, self.comm.rank), part)
            times = self._slowest(self._run_us(lambda posts=posts: self.comm.batch(0, posts).wait()))  # type: ignore[misc]
            rate = rank_gbs if pattern.balanced else nic_gbs
            shares.append(
                PatternShares(pattern, tuple(part * pattern.peers / us / 1e3 / rate for us in times))
            )
        return tuple(shares)

    # --- posting

    def post_us(self) -> float:
        """The microseconds that one more message adds to a round: the slope of a line through the best times of many
        rounds of short sends and receives between neighbours in a ring."""
        times = []
        for count in POSTS:
            right, previous = ((self.comm.rank + step) % self.comm.ranks for step in (1, -1))
            times.append(self._round_us(self._posts([right] * count, [previous] * count, SHORT)))
        slope = np.polyfit(2 * np.array(POSTS), self._slowest(times), 1)[0]
        return round(max(float(slope), 0.0), 3)

    # --- during transfers

    def contention(self) -> float:
        """The relative slowdown of kernels during transfers to and from all peers."""
        peers = [rank for rank in range(self.comm.ranks) if rank != self.comm.rank]
        posts = self._posts(peers, peers)
        size = CUDA_SIDE if self.comm.device.type == "cuda" else CPU_SIDE
        square = torch.ones(size, size, device=self.comm.device)
        base = min(self._run_us(lambda: torch.mm(square, square)))
        # products for half the duration of the transfer, so that all of them overlap it
        count = max(int(self._round_us(posts) / 2 / base), 1)
        base, loaded = (self._products_us(square, count, messages) for messages in ([], posts))
        ratio = max(loaded / base - 1.0 for base, loaded in self._gather([base, loaded]))
        return round(min(max(ratio, 0.0), MOST_CONTENTION), 3)

    def _products_us(self, square: Tensor, count: int, posts: Sequence[Post]) -> float:
        """The best time of `count` products while the messages are in flight."""

        def work() -> None:
            for _ in range(count):
                torch.mm(square, square)

        times = []
        for _ in range(self.runs):
            self._gather([0.0])  # a barrier
            times.append(overlapped_us(lambda: self.comm.batch(0, posts), work, self.comm.device))
        return min(times)

    # --- helpers

    def _run_us(self, work: Callable[[], object]) -> list[float]:
        """The microseconds of each run, after a warm-up."""
        return [wall_us(work, self.comm.device) for _ in range(self.runs + 1)][1:]

    def _bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.comm.device)

    def _gather(self, figures: Sequence[float]) -> list[list[float]]:
        """The figures of every rank."""
        return self.comm.gather_floats(figures, "times of links")

    def _slowest(self, times: Sequence[float]) -> list[float]:
        return np.max(self._gather(times), axis=0).tolist()  # type: ignore[no-any-return]


def _host() -> int:
    return int.from_bytes(blake2b(platform.node().encode(), digest_size=7).digest(), "little")
