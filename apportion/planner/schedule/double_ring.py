"""A ring of rings: tiles go around the ranks of a window, and from window to window (LoongTrain, Gu et al., 2024).

    window 0        window 1        window 2
    0 ─► 1 ─► 2     3 ─► 4 ─► 5     6 ─► 7 ─► 8       the inner rings: one hop per round
    └───────────────┴───────────────┘                 the outer ring: one hop per turn of the inner rings

The tile of rank 0 reaches rank 3 while it goes around 1 and 2, and tiles of 1 and 2 reach 4 and 5: all ranks of a
window send to the next window at once, whereas in a single ring only one of them does in each round. Gradients are
summed around the inner ring of a window; the sum is added to the next window's at the end of its ring, and the last sum
goes home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar, Literal

import numpy as np

from apportion.ir.arrays import Bools, Ints, group_of
from apportion.ir.errors import ConfigError
from apportion.planner.problem import Departure
from apportion.planner.route.rings import Over, Rings, on_rings
from apportion.planner.route.routes import RoutePass, Routes, Site
from apportion.planner.tasks.tasks import Edges, hulls


@dataclass(frozen=True, kw_only=True)
class WindowRoutes(Routes):
    """Routes over inner and outer rings. hop: int32 [edges], position of each edge's destination in the ring, counted
    from home. between: bool [edges], True for edges from another window; back: bool [edges], True if the tile's
    gradients continue to another window."""

    hop: Ints
    between: Bools
    back: Bools


@dataclass(frozen=True)
class DoubleRing(RoutePass):
    """over: "ranks" or "holders", see the ring route. window: ranks of an inner ring; "node": the largest number that
    divides the ranks of the ring and those of a node. Rings with at most a window's ranks are single rings. Raises
    ConfigError if a window does not divide the ranks of a larger ring."""

    over: Over
    window: int | Literal["node"]
    rings: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        """True if tiles must be blocks, because rings depend on the block's sequences."""
        return self.over == "holders"

    def __call__(self, edges: Edges, site: Site) -> WindowRoutes:
        tile, rings = on_rings(edges, site, self.over)
        sizes, per_node = rings.sizes, site.cluster.ranks_per_node
        windows = np.array([self._window(size, per_node) for size in sizes.tolist()])
        if not len(edges):
            empty = np.zeros(0, np.int32)
            return WindowRoutes(
                edges, empty, True, empty, onward=empty, hop=empty, between=empty > 0, back=empty > 0
            )
        routes, narrow = _spread(edges, tile, rings, windows), windows[sizes > windows].min(initial=per_node)
        if self.window != "node" or narrow == per_node:
            return routes
        departure = Departure(
            "recipe.schedule.ring.window", per_node, int(narrow), "no larger number divides all rings"
        )
        return replace(routes, departures=(departure,))

    def _window(self, size: int, ranks_per_node: int) -> int:
        """Number of ranks of an inner ring for a ring of `size` ranks; all of them for a single ring."""
        window = gcd(size, ranks_per_node) if self.window == "node" else self.window
        if size % window and (size > window or self.over == "ranks"):
            rule = f"must divide the {size} ranks of the ring"
            remedy = f"use {gcd(size, window)}, or node"
            raise ConfigError("recipe.schedule.ring.window", window, rule, remedy)
        return size if window == 1 else min(window, size)


def _spread(edges: Edges, tile: Ints, rings: Rings, windows: Ints) -> WindowRoutes:
    """The paths of the tiles; tile: [edges] of the star; windows: [rings], ranks of their inner rings.

    Edges are sorted by tile and window: first the edge into the window, then those around it.
    """
    ids, first, group = np.unique(tile, return_index=True, return_inverse=True)
    home, ring, flat = edges.home[first], rings.of[first], rings.flat
    low, high = hulls(group, edges.row, edges.row + edges.rows, len(ids))
    base, size, window = rings.first[ring], rings.sizes[ring], windows[ring]
    ranks = int(flat.max()) + 1
    members = group_of(rings.sizes) * ranks + flat  # ascending
    start = np.searchsorted(members, ring * ranks + home) - base
    position = np.searchsorted(members, ring[group] * ranks + edges.dst) - base[group]
    # windows, and places in a window, relative to home
    window_number = (position // window[group] - start[group] // window[group]) % (size // window)[group]
    offset = (position - start[group]) % window[group]
    window_count = int((size // window).max())
    last, last_offset = np.zeros(len(ids), np.int64), np.zeros((len(ids), window_count), np.int64)
    np.maximum.at(last, group, window_number)
    np.maximum.at(last_offset, (group, window_number), offset)

    count = np.where(np.arange(window_count) <= last[:, None], last_offset + (np.arange(window_count) > 0), 0)
    begin = (np.cumsum(count) - count.ravel()).reshape(count.shape)
    item, window_of = (np.repeat(index.ravel(), count.ravel()) for index in np.indices(count.shape))
    number = np.arange(len(item))
    # places after the tile's entry into the window, which is home in the home window
    step = number - begin[item, window_of] + (window_of == 0)
    is_between = step == 0
    entry = begin[item, window_of - 1]  # from the previous window, which the tile enters by its first edge
    parent = np.where(is_between, np.where(window_of == 1, -1, entry), number - 1)
    parent[(window_of == 0) & (step == 1)] = -1

    size_of, width = size[item], window[item]
    window_start = (start // window * window)[item]  # of the home window
    target = (window_start + window_of * width) % size_of + (start[item] + step) % width
    dst = flat[base[item] + target]
    src = np.where(parent < 0, home[item], dst[parent])
    columns = (ids[item], home[item], low[item], (high - low)[item], src, dst, parent, np.zeros_like(item))
    tile_edges = Edges(*(column.astype(np.int32) for column in columns))

    last_edge = begin + count - 1
    next_last = np.append(last_edge, np.zeros((len(ids), 1), np.int64), axis=1)[item, window_of + 1]
    is_back = (number == last_edge[item, window_of]) & (window_of < last[item])
    onward = np.where(is_back, next_last, np.where(number < last_edge[item, window_of], number + 1, -1))
    arrives = begin[group, window_number] + offset - (window_number == 0)
    return WindowRoutes(
        tile_edges,
        arrives.astype(np.int32),
        carry=True,
        ring=size_of.astype(np.int32),
        onward=onward.astype(np.int32),
        hop=(window_of * width + step).astype(np.int32),
        between=is_between,
        back=is_back,
    )
