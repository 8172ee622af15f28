"""Migration units of DistCA, called pairs: rows of one home against a set of keys.

    whole rows    a home's rows x all keys that they see: the paper's tasks (section 4)
    parts         a home's rows x the keys of one home (section 8: beyond the paper's scheduler)

    keys of      A     B     C
    rows of C  |     | ### | ##  |    a server that holds B computes C's rows against B's keys: it gets rows of C and
                                      sends back partial O; no key travels

Any rows of a pair may be computed anywhere (`core/planner/distca.cpp`). With `form: paper`, whole rows of a causal
sequence move as a head and its mirror image: steps of the walk from both ends, with constant work per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion._core import distca as core
from apportion.ir.arrays import Bools, Floats, Ints, changes
from apportion.ir.orders import stable_order, unique_inverse
from apportion.planner.place.distca.homes import Ranges, token_ranges
from apportion.planner.shard.blocks import rows_of_blocks
from apportion.planner.tasks.cells import Cells, cut_columns


class Limits(NamedTuple):
    """Limits of the migration, mostly parameters of `Distca`. granularity: rows; spare: fraction of a target by which a
    part may exceed the requested work; priced_q: bytes of a query row in the price of a move. Sizes are bytes per row;
    caps are bytes of a rank, active if `capped`."""

    tolerance: float
    two_sided: bool
    granularity: int
    spare: float
    threshold: float
    q_bytes: int
    o_bytes: int
    kv_bytes: int
    priced_q: int
    kv_free: bool
    capped: bool
    send_cap: int
    receive_cap: int
    buffer_cap: int


class Pairs(NamedTuple):
    """Rows of one block against keys of blocks [k, k_end), sorted by (q, k): int64 [pairs]; their cells are [first[i],
    first[i + 1]) of the columns q0, q1, k0, k1, dmin, dmax, int64 [cells], diagonals in global tokens.

    length: int64 [pairs], the sequence's length if rows are steps of a walk from both ends (see `distca.homes`), with
    one cell of [q0, q1) steps and [k0, k1) tokens; otherwise 0. starts: int64 [blocks + 1] tokens.
    """

    q: Ints
    k: Ints
    k_end: Ints
    length: Ints
    starts: Ints
    first: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    dmin: Ints
    dmax: Ints


class Shares(NamedTuple):
    """Rows [low, high) of a pair and the server that computes them: int64 [shares]."""

    pair: Ints
    low: Ints
    high: Ints
    server: Ints


class Servers(NamedTuple):
    """Loads of servers. load: int64 [ranks] pairs; sent, received, held: int64 [ranks] bytes, 0 without caps."""

    load: Ints
    sent: Ints
    received: Ints
    held: Ints


class MigrationSummary(NamedTuple):
    """Outcome of a migration. forbidden: moves that caps prevented in the last pass; below: servers left below
    target since no move has `threshold` pairs per byte; imbalance: load of the busiest server over its target, less 1;
    granularity: row multiple of the last pass's cuts."""

    passes: int
    moves: int
    forbidden: int
    below: int
    imbalance: float
    granularity: int


@dataclass(frozen=True)
class Site:
    """One kind's mask and the tokens' homes. bands: int64 [bands, 6]; begin: int64 [sequences + 1], first tokens;
    homes: as ranges of walks; the same homes as blocks: starts: int64 [blocks + 1], home: int64 [blocks], their ranks.

    whole: tasks take all keys of their rows; folded: bool [sequences], True if rows move as heads and tails, only for
    whole rows; speeds: float64 [ranks].
    """

    bands: Ints
    begin: Ints
    homes: Ranges
    starts: Ints
    home: Ints
    whole: bool
    folded: Bools
    speeds: Floats

    @property
    def sequence(self) -> Ints:
        """int64 [blocks]: the sequence of each block."""
        result: Ints = np.searchsorted(self.begin, self.starts[:-1], "right") - 1
        return result


