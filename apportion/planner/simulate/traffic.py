"""What moves: every send with its receive, and the ports that it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import VerifyError
from apportion.ir.loops.jit import jit
from apportion.ir.loops.sorting import stable_order
from apportion.ir.request.cluster import Cluster
from apportion.planner.simulate.program import Tiles, Traffic, View

#: bytes that 1 GB/s moves in a microsecond
BYTES_PER_US = 1e3


class _Links(NamedTuple):
    """The cluster as the loop reads it. node: int64 [ranks]; out, into: int64 [2, ranks], ports within the node and to
    other nodes; rate, latency_us: float64 [2], bytes a microsecond and microseconds, likewise."""

    node: Ints
    out: Ints
    into: Ints
    rate: Floats
    latency_us: Floats


def find_traffic(view: View, post_us: Floats) -> Traffic:
    """The k-th send i -> j of a round meets the k-th receive of j from i.

    post_us: float64 [launches], what posting a launch's messages takes: added to the latency of its transfers, where
    sender and receiver differ the larger. Raises VerifyError where one has no counterpart.
    """
    tiles = view.tiles
    key = _keys(tiles, view.ranks)
    mate = view.met(np.zeros(len(view.operands.rows), np.int64)).mate
    if (mate < 0).any():
        raise VerifyError(_unmatched(view, *(key[tiles.send == side] for side in (1, 0))))
    sends = np.flatnonzero(tiles.send)
    out = sends[stable_order(key[sends])]
    return _met(out, mate[out], tiles, _links(view.cluster), post_us)


@jit
def _keys(tiles: Tiles, ranks: int) -> Ints:
    """int64 [transfers]: by round, by how far the receiver is behind the sender in the circle of ranks, by sender."""
    key = np.empty(len(tiles.send), np.int64)
    for tile in range(len(tiles.send)):
        launch, peer = tiles.launch[tile], tiles.peer[tile]
        own, sends = tiles.rank[launch], tiles.send[tile] == 1
        source, shift = (own, peer - own) if sends else (peer, own - peer)
        if shift < 0:
            shift += ranks
        key[tile] = (tiles.round[launch] * ranks + shift) * ranks + source
    return key


def _unmatched(view: View, out: Ints, into: Ints) -> str:
    """The first transfer that only one side lists; out, into: the keys of sends and of receives."""
    keys = np.unique(np.concatenate([out, into]))
    counts = [np.bincount(np.searchsorted(keys, side), minlength=len(keys)) for side in (out, into)]
    first = int(np.flatnonzero(counts[0] != counts[1])[0])
    rest, source = divmod(int(keys[first]), view.ranks)
    round_, shift = divmod(rest, view.ranks)
    sent, received = (int(count[first]) for count in counts)
    return (
        f"{view.phase}, round {round_}: rank {source} sends {sent} tiles to rank {(source + shift) % view.ranks}, "
        f"which receives {received}: such a plan cannot run; verify it"
    )


def _links(cluster: Cluster) -> _Links:
    """Ranks of a node share its NICs evenly, neighbours together."""
    rank, nics = np.arange(cluster.ranks), cluster.nodes * cluster.nics_per_node
    node, local = np.divmod(rank, cluster.ranks_per_node)
    nic = node * cluster.nics_per_node + local * cluster.nics_per_node // cluster.ranks_per_node
    return _Links(
        node,
        np.stack([rank, 2 * cluster.ranks + nic]),
        np.stack([cluster.ranks + rank, 2 * cluster.ranks + nics + nic]),
        np.array([cluster.intra_gbs, cluster.inter_gbs]) * BYTES_PER_US,
        np.array([cluster.intra_latency_us, cluster.inter_latency_us], np.float64),
    )


@jit
def _met(out: Ints, into: Ints, tiles: Tiles, links: _Links, post_us: Floats) -> Traffic:
    """The transfers of sends with their receives."""
    whole, us = np.empty((6, len(out)), np.int64), np.empty((2, len(out)))
    for i in range(len(out)):
        sender, receiver = tiles.launch[out[i]], tiles.launch[into[i]]
        source, target = tiles.rank[sender], tiles.rank[receiver]
        operand = tiles.first[sender] + tiles.operand[out[i]]
        far = int(links.node[source] != links.node[target])
        whole[0, i], whole[1, i] = sender, receiver
        whole[2, i], whole[3, i] = links.out[far, source], links.into[far, target]
        size = tiles.wire[int(tiles.results[sender] > 0), operand]
        us[0, i] = size / links.rate[far]
        us[1, i] = links.latency_us[far] + max(post_us[sender], post_us[receiver])
        whole[4, i], whole[5, i] = size, tiles.tensor[operand]
    return Traffic(whole[0], whole[1], whole[2], whole[3], us[0], us[1], whole[4], whole[5])


def port_count(cluster: Cluster) -> int:
    return 2 * (cluster.ranks + cluster.nodes * cluster.nics_per_node)
