"""Hypergraphs as columns for the compiled core."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, group_of, offsets
from apportion.ir.orders import sort_order


class Graph(NamedTuple):
    """ptr, pins: the vertices of each hyperedge as CSR; price: int64 [E]; of_ptr, of: the hyperedges of each vertex."""

    ptr: Ints
    pins: Ints
    price: Ints
    of_ptr: Ints
    of: Ints


def graph_of(ptr: Ints, pins: Ints, price: Ints, vertices: int) -> Graph:
    """Builds a Graph from hyperedges in CSR form."""
    of = group_of(np.diff(ptr))[sort_order(pins, vertices)]
    return Graph(ptr, pins, price, offsets(np.bincount(pins, minlength=vertices)), of)
