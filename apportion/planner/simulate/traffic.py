"""What moves: every send with its receive, and the ports that it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion._core import traffic as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import VerifyError
from apportion.ir.request.cluster import Cluster
from apportion.planner.simulate.program import Traffic, View

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
    mate = view.met(np.zeros(len(view.operands.rows), np.int64)).mate
    if (mate < 0).any():
        raise VerifyError(_unmatched(view))
    return Traffic(*core.meet(view.tiles, mate, view.ranks, _links(view.cluster), post_us))


def _unmatched(view: View) -> str:
    """The first transfer that only one side lists, in the order of `Traffic`."""
    tiles, sends = view.tiles, view.tiles.send == 1
    own, peer = tiles.rank[tiles.launch], tiles.peer.astype(np.int64)
    senders, behind = np.where(sends, own, peer), np.where(sends, peer - own, own - peer) % view.ranks
    key = (tiles.round[tiles.launch] * view.ranks + behind) * view.ranks + senders
    out, into = key[sends], key[~sends]
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


def port_count(cluster: Cluster) -> int:
    return 2 * (cluster.ranks + cluster.nodes * cluster.nics_per_node)
