"""What ranks of the pool do to measure links: plain data in and out."""

from dataclasses import astuple

from apportion.backends.torch.profile import profile_links


def links(comm, sizes, node):
    """latency, bandwidth, inter, backend and ranks of a node."""
    found = profile_links(comm._groups[0], node, sizes, runs=2)
    return (*astuple(found.intra), found.inter, found.backend, found.ranks_per_node)


def both_links(comm, sizes, node):
    found = profile_links(comm._groups[0], node, sizes, runs=2)
    return found.intra and astuple(found.intra), found.inter and astuple(found.inter), found.ranks_per_node
