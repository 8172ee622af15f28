"""Balances tokens for the linear layers: rows move to an evenly filled layout and back (Zeppelin, 3.4).

    attention layout     |aaaaaaaa|bb|ccc|       balances attention
    linear layout        |aaaa|aabb|aacc|        the mean on every rank: surplus rows (a rank's last ones) go where
                                                 rows are missing, after the existing ones

A layer takes two moves forward and two backward: attention outputs go to the output projection and the feed-forward
layers, which run in this layout; hidden states return to the projections of Q, K and V.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.plan.moves import Feed, move_table
from apportion.ir.plan.tables import Layout, Move, Table
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner.problem import Pass, Problem
from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.use import TransportSolver

#: name of the evenly filled layout
LINEAR = "linear"
_OBJECTIVES: Mapping[str, Literal["senders", "minmax", "sum"]] = {
    "paper": "senders",
    "two_sided": "minmax",
    "sum": "sum",
}
#: a layer's forward, and its backward with twice the work
_PASSES_OF_LINEAR = 3


@dataclass(frozen=True)
class Remapping:
    """The report entry of a remap, and, if it is used, the linear layout and the move to it."""

    entry: Mapping[str, Any]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()


class RemapPass(Pass, Protocol):
    """Provides a separate layout for the layers after attention. source: the layout of home rows."""

    @abstractmethod
    def __call__(self, problem: Problem, source: Layout) -> Remapping: ...


@dataclass(frozen=True)
class Flow(RemapPass):
    """Moves surplus rows to ranks that lack rows, by formula (2) of Zeppelin's paper.

    objective: "paper": the largest sending cost of a rank, as printed; "two_sided": the largest sending or receiving
    cost; "sum": the total. when: "pays": only if the predicted gain of a layer's linear operations exceeds the time of
    its moves; "always". solver: of kind transport. Raises ConfigError.
    """

    objective: Literal["paper", "two_sided", "sum"] = "two_sided"
    when: Literal["pays", "always"] = "pays"
    solver: TransportSolver = TransportSolver("flow")

    def __call__(self, problem: Problem, source: Layout) -> Remapping:
        """Computes the even layout and the move from `source`, the layout of home rows."""
        tokens = source.rows_per_rank.astype(np.int64)
        even, costs = even_tokens(tokens), row_costs(problem.cluster, _row_bytes(problem.model)[1])
        flows = self.solver(TransportProblem(tokens - even, costs, _OBJECTIVES[self.objective]))
        predictions = self._predictions(problem, source, tokens, even, flows)
        if not predictions["used"]:
            return Remapping(predictions)
        pieces = _pieces(tokens, even, flows)
        layout = Layout(LINEAR, _spans(source, tokens, pieces))
        return Remapping(
            predictions, {LINEAR: layout}, (Move(source.name, LINEAR, move_table(pieces, len(tokens))),)
        )

    def _predictions(
        self, problem: Problem, source: Layout, tokens: Ints, even: Ints, flows: Transport
    ) -> dict[str, Any]:
        """Predictions for one layer, forward and backward, in microseconds."""
        slowest = [float((rows / problem.speeds).max()) for rows in (tokens, even)]
        share = even_parameters(problem.model) / problem.cost.linear_parameters
        token_us = _PASSES_OF_LINEAR * share * float(problem.cost.linear_us(1))
        linear = [rows * token_us for rows in slowest]
        moves_us = 2 * sum(_move_us(problem, flows, np.minimum(tokens, even)))
        return {
            "objective": self.objective,
            "used": bool(len(flows.rows)) and (self.when == "always" or linear[0] - linear[1] > moves_us),
            "rows": int(flows.rows.sum()),
            "most_tokens": {source.name: int(tokens.max()), LINEAR: int(even.max())},
            "linear_us": {source.name: linear[0], LINEAR: linear[1]},
            "moves_us": moves_us,
        }


def row_costs(cluster: Cluster, row_bytes: int) -> TwoLevelCost:
    """Microseconds to move a row of `row_bytes` bytes, inside a node and between nodes, where ranks may share a NIC."""
    intra, inter = (row_bytes / (gbs * 1e3) for gbs in (cluster.intra_gbs, cluster.inter_gbs_per_rank))
    return TwoLevelCost(cluster.ranks_per_node, intra, max(intra, inter))


def _row_bytes(model: Model) -> tuple[int, int]:
    """Bytes of a row of attention output, and of hidden states."""
    return model.q_heads * model.value_dim * model.element_bytes, model.hidden * model.element_bytes


def _move_us(problem: Problem, flows: Transport, kept: Ints) -> list[float]:
    """Times of the moves to the linear layout and back: the busiest rank's sending or receiving, in parallel with the
    copy of the rows that stay. kept: int64 [ranks], their number."""
    times = []
    for row_bytes in _row_bytes(problem.model):
        latency, wire = _wire_us(problem.cluster, flows.src, flows.dst, flows.rows, row_bytes)
        copy_us = float(problem.cost.rowop_us(2 * row_bytes * int(kept.max())))
        times.append(latency + max(copy_us, wire))
    return times


def _wire_us(cluster: Cluster, src: Ints, dst: Ints, rows: Ints, row_bytes: int) -> tuple[float, float]:
    """Time on the wire: the latency of messages, plus the busiest rank's time to send or receive."""
    is_inter = src // cluster.ranks_per_node != dst // cluster.ranks_per_node
    latency = cluster.inter_latency_us if is_inter.any() else cluster.intra_latency_us
    costs = row_costs(cluster, row_bytes)
    price = np.where(is_inter, costs.inter, costs.intra) * rows
    return latency, max(float(np.bincount(side, price, 1).max(initial=0.0)) for side in (src, dst))


