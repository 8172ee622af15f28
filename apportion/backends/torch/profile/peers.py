"""Rates between nodes by pattern of senders and receivers: the patterns, and the figures derived from their times.

    balanced       every rank sends to k ranks on the next k nodes, and receives from k on those before
    many-to-one    k ranks on k nodes send to one rank of another node

Both connect ranks of the same local index (rail-aligned), as plans prefer. A rank's bytes are the same for every k.
Rates are relative to the crowd of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.ir.request.figures import LEAST, Figure

PEERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Pattern:
    """A pattern of transfers. peers: the k of the patterns above; balanced: False for many-to-one."""

    peers: int
    balanced: bool

    def ends(self, nodes: Sequence[Sequence[int]], rank: int) -> tuple[list[int], list[int]]:
        """(to, from): the ranks that a rank sends to and receives from. nodes: the ranks of each node, equally many."""
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        index, count, steps = nodes[node].index(rank), len(nodes), range(1, self.peers + 1)
        if self.balanced:
            targets, sources = (
                [nodes[(node + sign * step) % count][index] for step in steps] for sign in (1, -1)
            )
            return targets, sources
        senders = [nodes[step][0] for step in steps]
        receiver = nodes[0][0]
        return [receiver] if rank in senders else [], senders if rank == receiver else []


@dataclass(frozen=True)
class PatternShares:
    """A measured pattern. shares: for each run, a receiver's rate relative to the crowd's."""

    pattern: Pattern
    shares: tuple[float, ...]


def patterns(nodes: Sequence[Sequence[int]]) -> list[Pattern]:
    """All patterns that the ranks allow; none if nodes differ in size."""
    if len(nodes) < 2 or len({len(ranks) for ranks in nodes}) > 1:
        return []
    counts = [peers for peers in PEERS if peers < len(nodes)]
    return [Pattern(peers, balanced) for balanced in (True, False) for peers in counts]


def congestion(sweep: Sequence[PatternShares], crowd: int, backend: str) -> dict[str, Figure]:
    """The figures `incast`, `incast_peers` and `one_peer` that follow from the sweep, with the range over runs. crowd:
    the number of senders per receiver in the crowds."""
    unbalanced = _by_peers(sweep, balanced=False)
    figures: dict[str, Figure] = {}
    if len([peers for peers in unbalanced if peers > 1]) > 1:
        runs = zip(*unbalanced.values(), strict=False)
        slopes = [_slope(dict(zip(unbalanced, shares, strict=True))) for shares in runs]
        peer_counts = ", ".join(map(str, unbalanced))
        source = f"measured: one rank receives from {peer_counts} over {backend}, linear fit"
        figures["incast"] = _figure(slopes, source, 0.0, 10.0)
        figures["incast_peers"] = Figure(max(unbalanced) - 1, source)
    single = _by_peers(sweep, balanced=True).get(1)
    if single is not None and crowd > 1:
        incast = figures["incast"].value if figures else 0.0
        limit = figures["incast_peers"].value if figures else 0.0
        # relative to one sender in a crowd without congestion
        base = 1 + incast * min(crowd - 1, limit)
        source = f"measured: pairs of ranks over {backend}, relative to all ranks to all peers"
        figures["one_peer"] = _figure([share / base for share in single], source, LEAST, 1.0)
    return figures


def _by_peers(sweep: Sequence[PatternShares], balanced: bool) -> dict[int, tuple[float, ...]]:
    """Peers -> shares."""
    return {entry.pattern.peers: entry.shares for entry in sweep if entry.pattern.balanced == balanced}


def _slope(shares: dict[int, float]) -> float:
    """The relative extra time per byte of each additional sender: 1 / share is linear in their number."""
    additional = np.array([peers - 1 for peers in shares if peers > 1])
    slope, base = np.polyfit(additional, [1 / shares[peers] for peers in shares if peers > 1], 1)
    return float(slope / base) if base > 0 else 0.0


def _figure(runs: Sequence[float], source: str, lower: float, upper: float) -> Figure:
    """The median of the runs."""
    clipped = np.clip(runs, lower, upper).round(3)
    low, value, high = clipped.min(), np.median(clipped), clipped.max()
    return Figure(float(value), source, interval=(float(low), float(high)))
