"""Rounds over torch.distributed: the same code for gloo and NCCL.

A sparse round is one `batch_isend_irecv` among the ranks that take part; a dense one is one
`all_to_all_single` of bytes that every rank enters. Tiles go from and into contiguous rows without a copy;
other tiles are staged in contiguous buffers, on arrival until `wait`.

A channel is a process group. Every rank launches its rounds in rising order over all channels together, so
one group is enough for correctness, and on gloo for speed; on NCCL, rounds overlap where their channels are
different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apportion.ir.errors import ExecutionError
from apportion.ir.isa import ALL_TO_ALL

# Parts of a dense round start at multiples of this in the byte buffer, so that any dtype can view them.
ALIGNMENT = 16


class Tile(NamedTuple):
    """One transfer: the parts of a tile (k then v, o then lse, …) in this rank's memory, views or not."""

    send: bool
    peer: int
    parts: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]  # of each part on the wire


@dataclass
class Flight:
    """A round under way: what to wait for, buffers to keep alive, and staged arrivals with their
    destination."""

    works: list[Any] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    arrivals: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Completes the round: arrivals are in their rows, sent rows may be overwritten."""
        for work in self.works:
            work.wait()
        for rows, buffer in self.arrivals:
            rows.copy_(buffer)


class Communicator:
    """The ranks that execute plans together: rank r of a plan is rank r of the groups.

    groups: process groups of the same ranks in the same order; channel c uses `groups[c % len(groups)]`. None
    given: the default group, or a single rank where torch.distributed is not initialised. Any number of plans
    share one.
    """

    def __init__(self, *groups: Any) -> None:
        if not groups and dist.is_initialized():
            groups = (dist.group.WORLD,)
        self._groups = groups
        self.ranks: int = dist.get_world_size(groups[0]) if groups else 1
        self.rank: int = dist.get_rank(groups[0]) if groups else 0
        self._global: list[int] = dist.get_process_group_ranks(groups[0]) if groups else [0]

    @staticmethod
    def with_channels(count: int) -> Communicator:
        """All ranks of the job, on `count` groups: the default one and new ones. Every rank calls it."""
        return Communicator(dist.group.WORLD, *(dist.new_group() for _ in range(count - 1)))

    @property
    def device(self) -> torch.device:
        """Where the group's collectives want tensors."""
        nccl = bool(self._groups) and dist.get_backend(self._groups[0]) == dist.Backend.NCCL
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def agree(self, plan_id: bytes) -> None:
        """Compares the plan's id on all ranks, a collective. Raises ExecutionError on every rank where ids differ."""
        require_one_plan([bytes(row) for row in self.all_gather(list(plan_id), torch.uint8)])

    def all_gather(self, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """The numbers of every rank, equally many, a collective."""
        if self.ranks == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=dtype).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine, group=self._groups[0])
        return [row.tolist() for row in everyone]

    def launch(self, channel: int, mode: int, tiles: Sequence[Tile], device: torch.device) -> Flight:
        """Starts the round's transfers on this rank. Tensors must stay as they are until `Flight.wait`."""
        if self.ranks == 1:
            return Flight()
        group = self._groups[channel % len(self._groups)]
        if mode == ALL_TO_ALL:
            return self._all_to_all(group, tiles, device)
        return self._point_to_point(group, tiles)

    def _point_to_point(self, group: Any, tiles: Sequence[Tile]) -> Flight:
        flight = Flight()
        ops = [
            self._op(group, tile, part, dtype, flight)
            for tile in tiles
            for part, dtype in zip(tile.parts, tile.dtypes, strict=True)
        ]
        flight.works = dist.batch_isend_irecv(ops) if ops else []
        return flight

    def _op(self, group: Any, tile: Tile, part: Tensor, dtype: torch.dtype, flight: Flight) -> Any:
        peer = self._global[tile.peer]
        if tile.send:
            flight.kept.append(part.to(dtype).contiguous())
            return dist.P2POp(dist.isend, flight.kept[-1], peer, group)
        if part.is_contiguous() and part.dtype == dtype:
            return dist.P2POp(dist.irecv, part, peer, group)
        buffer = torch.empty(part.shape, dtype=dtype, device=part.device)
        flight.arrivals.append((part, buffer))
        return dist.P2POp(dist.irecv, buffer, peer, group)

    def _all_to_all(self, group: Any, tiles: Sequence[Tile], device: torch.device) -> Flight:
        out, into = (_sorted_by_peer(tiles, send) for send in (True, False))
        sizes_out, sizes_in = _bytes_of_peers(out, self.ranks), _bytes_of_peers(into, self.ranks)
        sent = torch.zeros(sum(sizes_out), dtype=torch.uint8, device=device)
        received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
        for part, place in _places(out, sent):
            place.copy_(part)
        work = dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group, async_op=True)
        return Flight([work], [sent], list(_places(into, received)))


def require_one_plan(ids: Sequence[bytes]) -> None:
    """ids: of the plan on each rank. Raises ExecutionError where they differ."""
    if len(set(ids)) == 1:
        return
    by_id = sorted((plan_id.hex()[:12], rank) for rank, plan_id in enumerate(ids))
    held = "; ".join(
        f"plan {name} on ranks {', '.join(str(rank) for _, rank in rows)}"
        for name, rows in groupby(by_id, key=lambda row: row[0])
    )
    raise ExecutionError(f"ranks hold different plans: {held}. Give every rank its slice of the same plan")


def _sorted_by_peer(tiles: Sequence[Tile], send: bool) -> list[Tile]:
    """Stable: a pair's tiles keep their order on both sides."""
    return sorted((tile for tile in tiles if tile.send == send), key=lambda tile: tile.peer)


def _aligned_bytes(part: Tensor, dtype: torch.dtype) -> int:
    return -(-part.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _bytes_of_peers(tiles: list[Tile], ranks: int) -> list[int]:
    sizes = [0] * ranks
    for tile in tiles:
        sizes[tile.peer] += sum(map(_aligned_bytes, tile.parts, tile.dtypes))
    return sizes


def _places(tiles: list[Tile], buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each part with its place in a byte buffer, viewed with its dtype on the wire and its shape."""
    pairs, start = [], 0
    for tile in tiles:
        for part, dtype in zip(tile.parts, tile.dtypes, strict=True):
            place = buffer[start : start + part.numel() * dtype.itemsize]
            pairs.append((part, place.view(dtype).view(part.shape)))
            start += _aligned_bytes(part, dtype)
    return pairs
