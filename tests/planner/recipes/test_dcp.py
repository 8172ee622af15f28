"""DCP: every cell once, both balances, bytes as the hypergraph prices them, and Listing 3."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import RESULTS
from apportion.ir.masks import specs as masks
from apportion.ir.plan.ops import instruction_of
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner.place.dcp import placement as dcp
from apportion.planner.place.dcp.cells import Heads, Pairs, divide, hyperedges
from apportion.planner.place.dcp.homes import FEW_PAIRS, PAIRS, Blocks as Homes, coarse_starts, movable
from apportion.planner.place.dcp.links import link_gbs, swap_homes
from apportion.planner.place.dcp.placement import Dcp
from apportion.planner.problem import Placement, Problem
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.shard.blocks import Blocks
from apportion.planner.tasks.cells import Cells, cut_cells
from tests.support import placements
from tests.support.matrix import LAYERS, batch_of, compare
from tests.support.strategies import cluster

MODEL = Model(q_heads=8, kv_heads=2, head_dim=16, dtype="bf16", layers=1)
# bytes per token: rows of 16 numbers, a float32 output row with its LSE (4 x (16 + 1)), and so on, for each head
FORWARD = (8 * (2 * 16 + 4 * 17), 2 * 2 * 32)
BACKWARD = (8 * (2 * 16 + 2 * 16 + 4 * 2 + 4 * 16), 2 * (2 + 4) * 32)


def problem_of(batch: Batch, ranks: int, per_node: int = 0, model: Model = MODEL, **policy: int) -> Problem:
    per_node = per_node or ranks
    made = Cluster(nodes=ranks // per_node, ranks_per_node=per_node)
    return Problem(batch, made, model, Policy(find_recipe("fcp"), **policy))


def placed(problem: Problem, block: int = 1024, **params: object) -> Placement:
    return Dcp(**params)(problem, Blocks(block, False)(problem))


def check(problem: Problem, placement: Placement, over: float = 1.05, tokens: float = 1.02) -> None:
    """Both balances, and every pair of the mask computed by one rank for every head."""
    used = placement.rank_sums(placement.lengths, problem.ranks)
    shares = problem.token_shares
    assert (used <= np.maximum(tokens * shares, np.ceil(shares))).all()
    assert used.sum() == problem.batch.tokens
    assert set(placement.execution) == {(kind, phase) for kind in problem.bands for phase in PHASES}
    for (kind, _), execution in placement.execution.items():
        cells = cut_cells(problem.bands[kind], placement.starts)
        assert execution.rank.shape == (placement.head_groups, len(cells))
        work = np.tile(cells.work, placement.head_groups)
        share = work.sum() * problem.speeds / problem.speeds.sum()
        load = np.bincount(execution.rank.ravel(), work, problem.ranks)
        assert (load <= np.maximum(over * share, np.ceil(share))).all()


LONG = 32768
BATCHES = {
    "one tail of 16": Batch.from_lengths([LONG + 16]),
    "tails": Batch.from_lengths([16] * 5 + [9000] + [1040] * 20 + [16] * 7),
    "many tiny": Batch.from_lengths([37] * 900),
    "one and tiny": Batch.from_lengths([20000] + [37] * 500),
    "full": Batch.from_lengths([9000, 5000, 1], masks.full()),
    "window": Batch.from_lengths([LONG, 700], masks.sliding_window(2048)),
    "lambda": Batch.from_lengths([LONG, LONG], masks.sink_window(64, 4096)),
    "blockwise": Batch.from_lengths([LONG], masks.causal_blockwise(256, 2)),
    "shared question": Batch.from_lengths([LONG], masks.shared_question(6552, [6554] * 4)),
    "documents": Batch.from_lengths([LONG], masks.documents([LONG - 100, 36, 64])),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("ranks", [8, 32])
def test_both_weights_are_even(name: str, ranks: int) -> None:
    problem = problem_of(BATCHES[name], ranks, 8)
    placement = placed(problem)
    check(problem, placement)
    assert placement.termination is not None
    assert placement.termination.solved
    tokens = placement.rank_sums(placement.lengths, ranks).reshape(-1, 8).sum(1)
    nodes = ranks // 8
    assert tokens.max() <= 1.01 * problem.batch.tokens / nodes + 1
    work = cut_cells(problem.bands["default"], placement.starts).work
    for execution in placement.execution.values():
        load = np.bincount(execution.rank[0] // 8, work, nodes)
        assert load.max() <= 1.02 * work.sum() / nodes


TWO_KINDS = Model(8, 2, 16, layers={"global": 1, "local": 5})
KINDS = {"global": masks.causal(), "local": masks.sliding_window(512)}


@pytest.mark.parametrize(
    ("problem", "groups"),
    [
        *((problem_of(Batch.from_lengths([9000, 3000]), 8, 4), groups) for groups in (1, 2, 4, "kv")),
        (problem_of(Batch.from_lengths([9000, 3000, 500], KINDS), 8, 4, TWO_KINDS), 1),
        (placements.problem([LONG], 4, speeds=(1.0, 1.0, 1.0, 0.25), model=MODEL), 1),
    ],
    ids=["1", "2", "4", "kv", "kinds", "slow rank"],
)
def test_head_groups_and_kinds_are_balanced_by_speed(problem: Problem, groups: int | str) -> None:
    placement = placed(problem, head_groups=groups)
    check(problem, placement)
    assert placement.head_groups == (2 if groups == "kv" else groups)
    assert not any(each.division.any() for each in placed(problem, divisions=1).execution.values())


def test_phases_may_compute_on_different_ranks() -> None:
    problem = problem_of(Batch.from_lengths([LONG]), 8)
    execution = placed(problem).execution
    assert (execution["default", "forward"].rank != execution["default", "backward"].rank).any()


def test_the_papers_tolerances_move_fewer_bytes() -> None:
    problem = problem_of(Batch.from_lengths([20000, 9000, 4000, 3000, 500]), 16, 4)
    loose = placed(problem, epsilon_compute=[0.4, 0.1])
    check(problem, loose, 1.4 * 1.1)
    assert loose.termination.value < placed(problem).termination.value


def test_compute_that_cannot_be_even_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "MOST_CELLS", 100)
    with pytest.raises(ap.CapacityError, match=r"\d+ cells of at most \d+ pairs .* pairs per rank"):
        placed(problem_of(Batch.from_lengths([LONG]), 7), epsilon_compute=[0.0, 0.0], epsilon_tokens=[0, 0])


def link_times(edges: Any, rank: Ints, ranks: int, per_node: int, gbs: Any) -> Floats:
    """float64 [ranks]: time on links, where a hyperedge goes from the rank of its first vertex to all others that it
    spans; keys (the second half) go once to each other node, whose ranks share them."""
    sent, received = np.zeros((2, 2, ranks), np.int64)
    for edge, (begin, end, price) in enumerate(zip(edges.ptr[:-1], edges.ptr[1:], edges.price, strict=True)):
        home, *others = rank[edges.pins[begin:end]].tolist()
        is_query = edge < len(edges.price) // 2
        for to in {one for one in others if is_query or one // per_node == home // per_node} - {home}:
            away = int(to // per_node != home // per_node)
            sent[away, home] += price
            received[away, to] += price
        for node in set() if is_query else {one // per_node for one in others} - {home // per_node}:
            sent[1, home] += price
            received[1, node * per_node : (node + 1) * per_node] += price // per_node
    within, between = np.maximum(sent, received)
    return within / gbs[0] + between / gbs[1]


def test_more_tries_never_increase_the_time_on_links() -> None:
    problem = problem_of(Batch.from_lengths([20000, 9000, 4000, 3000, 500]), 16, 4)
    times = []
    for tries in (1, 2, 3):
        check(problem, placement := placed(problem, tries=tries))
        cells, row_bytes = cut_cells(problem.bands["default"], placement.starts), BACKWARD
        edges = hyperedges(cells, placement.lengths, Heads(1, 1), row_bytes)
        rank = np.concatenate([placement.home, placement.execution["default", "backward"].rank[0]])
        times.append(link_times(edges, rank, 16, 4, link_gbs(problem)).max())
    assert times == sorted(times, reverse=True)


SHARE = 32768
LARGE = {
    "one": [64 * SHARE],
    "two": [32 * SHARE] * 2,
    "skewed": [32 * SHARE, 16 * SHARE, *[1024] * 512],
    "short": [32] * 2048 * 32,
    "blocks": [1024] * 2048,
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("groups", [1, 8])
def test_blocks_are_joined_until_pairs_are_few_enough(name: str, groups: int) -> None:
    """Blocks of one sequence are joined; a pair of blocks counts once, however many documents it has."""
    problem = problem_of(Batch.from_lengths(LARGE[name]), 64, 8)
    starts = Blocks(1024, False)(problem).starts
    found = coarse_starts(problem, starts, groups)
    assert np.isin(found, starts).all()
    lengths, sequences = np.diff(found), problem.batch.starts
    inside = np.searchsorted(sequences, found[:-1], "right") == np.searchsorted(sequences, found[1:], "left")
    assert (lengths[~inside] <= 1024).all()
    blocks = Homes(found, np.full(len(lengths), -1))
    pairs = max(len(blocks.pairs(bands)) for bands in problem.bands.values())
    fewest = sum(-(-length // 1024) > 1 for length in LARGE[name]) + (lengths <= 1024).sum()
    assert pairs * groups <= max(FEW_PAIRS, PAIRS * 64, fewest * groups)


def test_blocks_with_few_pairs_are_not_joined() -> None:
    problem = problem_of(Batch.from_lengths([LONG, 700]), 8)
    starts = Blocks(1024, False)(problem).starts
    assert coarse_starts(problem, starts, 1) is starts


def test_joined_blocks_are_as_even_as_possible() -> None:
    problem = problem_of(Batch.from_lengths([70 * 1024, 100, 200, 80 * 1024 + 5]), 2)
    starts = Blocks(256, False)(problem).starts
    lengths = np.diff(coarse_starts(problem, starts, 8))
    first = lengths[np.cumsum(lengths) <= 70 * 1024]
    assert first.sum() == 70 * 1024
    assert first.max() - first.min() <= 256 < first.min()
    assert {100, 200} < set(lengths.tolist())


def test_cells_of_the_same_blocks_are_one_pair() -> None:
    cells = cut_cells(Batch.from_lengths([3, 5, 4, 16]).bands("default"), np.array([0, 12, 20, 28]))
    pairs = Pairs.of(cells, 3)
    assert [*zip(pairs.q.tolist(), pairs.k.tolist(), strict=True)] == [(0, 0), (1, 1), (2, 1), (2, 2)]
    assert pairs.of_cell.tolist() == [0, 0, 0, 1, 2, 3]
    assert pairs.work.tolist() == [6 + 15 + 10, 36, 64, 36]


def test_exchanges_shorten_the_time_on_links_and_keep_caps() -> None:
    lengths = [20000, 9000, 4000, 3000, 500]
    batch = Batch.from_lengths(lengths, home_ranks=[None, None, (4, 5), None, None])
    problem = problem_of(batch, 16, 4)
    place = Dcp(epsilon_tokens=(0.3, 0.3))
    placement = place(problem, Blocks(512, False)(problem))
    rng, gbs = np.random.default_rng(0), link_gbs(problem)
    blocks = Homes(placement.starts, placement.home)
    pairs = blocks.pairs(problem.bands["default"])
    case = blocks.case(problem, pairs, Heads(1, 1), "backward", (0.1, 0.1), (0.3, 0.3))
    rank = np.concatenate([placement.home, rng.integers(0, 16, len(pairs))])
    free = movable(problem, placement.starts)
    assert 0 < (~free).sum() < len(free)
    home, times = swap_homes([(case, rank, len(free))], free, gbs)
    assert (home != placement.home).any()
    assert (home == placement.home)[~free].all()
    assert (home // 4 == placement.home // 4).all()
    assert (np.bincount(home, placement.lengths, 16) <= case.tokens_caps[1]).all()
    before = link_times(case, rank, 16, 4, gbs)
    np.testing.assert_array_equal(swap_homes([(case, rank, len(free))], np.zeros_like(free), gbs)[1], before)
    np.testing.assert_array_equal(
        times, link_times(case, np.concatenate([home, rank[len(home) :]]), 16, 4, gbs)
    )
    assert times.max() < before.max()


def test_sequences_stay_on_their_home_ranks() -> None:
    lengths, homes = [5000, 5000, 3000, 7000], [(0,), (1, 2), None, (3,)]
    batch = Batch.from_lengths(lengths, home_ranks=homes)
    problem = problem_of(batch, 4, token_cap=7000)
    placement = placed(problem, epsilon_tokens=[0.4, 0.4])
    check(problem, placement, tokens=1.4)
    sequence = np.searchsorted(batch.starts, placement.starts[:-1], "right") - 1
    for index, allowed in enumerate(homes):
        assert allowed is None or set(placement.home[sequence == index].tolist()) <= set(allowed)


def test_a_token_cap_is_obeyed_or_refused() -> None:
    problem = problem_of(Batch.from_lengths([5000, 3000]), 4, token_cap=2001)
    placement = placed(problem)
    assert placement.rank_sums(placement.lengths, 4).max() <= 2001
    batch = Batch.from_lengths([5000, 1], home_ranks=[(0,), (1,)])
    with pytest.raises(ap.CapacityError, match=r"5000|found no room"):
        placed(problem_of(batch, 4))


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_value_counts_the_bytes_that_travel(groups: int) -> None:
    """Counts tile by tile, from the cells that every rank computes."""
    problem = problem_of(Batch.from_lengths([9000, 3000, 40]), 8, 4)
    placement = placed(problem, head_groups=groups)
    total = 0
    for phase, (query, key) in zip(PHASES, (FORWARD, BACKWARD), strict=True):
        cells = cut_cells(problem.bands["default"], placement.starts)
        rank = placement.execution["default", phase].rank
        tiles = set()
        for group in range(groups):
            for q, k, r in zip(cells.q, cells.k, rank[group], strict=True):
                tiles |= {("q", group, q, r), ("k", group * min(groups, 2) // groups, k, r)}
        for side, _, block, r in tiles:
            share = (query, groups) if side == "q" else (key, min(groups, 2))
            away = placement.home[block] != r
            total += int(placement.lengths[block]) * share[0] // share[1] * bool(away)
    assert placement.termination.value == total


def test_a_plan_moves_the_bytes_that_the_hypergraph_prices() -> None:
    plan = planned(Batch.from_lengths([4096, 2048, 512], masks.full()), MODEL, 4, block=256)
    saved = 0  # the hypergraph prices returned rows as partial results
    for phase, tensor in zip(PHASES, (Tensor.O, Tensor.DQ), strict=True):
        programs = plan.programs["default", phase]
        instructions, transfers, operands = (
            programs[name] for name in ("instructions", "transfers", "operands")
        )
        at = instruction_of(instructions["op"], instructions.wide("count"), "transfers")
        final = np.flatnonzero((instructions["mode"][at] & RESULTS > 0) & (transfers["send"] == 1))
        rows = operands["rows"][operands.ptr[transfers.rank_of_row()[final]] + transfers["operand"][final]]
        saved += int(rows.sum()) * (MODEL.sent_bytes(tensor) - 8 * MODEL.sent_result_bytes(tensor))
    assert saved > 0
    assert plan.report["bytes"]["total"] + saved == plan.report["termination"]["solver"]["value"]


# ---------------------------------------------------------------------------------------------- divisions


def listing_3(cells: Cells, rank: Ints, home: Ints, lengths: Ints, row_bytes: Any, count: int) -> np.ndarray:
    """Listing 3 as printed, on one head group; where it is unspecified: budgets in bytes, cells in order, and tiles
    already received are free."""
    division = np.full(len(cells), -1)
    tiles = [
        [(side, int(b)) for side, b in ((0, q), (1, k)) if home[b] != r]
        for q, k, r in zip(cells.q, cells.k, rank, strict=True)
    ]
    size = lambda tile: int(lengths[tile[1]]) * row_bytes[tile[0]]  # noqa: E731
    need: dict = defaultdict(int)
    for r, tile in {(r, tile) for r, own in zip(rank.tolist(), tiles, strict=True) for tile in own}:
        need[r, home[tile[1]]] += size(tile)
    division[[not own for own in tiles]] = 0
    fetched = set()
    for turn in range(1, count):
        spent: dict = defaultdict(int)
        for cell in np.flatnonzero(division < 0):
            r, new = int(rank[cell]), [t for t in tiles[cell] if (int(rank[cell]), t) not in fetched]
            added: dict = defaultdict(int)
            for tile in new:
                added[r, home[tile[1]]] += size(tile)
            if turn < count - 1 and any((spent[p] + n) > need[p] / count for p, n in added.items()):
                continue
            division[cell] = turn
            fetched |= {(r, tile) for tile in new}
            for pair, n in added.items():
                spent[pair] += n
    return division


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["tails", "one and tiny", "shared question"])
def test_divisions_equal_listing_3(name: str, count: int) -> None:
    problem = problem_of(BATCHES[name], 8, 4)
    placement = placed(problem, divisions=count)
    for phase, row_bytes in zip(PHASES, (FORWARD, BACKWARD), strict=True):
        execution = placement.execution["default", phase]
        cells = cut_cells(problem.bands["default"], placement.starts)
        expected = listing_3(cells, execution.rank[0], placement.home, placement.lengths, row_bytes, count)
        np.testing.assert_array_equal(execution.division[0], expected)


def test_a_key_tile_serves_the_head_groups_that_share_its_heads() -> None:
    """Two blocks, four groups on two KV heads, all computed on the rank that lacks the keys."""
    cells = cut_cells(np.array([[4, 8, 0, 4, -(2**62), 2**62]]), np.array([0, 4, 8]))
    rank, home, lengths = np.ones((4, 1), np.int32), np.array([0, 1]), np.array([4, 4])
    # one of the two key tiles fits half the budget; the groups that share it find it there
    division = divide(cells, rank, home, lengths, Heads(4, 2), (10, 10), 3)
    assert division.ravel().tolist() == [2, 2, 2, 2]
    division = divide(cells, rank, home, lengths, Heads(4, 4), (10, 10), 5)
    assert division.ravel().tolist() == [4, 4, 4, 4]


def test_rounds_are_divisions() -> None:
    plan = planned(Batch.from_lengths([6000, 300]), MODEL, 8, block=256, divisions=4)
    fetches = [each for each in plan.report["exchanges"] if each["name"] == "fetch"]
    assert 1 <= fetches[0]["rounds"] <= 3


def test_divisions_without_a_dcp_placement_split_every_pair_evenly() -> None:
    steps = {"shard": {"blocks": {"block": 16}}, "place": {"lpt": {}}}
    batch = batch_of("causal", "window", "tree")
    policy = Policy(Recipe("mine", steps | {"schedule": {"divisions": {"count": 4}}}), token_cap=batch.tokens)
    made = ap.plan(batch, cluster(4), MODEL, policy=policy)
    assert made.report["rounds"] == 3  # the first of four divisions needs nothing remote


# ---------------------------------------------------------------------------------------------- whole plans


def planned(batch: Batch, model: Model, ranks: int, block: int = 5, count: int = 0, **place: object) -> Plan:
    steps = {
        "shard": {"blocks": {"block": block, "zigzag": False}},
        "place": {"dcp": place},
        "schedule": {"divisions": {"count": count or place.get("divisions", 4)}},
    }
    return ap.plan(batch, cluster(ranks), model, policy=Policy(Recipe("mine", steps)))


def test_the_plan_of_the_engine_equals_dense_attention() -> None:
    model = Model(*LAYERS[1][:4], dtype="fp64", layers=1)
    plan = planned(batch_of("causal", "tree"), model, 4, solver="mtkahypar", head_groups=2)
    compare(plan, "default", LAYERS[1], 0)
    assert plan.report["termination"]["limit"] is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"head_groups": 3}, "recipe.place.dcp.head_groups"),
        ({"solver": {"mtkahypar": {"steps": 1}}}, "recipe.place.dcp.solver.mtkahypar"),
        ({"divisions": 5, "count": 2}, "recipe.schedule.divisions.count"),
    ],
)
def test_wrong_parameters_name_their_field(params: dict, field: str) -> None:
    with pytest.raises(ap.ConfigError) as caught:
        planned(Batch.from_lengths([64, 40]), MODEL, 4, **params)
    assert caught.value.field == field
