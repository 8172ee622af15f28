"""What DistCA's migration moves: rows of one home against keys, as pairs.

    whole rows    a home's rows x all keys that they see: the paper's tasks (section 4)
    parts         a home's rows x the keys of one home (section 8: what its scheduler does not do)

    keys of      A     B     C
    rows of C  |     | ### | ##  |    a server that holds B computes C's rows against B's keys: it gets rows of C and
                                      sends back partial O; no key travels

Any rows of a pair may be computed anywhere (`distca.greedy`). As the paper has it, whole rows of a causal sequence are
a head and its mirror image: steps of the walk from both ends, along which work is even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints, changes, group_of, within
from apportion.ir.loops.sorting import ranked, stable_order
from apportion.planner.place.distca.balance import Ended, Limits, fill
from apportion.planner.place.distca.board import Lists, Rules, Servers
from apportion.planner.place.distca.candidates import Candidates
from apportion.planner.place.distca.greedy import book_pairs, migrate
from apportion.planner.place.distca.homes import Ranges, token_ranges
from apportion.planner.place.distca.pairs import Board, Holding, Index, Pairs, Shares, first_work
from apportion.planner.problem import exact_sums
from apportion.planner.shard.blocks import rows_of_blocks
from apportion.planner.tasks.cells import Cells, cut_columns

# Room for shares, times the number of ranks; doubled when it is used up.
ROOM = 16


@dataclass(frozen=True)
class Site:
    """One kind's bands int64 [bands, 6] over sequences at `begin` int64 [sequences + 1] tokens, which are homed in
    `homes`: blocks at `starts` int64 [blocks + 1] on the ranks `home` int64 [blocks].

    whole: tasks take all keys of their rows; folded: bool [sequences], whose rows move as heads and tails, which is for
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
        found: Ints = np.searchsorted(self.begin, self.starts[:-1], "right") - 1
        return found


@dataclass(frozen=True)
class Balance:
    """Who computes the rows of each pair; servers: loads, targets and, under caps, bytes."""

    site: Site
    pairs: Pairs
    shares: Shares
    servers: Servers
    ended: Ended

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """(low, high, rank): the global tokens of shares of whole rows, sorted."""
        count, site = int(self.shares.size[0]), self.site
        pair, low, high, at = (column[:count] for column in self.shares[:4])
        seq = site.sequence[self.pairs.q[pair]]
        offset = np.where(site.folded[seq], 0, site.begin[seq])
        return token_ranges(site.begin, site.folded, Ranges(seq, low - offset, high - offset, at))

    @property
    def cuts(self) -> Ints:
        """int64: tokens at which shares of parts begin."""
        return self.shares.low[: self.shares.size[0]]

    def ranks(self, cells: Cells) -> Ints:
        """int32 [cells]: the server of each cell of blocks that are cut at `cuts`, shares being parts."""
        count, starts = int(self.shares.size[0]), self.site.starts
        blocks, tokens = len(starts) - 1, int(starts[-1])
        share = self.pairs.q[self.shares.pair[:count]] * blocks + self.pairs.k[self.shares.pair[:count]]
        q, k = (np.searchsorted(starts, tokens, "right") - 1 for tokens in (cells.q0, cells.k0))
        names, whole = ranked(share)
        key = whole * (tokens + 1) + self.cuts
        order = stable_order(key)
        sorted_names = key[order]
        wanted = np.searchsorted(names, q * blocks + k) * (tokens + 1) + cells.q0
        found: Ints = self.shares.at[order[np.searchsorted(sorted_names, wanted, "right") - 1]]
        return found.astype(np.int32)


def balance(site: Site, limits: Limits) -> Balance:
    """Migrate pairs of one kind until the limits hold, or nothing moves that would help."""
    pairs, room = _find_pairs(site), ROOM
    while True:
        state = _begin(site, pairs, limits, room * len(site.speeds))
        ended = fill(state.board.servers, limits, state.run, state.refine)
        if ended is not None:
            return Balance(site, pairs, state.board.shares, state.board.servers, ended)
        room *= 2


@dataclass
class _Cutting:
    """What the passes change; rows: that cuts are multiples of."""

    board: Board
    rows: int

    def run(self, rules: Rules, order: Ints) -> tuple[int, int, int]:
        return migrate(self.board, rules._replace(grain=self.rows), order, self._candidates(rules))

    def _candidates(self, rules: Rules) -> Candidates:
        """Shares of surplus servers by the E that they have as a whole where nothing is there yet, which no part
        exceeds by much. Largest first."""
        servers, shares, pairs = self.board.servers, self.board.shares, self.board.pairs
        surplus = servers.load > (1 + rules.excess) * servers.target
        count = int(shares.size[0])
        share = np.flatnonzero(surplus[shares.at[:count]] & (shares.work[:count] > 0))
        pair = shares.pair[share]
        keys = pairs.starts[pairs.k_end[pair]] - pairs.starts[pairs.k[pair]]
        rows = (shares.high[share] - shares.low[share]) / np.where(pairs.length[pair] > 0, 2, 1)
        most_e = shares.work[share] / np.maximum(rows * rules.priced_q + keys * rules.kv_bytes, 1)
        order, place = np.argsort(-most_e, kind="stable"), np.full(len(shares.pair), -1, np.int64)
        place[share[order]] = np.arange(len(order))
        work, once, a_pair = np.zeros((3, len(order)))
        return Candidates(share[order], most_e[order], work, once, a_pair, place, np.full(1, -1, np.int64))

    def refine(self) -> bool:
        """Halve what cuts are multiples of; False where it is a single row already."""
        if self.rows == 1:
            return False
        self.rows //= 2
        return True


