"""Hypergraphs as columns for the compiled core."""

from __future__ import annotations

from typing import NamedTuple

from apportion._core import hypergraph as core
from apportion.ir.arrays import Ints


class Graph(NamedTuple):
    """ptr, pins: the vertices of each hyperedge as CSR; price: int64 [E]; of_ptr, of: the hyperedges of each vertex."""

    ptr: Ints
    pins: Ints
    price: Ints
    of_ptr: Ints
    of: Ints


def graph_of(ptr: Ints, pins: Ints, price: Ints, vertices: int) -> Graph:
    """Builds a Graph from hyperedges in CSR form."""
    return Graph(ptr, pins, price, *core.incidence((ptr, pins, price), vertices))
