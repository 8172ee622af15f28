"""Gradient and weight traffic of data-parallel ranks by closed forms, and what of it hides behind the layers."""

from __future__ import annotations

from math import ceil, log2

from apportion.ir.request.cluster import Cluster


def gather_us(gathered_bytes: float, cluster: Cluster) -> float:
    """An all-gather after which every rank has so many bytes, or a reduce-scatter that begins there.

    The slower of two ways that work at once: each node gets what it lacks through its NICs, each rank what it lacks of
    that over its own link; and a latency for each doubling of nodes and of ranks in a node (as trees have)."""
    nodes, on_node = cluster.nodes, cluster.ranks_per_node
    inter = gathered_bytes * (nodes - 1) / nodes / (cluster.inter_gbs_per_rank * on_node * 1e3)
    intra = gathered_bytes * (on_node - 1) / on_node / (cluster.intra_gbs * 1e3)
    hops = ceil(log2(nodes)) * cluster.inter_latency_us + ceil(log2(on_node)) * cluster.intra_latency_us
    return max(inter, intra) + hops


def reduce_us(reduced_bytes: float, cluster: Cluster) -> float:
    """An all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_us(reduced_bytes, cluster)


def exposed_us(each_us: float, behind_us: float, layers: float) -> float:
    """Of a transfer for each of so many layers, hidden behind the work of the layer before it: that of one layer, which
    nothing hides, and of the others what is longer than the work."""
    return each_us + max(layers - 1, 0.0) * max(each_us - behind_us, 0.0) if each_us else 0.0