def _begin(site: Site, pairs: Pairs, limits: Limits, room: int) -> _Cutting:
    home, speeds = site.home, site.speeds
    count, blocks, ranks = len(pairs.q), len(home), len(speeds)
    shares = Shares(*[*np.zeros((5, count + room), np.int64), np.array([count])])
    shares.pair[:count] = np.arange(count)
    folded, cell = pairs.length > 0, pairs.first[:-1]
    shares.low[:count] = np.where(folded, pairs.q0[cell], site.starts[pairs.q])
    shares.high[:count] = np.where(folded, pairs.q1[cell], site.starts[pairs.q + 1])
    shares.at[:count] = home[pairs.q]
    first_work(pairs, shares)
    load = exact_sums(shares.at[:count], shares.work[:count], ranks)
    servers = Servers(load, load.sum() / speeds.sum() * speeds, *np.zeros((3, ranks), np.int64))
    lists = _lists(shares.at[:count], ranks, count + 2 * room)
    holding, other = (Holding(*[*np.zeros((6, blocks), np.int64), np.zeros(2, np.int64)]) for _ in range(2))
    index = _find_index(pairs, home, ranks)
    board = Board(pairs, shares, lists, servers, index, home, site.begin[site.sequence], holding, other)
    if limits.rules.capped:
        book_pairs(board, limits.rules)
    return _Cutting(board, limits.granularity)


def _find_index(pairs: Pairs, home: Ints, ranks: int) -> Index:
    blocks, counts = np.arange(len(home) + 1), pairs.k_end - pairs.k
    pair = group_of(counts)
    k = within(counts) + pairs.k[pair]
    by_k, by_home = np.argsort(k, kind="stable"), np.argsort(home, kind="stable")
    of_k, of_home = np.searchsorted(k[by_k], blocks), np.searchsorted(home[by_home], np.arange(ranks + 1))
    return Index(np.searchsorted(pairs.q, blocks), pair[by_k], of_k, by_home, of_home)


def _lists(at: Ints, ranks: int, room: int) -> Lists:
    """Items 0, 1, ... on the servers `at`, int64 [items]."""
    count, order = len(at), np.argsort(at, kind="stable")
    first, item, after = np.full(ranks, -1, np.int64), np.zeros(room, np.int64), np.full(room, -1, np.int64)
    item[:count] = order
    after[: max(count - 1, 0)] = np.arange(1, count)
    begin = np.searchsorted(at[order], np.arange(ranks + 1))
    filled = np.flatnonzero(np.diff(begin))
    first[filled] = begin[filled]
    after[begin[filled + 1] - 1] = -1
    return Lists(first, item, after, np.array([count, count]))


def _find_pairs(site: Site) -> Pairs:
    """Columns are q, q0, q1, k0, k1, dmin, dmax and the length of a sequence whose rows are steps."""
    columns = _cells(site)
    columns = columns[:, ~site.folded[site.sequence[columns[0]]]]
    columns = np.concatenate([np.append(columns, np.zeros_like(columns[:1]), axis=0), _walks(site)], axis=1)
    k, k_last = (np.searchsorted(site.starts, keys, "right") - 1 for keys in (columns[3], columns[4] - 1))
    by_key = np.zeros_like(k) if site.whole else k
    order = stable_order(columns[0] * len(site.starts) + by_key)
    (q, q0, q1, k0, k1, dmin, dmax, length), by_key = columns[:, order], by_key[order]
    new = changes(q, by_key)
    first = np.flatnonzero(new)
    hull = np.minimum.reduceat(k[order], first), np.maximum.reduceat(k_last[order], first) + 1
    return Pairs(
        q[first], *hull, length[first], site.starts, np.append(first, len(q)), q0, q1, k0, k1, dmin, dmax
    )


def _cells(site: Site) -> Ints:
    """int64 [7, cells]: bands cut by query block and, for parts, by key block."""
    if not site.whole:
        q, _, q0, q1, k0, k1, dmin, dmax = cut_columns(site.bands, site.starts).astype(np.int64)
        return np.stack([q, q0, q1, k0, k1, dmin + q0 - k0, dmax + q0 - k0])
    block, part = rows_of_blocks(site.bands, site.starts)
    q0, q1, k0, k1, dmin, dmax = part.T
    k0, k1 = np.maximum(k0, q0 - dmax), np.minimum(k1, q1 - dmin)
    some = np.flatnonzero((q0 < q1) & (k0 < k1))
    return np.stack([block, q0, q1, k0, k1, dmin, dmax])[:, some]


def _walks(site: Site) -> Ints:
    """int64 [8, ranges]: homes of sequences that are walked from both ends, each named by its first block."""
    homes = site.homes.take(np.flatnonzero(site.folded[site.homes.seq]))
    begin, end = site.begin[homes.seq], site.begin[homes.seq + 1]
    head, tail = begin + (homes.a + 1) // 2, end - homes.b // 2
    block = np.searchsorted(site.starts, np.where(head < begin + (homes.b + 1) // 2, head, tail), "right") - 1
    none = np.zeros_like(begin)
    return np.stack([block, homes.a, homes.b, begin, end, none, none, end - begin])
