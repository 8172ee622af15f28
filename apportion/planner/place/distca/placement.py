"""Core-attention disaggregation (DistCA, sections 4.1 and 4.2): tokens stay where they are; attention moves.

homes       sequential: ranks are filled one after another by their caps, whatever the work       `distca.homes`
attention   rows move from surplus to deficit servers, fewest bytes per pair first                `distca.parts`

tokens   |  rank 0   |  rank 1   |  rank 2   |      work   ###########|##|####   ──►   ######|#####|######
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from apportion.ir.arrays import Bools, Ints, changes
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.orders import stable_order, unique_inverse
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner.options import Amount, Bytes
from apportion.planner.place.distca.homes import causal_sequences, sequential_homes, token_ranges
from apportion.planner.place.distca.parts import Balance, Limits, MigrationSummary, Site, balance
from apportion.planner.problem import Departure, Execution, Placement, PlacePass, Problem, Shards, exact_sums
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import obey_token_cap
from apportion.planner.solvers.status import Status, Termination
from apportion.planner.tasks.cells import cut_cells, cut_columns
from apportion.planner.tasks.tasks import hulls

#: (low, high, rank): global tokens [low, high) of a rank, int64, sorted
Map = tuple[Ints, Ints, Ints]
#: starts, home, the balance of each kind (the servers of its rows), execution
Solution = tuple[Ints, Ints, dict[str, Balance], dict[tuple[str, str], Execution] | None]

WHERE = "recipe.place.distca"
NO_CAP = 2**62
# A policy may set a lower tolerance, but no plan of whole rows is as even.
MIN_TOLERANCE = 1e-4
_CAPS = ("send_bytes", "receive_bytes", "buffer_bytes")
# Tasks take parts of keys if the busiest rank would otherwise send for at least this many times as long: in simulations
# of 8 to 256 ranks (log-normal lengths, source files, documents), whole rows are up to 70 % faster below this ratio.
CROWDED = 1.35


@dataclass(frozen=True)
class Distca(PlacePass):
    """Sequential homes and communication-aware greedy migration.

    tolerance: servers are filled until their load is within this fraction of the target (the paper's epsilon), or the
    policy's tolerance if lower. two_sided: repeat with half the fraction until no server exceeds (1 + tolerance) times
    its target either; the paper considers deficits only. granularity: cuts are multiples of this many rows from the
    ends of a sequence; halved, down to one row, if two-sided balance requires it. threshold: pairs per byte below which
    moves are not made (the paper's second stop rule; 0 makes all moves); a server left short for this reason is not an
    error. form: `paper` moves rows of causal sequences as pairs of a head and a tail, priced as in the authors' code:
    the rows of the head and all keys of the document; it excludes `head_tail: none`. `ranges` moves the first or last
    rows of a rank's range. o_bytes: include returning O in the price of a query row. head_tail: which sequences have
    homes that are pairs of a head and a tail, not ranges of rows: `causal` ones; `all`, so that homes do
    not depend on masks; or `none`. kv_free: KV already at the destination costs nothing; the paper charges for it.
    kv_ranges: a task reads only a part of its rows' keys, those of one home, and `form` has no effect; the paper's
    tasks read all keys. "auto": all keys, unless the busiest rank would then send 1.35 times as long as with parts, as
    keys needed by many ranks all leave one home.

    Caps are bytes of one forward attention call. send_bytes, receive_bytes: limits on what a rank sends and receives:
    Q, KV and returning O (in the model's dtype if whole rows move without reshuffling). buffer_bytes: limit on remote Q
    and KV rows. O of rows whose keys are cut, and keys of non-causal masks, are counted by an upper bound.

    Ranks of unequal speed get targets in proportion; home_ranks are respected; each attention kind is balanced
    separately, in the same way forward and backward. Raises ConfigError, and CapacityError if the caps, rather than the
    granularity, prevent balance within the tolerance, or are exceeded before any move.
    """

    tolerance: Amount = 0.05
    granularity: Annotated[int, Meta(ge=1, le=2**20)] = 128
    threshold: Amount = 0.0
    two_sided: bool = True
    form: Literal["ranges", "paper"] = "ranges"
    o_bytes: bool = True
    head_tail: Literal["causal", "all", "none"] = "causal"
    kv_free: bool = True
    kv_ranges: bool | Literal["auto"] = False
    send_bytes: Bytes | None = None
    receive_bytes: Bytes | None = None
    buffer_bytes: Bytes | None = None
    is_uncapped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.form == "paper" and self.head_tail == "none":
            rule = "moves heads with their tails, but with `head_tail: none` homes are not cut into them"
            raise ConfigError("recipe.place.distca.form", self.form, rule, "leave `form` or `head_tail` out")

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        placement = self._place_cheaper(problem)
        obey_token_cap(problem, placement.starts, placement.home, "distca")
        self._check_caps(problem, placement)
        return placement

    def _place_cheaper(self, problem: Problem) -> Placement:
        """Chooses whole rows or parts of keys by the parameter; "auto" compares sending times, within the caps."""
        if self.kv_ranges != "auto":
            return self._place(problem, self._move_keys if self.kv_ranges else self._move_rows)
        placements: list[Placement] = []
        errors: list[CapacityError] = []
        for solve in (self._move_rows, self._move_keys):
            try:
                placement = self._place(problem, solve)
                self._check_caps(problem, placement)
                placements.append(placement)
            except CapacityError as error:
                errors.append(error)
        if not placements:
            raise errors[0]
        seconds = [sending_seconds(problem, placement) for placement in placements]
        return placements[1] if len(placements) == 2 and seconds[0] > CROWDED * seconds[1] else placements[0]

    def _place(self, problem: Problem, solve: Callable[[Problem], Solution]) -> Placement:
        starts, home, balances, execution = solve(problem)
        load, weight = _load(problem, balances), row_weights(problem, starts)
        bound = float(weight.sum() / problem.speeds.sum())
        termination = Termination(Status.FEASIBLE, bound, float((load / problem.speeds).max()))
        rows = min(result.summary.granularity for result in balances.values())
        entry = Departure(f"{WHERE}.granularity", self.granularity, rows, "coarser cuts leave ranks uneven")
        departures = (entry,) if rows < self.granularity else ()
        return Placement(
            starts, home, weight, bound, termination=termination, execution=execution, departures=departures
        )

    def solve(self, problem: Problem, whole: bool) -> tuple[Map, dict[str, Balance]]:
        """The home of every token, and each kind's servers: of rows with all their keys (whole), or of rows with the
        keys of one home. Raises CapacityError."""
        home_folded, causal = self._head_tail_sequences(problem)
        homes = sequential_homes(problem, home_folded, self.granularity)
        home = token_ranges(problem.batch.starts, home_folded, homes)
        starts, limits, result = np.append(home[0], problem.batch.tokens), self._limits(problem, whole), {}
        for kind, bands in problem.bands.items():
            folded = causal[kind] & (whole and self.form == "paper")
            begin, speeds = problem.batch.starts, problem.speeds
            result[kind] = balance(Site(bands, begin, homes, starts, home[2], whole, folded, speeds), limits)
            self._check(kind, result[kind].summary, limits)
        return home, result

    def _head_tail_sequences(self, problem: Problem) -> tuple[Bools, dict[str, Bools]]:
        """bool [sequences]: True if the homes are pairs of a head and a tail; and, for each kind, True if its mask is
        causal. All False for `head_tail: none`."""
        cut = self.head_tail != "none"
        causal = {kind: causal_sequences(problem, kind) & cut for kind in problem.batch.kinds}
        return np.logical_or.reduce(list(causal.values())) | (self.head_tail == "all"), causal

    def _move_rows(self, problem: Problem) -> Solution:
        home, balances = self.solve(problem, whole=True)
        starts, owner, servers = _common_blocks(home, [item.tokens() for item in balances.values()])
        has_moves = any((server != owner).any() for server in servers)
        execution: dict[tuple[str, str], Execution] = {}
        for kind, server in zip(balances, servers, strict=True) if has_moves else ():
            block = cut_columns(problem.bands[kind], starts)[0]
            execution |= _both_phases(kind, server.astype(np.int32)[block])
        return starts, owner, balances, execution or None

    def _move_keys(self, problem: Problem) -> Solution:
        home, balances = self.solve(problem, whole=False)
        starts = unique_inverse(*(item.cuts for item in balances.values()), home[0])[0]
        starts, owner = np.append(starts, problem.batch.tokens), home[2][_range_of(home[0], starts)]
        has_moves = any(item.summary.moves for item in balances.values())
        execution: dict[tuple[str, str], Execution] = {}
        for kind, item in balances.items() if has_moves else ():
            execution |= _both_phases(kind, item.ranks(cut_cells(problem.bands[kind], starts)))
        return starts, owner, balances, execution or None

    def _limits(self, problem: Problem, whole: bool) -> Limits:
        q, kv = (problem.model.row_bytes(tensor) for tensor in (Tensor.Q, Tensor.KV))
        o = _returned_bytes(problem, whole)
        caps = [getattr(self, name) for name in _CAPS]
        return Limits(
            tolerance=self._tolerance(problem),
            two_sided=self.two_sided,
            granularity=self.granularity,
            spare=self._tolerance(problem) if self.two_sided else 0.0,
            threshold=self.threshold,
            q_bytes=q,
            o_bytes=o,
            kv_bytes=kv,
            priced_q=q + o if self.o_bytes else q,
            kv_free=self.kv_free,
            capped=any(cap is not None for cap in caps),
            send_cap=caps[0] or NO_CAP,
            receive_cap=caps[1] or NO_CAP,
            buffer_cap=caps[2] or NO_CAP,
        )

    def _tolerance(self, problem: Problem) -> float:
        policy_tolerance = problem.policy.tolerance
        tolerance = self.tolerance if policy_tolerance is None else min(self.tolerance, policy_tolerance)
        return max(tolerance, MIN_TOLERANCE)

    def _check(self, kind: str, summary: MigrationSummary, limits: Limits) -> None:
        if not (self.two_sided and summary.forbidden and summary.imbalance > limits.tolerance):
            return
        caps = ", ".join(f"{name} {getattr(self, name)}" for name in _CAPS if getattr(self, name))
        raise CapacityError(
            f"kind {kind} is {summary.imbalance:.4f} above the mean on its busiest rank, but the tolerance is "
            f"{limits.tolerance}, and {summary.forbidden} moves that would help break {caps}: raise the caps or the "
            f"tolerance of {WHERE}"
        )

    def _check_caps(self, problem: Problem, placement: Placement) -> None:
        """Checks caps exactly, row by row, where the greedy migration uses upper bounds: homes alone may exceed a
        cap."""
        for kind in problem.batch.kinds if any(getattr(self, name) for name in _CAPS) else ():
            for name, sizes in zip(_CAPS, forward_bytes(problem, placement, kind), strict=True):
                cap, rank = getattr(self, name), int(sizes.argmax())
                if cap is not None and sizes[rank] > cap:
                    raise CapacityError(
                        f"{WHERE}.{name} is {cap}, but rank {rank} needs {sizes[rank]} in a forward call of kind "
                        f"{kind}, even without any moves: raise it to at least that"
                    )


def sending_seconds(problem: Problem, placement: Placement) -> float:
    """Sending time of the busiest rank in a forward call, summed over kinds, if rows are sent to each node once and
    forwarded inside it."""
    cluster, seconds = problem.cluster, 0.0
    for kind in problem.batch.kinds:
        flows = _Flows.of(problem, placement, kind)
        src_node, dst_node = (rank // cluster.ranks_per_node for rank in (flows.src, flows.dst))
        port = np.where(src_node == dst_node, cluster.nodes + flows.dst, dst_node)
        key = flows.tile * (cluster.nodes + cluster.ranks) + port
        rate = 1e9 * np.where(src_node == dst_node, cluster.intra_gbs, cluster.inter_gbs_per_rank)
        order = stable_order(key)
        first = np.flatnonzero(changes(key[order]))
        if len(first):
            tile_seconds = np.maximum.reduceat((flows.bytes / rate)[order], first)
            seconds += float(np.bincount(flows.src[order[first]], tile_seconds, problem.ranks).max())
    return seconds


def forward_bytes(problem: Problem, placement: Placement, kind: str) -> tuple[Ints, Ints, Ints]:
    """(sent, received, held): bytes of each rank in one forward call, int64 [ranks], as limited by the caps of
    `Distca`."""
    flows, ranks = _Flows.of(problem, placement, kind), problem.ranks
    fetched_bytes = flows.bytes * flows.fetched
    return (
        exact_sums(flows.src, flows.bytes, ranks),
        exact_sums(flows.dst, flows.bytes, ranks),
        exact_sums(flows.dst, fetched_bytes, ranks),
    )


@dataclass(frozen=True)
class _Flows:
    """Row transfers of a forward call: int64 [flows]; rows of one block have the same `tile`. fetched: bool [flows],
    False for returning O."""

    src: Ints
    dst: Ints
    rows: Ints
    bytes: Ints
    tile: Ints
    fetched: Bools

    @staticmethod
    def of(problem: Problem, placement: Placement, kind: str) -> _Flows:
        cells, home, model = cut_columns(problem.bands[kind], placement.starts), placement.home, problem.model
        cell_rank = home[cells[0]]
        if placement.execution is not None:
            cell_rank = placement.execution[kind, "forward"].rank[0]
        block, rank, rows = _tiles(cells[0], cells[2], cells[3], cell_rank, home)
        key_block, key_rank, keys = _tiles(cells[1], cells[4], cells[5], cell_rank, home)
        computing = unique_inverse(cells[0].astype(np.int64) * problem.ranks + cell_rank)[0] // problem.ranks
        is_single = bool(np.bincount(computing).max(initial=0) <= 1)
        returned = _returned_bytes(problem, is_single)
        sizes = rows * model.row_bytes(Tensor.Q), keys * model.row_bytes(Tensor.KV), rows * returned
        return _Flows(
            np.concatenate([home[block], home[key_block], rank]),
            np.concatenate([rank, key_rank, home[block]]),
            np.concatenate([rows, keys, rows]),
            np.concatenate(sizes),
            # each returned O is its own tile: ranks return different partial results of a row
            np.concatenate([block, len(home) + key_block, 2 * len(home) + np.arange(len(block))]),
            np.repeat([True, True, False], [len(block), len(key_block), len(block)]),
        )


def _returned_bytes(problem: Problem, whole: bool) -> int:
    """Bytes of a returning row of O: a result if all rows move `whole`, unless an exchange separates attention rows
    from the loader's; otherwise a partial result, as an upper bound."""
    reshuffle, inner = (problem.policy.recipe.step(name) for name in ("reshuffle", "inner"))
    if whole and inner is None and (reshuffle is None or reshuffle.name == "off"):
        return problem.model.q_heads * problem.model.output_bytes
    return problem.model.row_bytes(Tensor.O)


def _tiles(block: Ints, low: Ints, high: Ints, rank: Ints, home: Ints) -> tuple[Ints, Ints, Ints]:
    """(block, rank, rows) of tiles, int64 each: a rank receives the hull of the rows it needs of a block, once."""
    remote = np.flatnonzero(home[block] != rank)
    ranks = int(rank.max(initial=0)) + 1
    tile, index = unique_inverse(block[remote].astype(np.int64) * ranks + rank[remote])
    first, last = hulls(index, low[remote], high[remote], len(tile))
    return tile // ranks, tile % ranks, last - first


def _common_blocks(home: Map, balances: list[Map]) -> tuple[Ints, Ints, list[Ints]]:
    """(starts, homes, servers for each kind) of the fewest blocks with uniform home and servers."""
    # a kind without pairs computes nothing
    maps = [(low, rank) for low, _, rank in (home, *(item if len(item[0]) else home for item in balances))]
    starts = unique_inverse(*(low for low, _ in maps))[0]
    ranks = np.stack([rank[_range_of(low, starts)] for low, rank in maps])
    is_first = np.append(True, (ranks[:, 1:] != ranks[:, :-1]).any(0))
    starts, ranks = np.append(starts[is_first], home[1][-1]), ranks[:, is_first]
    return starts, ranks[0], list(ranks[1:])


def _range_of(low: Ints, tokens: Ints) -> Ints:
    """The index of each token's range; low: first tokens of the ranges."""
    return np.searchsorted(low, tokens, "right") - 1


def _load(problem: Problem, balances: Mapping[str, Balance]) -> Ints:
    """int64 [ranks]: pairs, summed over the layers of all kinds."""
    load: Ints = np.sum([problem.layers[k] * item.servers.load for k, item in balances.items()], axis=0)
    return load


def _both_phases(kind: str, rank: Ints) -> dict[tuple[str, str], Execution]:
    """The same execution for both phases. rank: int32 [cells]."""
    execution = Execution(rank[None])
    return {(kind, phase): execution for phase in PHASES}