def feed_us(feed: Feed, cluster: Cluster, row_bytes: int) -> float:
    """Microseconds to move an encoder's rows, `row_bytes` each, to a decoder; moving their gradients takes as long. 0
    if no row leaves its rank."""
    table = feed.move.table
    rank, peer = table.rank_of_row(), table.wide("peer")
    sent = (table["send"] == 1) & (rank != peer)
    return (
        sum(_wire_us(cluster, rank[sent], peer[sent], table.wide("rows")[sent], row_bytes))
        if sent.any()
        else 0.0
    )


def even_tokens(tokens: Ints) -> Ints:
    """int64 [ranks]: the mean; if it is not an integer, the ranks with the most tokens have one more, which they then
    need not send."""
    mean, remainder = divmod(int(tokens.sum()), len(tokens))
    even = np.full(len(tokens), mean, np.int64)
    even[np.argsort(-tokens, kind="stable")[:remainder]] += 1
    return even


def even_parameters(model: Model) -> int:
    """Parameters of one layer that are applied in the linear layout: the output projection and a gated FFN."""
    return model.hidden * (model.q_heads * model.value_dim + 3 * model.ffn)


def _pieces(tokens: Ints, even: Ints, flows: Transport) -> Ints:
    """int64 [5, pieces]: source rank and row, target rank and row, rows; by source rank and row. Each rank's first
    piece is the rows that it keeps."""
    ranks = np.arange(len(tokens))
    src, dst, rows = (
        np.concatenate([first, second])
        for first, second in ((ranks, flows.src), (ranks, flows.dst), (np.minimum(tokens, even), flows.rows))
    )
    src_row, dst_row = (
        _preceding_rows(rows, np.lexsort((other, other != side, side)), side)
        for side, other in ((src, dst), (dst, src))
    )
    pieces = np.stack([src, src_row, dst, dst_row, rows])[:, rows > 0]
    return pieces[:, np.lexsort((pieces[1], pieces[0]))]


def _preceding_rows(rows: Ints, order: Ints, rank: Ints) -> Ints:
    """int64 [pieces]: number of rows in earlier pieces of the same rank, in `order`, which is sorted by rank."""
    row_offsets = np.cumsum(rows[order]) - rows[order]
    first = np.searchsorted(rank[order], rank[order])
    running = np.empty_like(rows)
    running[order] = row_offsets - row_offsets[first]
    return running


def _spans(source: Layout, tokens: Ints, pieces: Ints) -> Table:
    """The spans of the layout that results from moving the pieces of `source`."""
    spans, rank_base = source.spans, np.cumsum(tokens) - tokens
    span_rows = rank_base[spans.rank_of_row()] + spans["row"]  # on the axis of all ranks' rows
    order = np.argsort(span_rows, kind="stable")
    piece_rows = rank_base[pieces[0]] + pieces[1]
    cuts = np.union1d(span_rows, piece_rows)
    span = order[np.searchsorted(span_rows[order], cuts, "right") - 1]
    piece = np.searchsorted(piece_rows, cuts, "right") - 1
    span_offset, piece_offset = cuts - span_rows[span], cuts - piece_rows[piece]
    rank, row = pieces[2, piece], pieces[3, piece] + piece_offset
    length = np.diff(np.append(cuts, tokens.sum()))
    columns = (
        row,
        spans["token"][span] + span_offset,
        length,
        spans["sequence"][span],
        spans["position"][span] + span_offset,
    )
    by_row = np.lexsort((row, rank))
    ptr = np.searchsorted(rank[by_row], np.arange(len(tokens) + 1))
    return Table(ptr, SPAN_COLUMNS, np.stack(columns).take(by_row, 1))
