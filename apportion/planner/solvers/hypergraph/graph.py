"""Hypergraphs as columns for the compiled core."""

from __future__ import annotations

from typing import NamedTuple

from apportion._core import hypergraph as core
from apportion.ir.arrays import Ints


class Graph(NamedTuple):
    """ptr, pins: the vertices of each hyperedge as CSR; of_ptr, of: the hyperedges of each vertex; price: int64 [E]."""

    ptr: Ints
    pins: Ints
    of_ptr: Ints
    of: Ints
    price: Ints


def graph_of(ptr: Ints, pins: Ints, price: Ints, vertices: int) -> Graph:
    """Builds a Graph from hyperedges in CSR form."""
    return Graph(ptr, pins, *core.incidence(ptr, pins, vertices), price)
