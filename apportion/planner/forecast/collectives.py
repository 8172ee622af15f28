"""Gradient and weight traffic of data-parallel ranks in closed form, and its overlap with the layers."""

from __future__ import annotations

from math import ceil, log2

from apportion.ir.request.cluster import Cluster


def gather_us(gathered_bytes: float, cluster: Cluster) -> float:
    """Time of an all-gather that leaves `gathered_bytes` on every rank, or of the reverse reduce-scatter.

    The longer of two concurrent phases (a node's missing bytes through its NICs, a rank's missing bytes over its own
    link), plus a latency for each doubling of nodes and of ranks in a node (as in trees).
    """
    nodes, on_node = cluster.nodes, cluster.ranks_per_node
    inter = gathered_bytes * (nodes - 1) / nodes / (cluster.inter_gbs_per_rank * on_node * 1e3)
    intra = gathered_bytes * (on_node - 1) / on_node / (cluster.intra_gbs * 1e3)
    hops = ceil(log2(nodes)) * cluster.inter_latency_us + ceil(log2(on_node)) * cluster.intra_latency_us
    return max(inter, intra) + hops


def reduce_us(reduced_bytes: float, cluster: Cluster) -> float:
    """Time of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_us(reduced_bytes, cluster)


def exposed_us(each_us: float, work_us: float, layers: float) -> float:
    """Exposed time of one transfer per layer, each hidden behind the work of the previous layer: the whole first
    transfer, and the excess of the others over this work."""
    return each_us + max(layers - 1, 0.0) * max(each_us - work_us, 0.0) if each_us else 0.0