@dataclass(frozen=True)
class Balance:
    """The server of each row range of every pair."""

    site: Site
    pairs: Pairs
    shares: Shares
    servers: Servers
    summary: MigrationSummary

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """(low, high, rank): the global tokens of whole-row shares, sorted."""
        site, (pair, low, high, server) = self.site, self.shares
        seq = site.sequence[self.pairs.q[pair]]
        offset = np.where(site.folded[seq], 0, site.begin[seq])
        return token_ranges(site.begin, site.folded, Ranges(seq, low - offset, high - offset, server))

    @property
    def cuts(self) -> Ints:
        """int64: tokens at which shares of parts begin."""
        return self.shares.low

    def ranks(self, cells: Cells) -> Ints:
        """int32 [cells]: the server of each cell of blocks cut at `cuts`, if parts moved, not whole rows."""
        starts = self.site.starts
        blocks, tokens = len(starts) - 1, int(starts[-1])
        share = self.pairs.q[self.shares.pair] * blocks + self.pairs.k[self.shares.pair]
        q, k = (np.searchsorted(starts, tokens, "right") - 1 for tokens in (cells.q0, cells.k0))
        distinct, share_number = unique_inverse(share)
        key = share_number * (tokens + 1) + self.cuts
        order = stable_order(key)
        sorted_keys = key[order]
        cell_keys = np.searchsorted(distinct, q * blocks + k) * (tokens + 1) + cells.q0
        result: Ints = self.shares.server[order[np.searchsorted(sorted_keys, cell_keys, "right") - 1]]
        return result.astype(np.int32)


def balance(site: Site, limits: Limits, exhaustive: bool = False) -> Balance:
    """Migrates pairs of one kind until the limits hold, or no move helps. exhaustive: also compares shares that cannot
    be the best (for tests)."""
    pairs, origin = _find_pairs(site), site.begin[site.sequence]
    speed = float(site.speeds.sum())
    shares, servers, summary = core.migrate(pairs, site.home, origin, site.speeds, speed, limits, exhaustive)
    return Balance(site, pairs, Shares(*shares[:4]), Servers(*servers), MigrationSummary(*summary))


def _find_pairs(site: Site) -> Pairs:
    """Builds the pairs from the bands' cells and, for sequences walked from both ends, from ranges of steps."""
    columns = _cells(site)
    columns = columns[:, ~site.folded[site.sequence[columns[0]]]]
    columns = np.concatenate([np.append(columns, np.zeros_like(columns[:1]), axis=0), _walks(site)], axis=1)
    k, k_last = (np.searchsorted(site.starts, keys, "right") - 1 for keys in (columns[3], columns[4] - 1))
    by_key = np.zeros_like(k) if site.whole else k
    order = stable_order(columns[0] * len(site.starts) + by_key)
    (q, q0, q1, k0, k1, dmin, dmax, length), by_key = columns.take(order, 1), by_key[order]
    is_first = changes(q, by_key)
    first = np.flatnonzero(is_first)
    hull = np.minimum.reduceat(k[order], first), np.maximum.reduceat(k_last[order], first) + 1
    return Pairs(
        q[first], *hull, length[first], site.starts, np.append(first, len(q)), q0, q1, k0, k1, dmin, dmax
    )


def _cells(site: Site) -> Ints:
    """int64 [7, cells], (block, q0, q1, k0, k1, dmin, dmax): bands cut by query block and, for parts, by key block."""
    if not site.whole:
        q, _, q0, q1, k0, k1, dmin, dmax = cut_columns(site.bands, site.starts).astype(np.int64)
        return np.stack([q, q0, q1, k0, k1, dmin + q0 - k0, dmax + q0 - k0])
    block, part = rows_of_blocks(site.bands, site.starts)
    q0, q1, k0, k1, dmin, dmax = part.T
    k0, k1 = np.maximum(k0, q0 - dmax), np.minimum(k1, q1 - dmin)
    nonempty = np.flatnonzero((q0 < q1) & (k0 < k1))
    return np.stack([block, q0, q1, k0, k1, dmin, dmax])[:, nonempty]


def _walks(site: Site) -> Ints:
    """int64 [8, ranges], `_cells`' columns and the sequence's length: homes of folded sequences; block: their first."""
    homes = site.homes.take(np.flatnonzero(site.folded[site.homes.seq]))
    begin, end = site.begin[homes.seq], site.begin[homes.seq + 1]
    head, tail = begin + (homes.a + 1) // 2, end - homes.b // 2
    block = np.searchsorted(site.starts, np.where(head < begin + (homes.b + 1) // 2, head, tail), "right") - 1
    unused = np.zeros_like(begin)
    return np.stack([block, homes.a, homes.b, begin, end, unused, unused, end - begin])
