"""Zeppelin: the tokens of each rank as printed and under the cap; queues in order; hops through proxies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.workload import lognormal_lengths
from apportion.ir.tensors import PHASES
from apportion.planner.place.zeppelin import Zeppelin, hiding_tokens
from apportion.planner.problem import Problem
from apportion.planner.route.queue_rings import INTER, INTRA, LOCAL, QueueRings
from apportion.planner.route.routes import Site
from apportion.planner.schedule.queues import Queues
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, find_tasks
from tests.support.matrix import compare
from tests.support.placements import MASKS, owners, place, problem, tokens as tokens_of
from tests.support.sparse import sparse_product

MODEL = ap.Model(q_heads=2, kv_heads=1, head_dim=4, dtype="fp64", hidden=8, ffn=16, layers=1)


def shares(placer: Zeppelin, made: Problem) -> dict[int, dict[int, int]]:
    """sequence -> {rank: tokens}"""
    found = {}
    for sequence, rank, tokens in placer.shares(made).T.tolist():
        found.setdefault(sequence, {})[rank] = tokens
    return found


def tokens_per_rank(placer: Zeppelin, made: Problem) -> list[int]:
    _, rank, tokens = placer.shares(made)
    return np.bincount(rank, tokens, made.ranks).astype(int).tolist()


# --- algorithms 1 and 2


def test_the_printed_algorithm_overloads_a_rank_with_fragments() -> None:
    made = problem([5000, 2000], 8)
    assert shares(Zeppelin(cap="paper", capacity=1000), made) == {
        0: {0: 715, 1: 715, **dict.fromkeys(range(2, 7), 714)},
        1: {0: 1000, 7: 1000},
    }
    assert max(tokens_per_rank(Zeppelin(cap="enforce", capacity=1000), made)) <= 1000


@pytest.mark.parametrize("cap", ["paper", "enforce"])
def test_zones_by_hand(cap: str) -> None:
    """2 nodes of 4 ranks with 100 tokens each: a sequence longer than a node, one longer than a rank, and the rest."""
    made = problem([420, 150, 30, 20, 10], 8, nodes=2)
    found = shares(Zeppelin(cap=cap, capacity=100), made)
    assert sorted(found[0]) == list(range(8))  # two nodes, evenly
    assert set(found[0].values()) <= {52, 53}
    assert sorted(found[1]) in (
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    )  # alone in its zone, it has the whole budget of squared lengths
    assert all(len(found[sequence]) == 1 for sequence in (2, 3, 4))


def test_the_nodes_of_a_sequence_follow_from_its_length() -> None:
    """The mean of 4 nodes is 100: 150 tokens go to two, not to all."""
    found = shares(Zeppelin(cap="paper", capacity=60), problem([150, 50, 50, 50, 50, 50], 8, nodes=4))
    assert {rank // 2 for rank in found[0]} == {0, 1}


def test_whole_sequences_that_do_not_fit_lower_the_threshold() -> None:
    """Three sequences of 60 on two ranks of 100: the third fits on neither, so all sequences of that length are cut."""
    made = problem([60, 60, 60], 2)
    # each is two thirds of the square budget of a rank, so one fragment, and the printed round-robin overloads the
    # first
    assert tokens_per_rank(Zeppelin(cap="paper", capacity=100), made) == [120, 60]
    assert tokens_per_rank(Zeppelin(cap="enforce", capacity=100), made) == [90, 90]


def test_caps_are_as_printed_unless_the_policy_has_one() -> None:
    for policy, cap in (({}, "paper"), ({"token_cap": 1000}, "enforce")):
        made = problem([5000, 2000], 8, **policy)
        assert tokens_per_rank(Zeppelin(), made) == tokens_per_rank(Zeppelin(cap=cap), made)


def test_zones_begin_at_lengths_whose_attention_hides_communication() -> None:
    """Slower links raise thresholds, but never above the capacities, with which the algorithms begin."""
    made = problem([100_000, 40_000, 3000, 200], 4, nodes=2)
    near, far = (hiding_tokens(made, gbs, latency) for gbs, latency in ((450.0, 5.0), (25.0, 10.0)))
    assert 1 < near < far
    wide = replace(
        made, cluster=ap.Cluster(2, 2, inter_gbs=1e6, intra_gbs=1e6, inter_latency_us=0, intra_latency_us=0)
    )
    split = [sum(map(len, shares(Zeppelin(zones=zones), wide).values())) for zones in ("capacity", "cost")]
    assert split[0] < split[1]


def test_thresholds_can_start_lower() -> None:
    made = problem([40, 8, 8, 8], 4, nodes=2)
    assert len(shares(Zeppelin(capacity=50), made)[0]) == 1
    assert len(shares(Zeppelin(capacity=50, intra_tokens=30), made)[0]) == 2
    assert len(shares(Zeppelin(capacity=50, inter_tokens=30), made)[0]) == 4


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
    cap=st.sampled_from(["enforce", "paper"]),
    parts=st.integers(1, 5),
)
def test_every_token_has_one_rank_and_enforce_keeps_the_cap(
    lengths: list[int], nodes: int, ranks: int, cap: str, parts: int
) -> None:
    made = problem(lengths, nodes * ranks, nodes=nodes)
    placer = Zeppelin(cap=cap, parts=parts)
    sequence, rank, tokens = placer.shares(made)
    assert np.array_equal(np.bincount(sequence, tokens, len(lengths)), lengths)
    assert len({*zip(sequence.tolist(), rank.tolist(), strict=True)}) == len(rank)
    counts = np.bincount(rank, tokens, made.ranks)
    assert cap == "paper" or counts.max() <= made.token_cap
    assert np.array_equal(tokens_of(place(placer, made), made.ranks), counts)


def test_parts_cut_only_sequences_that_cross_nodes() -> None:
    made = problem([64, 15], 4, nodes=2)
    plain, fine = (place(Zeppelin(capacity=32, parts=parts), made) for parts in (1, 4))
    assert np.bincount(np.searchsorted([64, 79], plain.starts[:-1], "right")).tolist() == [7, 1]
    assert np.bincount(np.searchsorted([64, 79], fine.starts[:-1], "right")).tolist() == [16, 1]
    assert np.array_equal(owners(plain), owners(fine))


# --- queues and proxies


MADE = problem([420, 150, 150, 30, 20, 10], 8, nodes=2)


def scheduled(made: Problem, placer: Zeppelin, proxies: int = 1) -> tuple[Edges, Schedule]:
    placement = place(placer, made)
    rows = Rows(placement.starts, placement.home, made.ranks)
    _, edges = find_tasks(made.bands["default"], rows)
    site = Site(rows, made.batch, made.cluster)
    return edges, Queues(proxies)(QueueRings(proxies)(edges, site), made.ranks)


def test_queues_run_from_inter_node_to_local() -> None:
    _, schedule = scheduled(MADE, Zeppelin(capacity=104))
    routed = schedule.routed
    inter, intra = (schedule.round[routed.queue == queue] for queue in (INTER, INTRA))  # type: ignore[attr-defined]
    assert inter.max() == 6  # seven hops of a ring of eight
    assert intra.min() == 7
    assert intra.max() == schedule.rounds - 1
    stages = {queue: set(schedule.own[routed.queue_of == queue].tolist()) for queue in (INTER, INTRA, LOCAL)}  # type: ignore[attr-defined]
    assert stages == {INTER: {0}, INTRA: {7}, LOCAL: {schedule.rounds}}


def test_a_hop_between_nodes_uses_all_ranks_of_both() -> None:
    """Each tile that crosses at hop 3 -> 4 or 7 -> 0 has four parts, from all four ranks of a node to all four of the
    other."""
    _, schedule = scheduled(problem([400], 8, ap.masks.full(), nodes=2), Zeppelin(parts=4), 4)
    edges = schedule.edges
    crossing = np.flatnonzero(edges.src // 4 != edges.dst // 4)
    for node in (0, 1):
        out = crossing[edges.src[crossing] // 4 == node]
        for home in np.unique(edges.home[out]):
            of_tile = out[edges.home[out] == home]
            assert sorted(edges.src[of_tile].tolist()) == list(range(4 * node, 4 * node + 4))
            assert len({*edges.dst[of_tile].tolist()}) == 4
            first = 3 + 4 * node  # the rank of the ring that has the rows
            dispatched = of_tile[edges.src[of_tile] != first]
            assert (edges.src[edges.parent[dispatched]] == first).all()
    # 7 hops, of which one or two cross and take three rounds
    assert schedule.rounds == 7 + 2 * 2


@pytest.mark.parametrize("proxies", [1, 2, 4])
def test_relays_carry_the_rows_of_their_children(proxies: int) -> None:
    star, schedule = scheduled(MADE, Zeppelin(capacity=104, parts=proxies), proxies)
    edges, arrives = schedule.edges, schedule.routed.arrives
    child = np.flatnonzero(edges.parent >= 0)
    parent = edges.parent[child]
    assert (parent < child).all()
    assert (edges.dst[parent] == edges.src[child]).all()
    assert (schedule.round[parent] < schedule.round[child]).all()
    for column in ("tile", "home", "row", "rows"):
        assert (getattr(edges, column)[parent] == getattr(edges, column)[child]).all()
    assert (edges.src[edges.parent < 0] == edges.home[edges.parent < 0]).all()
    assert (edges.dst[arrives] == star.dst).all()
    assert (edges.row[arrives] <= star.row).all()
    assert (edges.row[arrives] + edges.rows[arrives] >= star.row + star.rows).all()


# --- whole plans

WAYS = {
    "paper": ({}, {}),
    "direct": ({"cap": "enforce", "parts": 1}, {"proxies": 1}),
    "proxies": ({"cap": "enforce", "parts": 2}, {"proxies": 2, "local": "even"}),
    "coarse_proxies": ({"cap": "enforce", "parts": 1}, {"proxies": 4, "local": "first"}),
}


def planned(batch: ap.Batch, nodes: int, ranks_per_node: int, way: str) -> Plan:
    place, schedule = WAYS[way]
    steps = {"shard": {"sequences": {}}, "place": {"zeppelin": place}, "schedule": {"queues": schedule}}
    return ap.plan(batch, ap.Cluster(nodes, ranks_per_node), MODEL, ap.Recipe("zeppelin", steps))


@pytest.mark.parametrize(
    ("mask", "way", "shape"),
    sparse_product(4, ("causal", "window", "full", "prefix"), WAYS, ((1, 1), (1, 4), (2, 2), (2, 4), (4, 2))),
)
def test_plans_equal_the_oracle(mask: str, way: str, shape: tuple[int, int]) -> None:
    plan = planned(ap.Batch.from_lengths([61, 30, 9, 7, 1], MASKS[mask]), *shape, way)
    compare(plan, "default", (2, 1, 4, 4, False, None), 3)


@pytest.mark.parametrize("way", WAYS)
def test_plans_of_64_ranks_verify(way: str) -> None:
    lengths = lognormal_lengths(0, 64 * 2048, median=256, longest=65_536)
    plan = planned(ap.Batch.from_lengths(lengths), 8, 8, way)
    assert {phase for _, phase in plan.programs} == set(PHASES)
    if way != "paper":
        assert plan.report["imbalance"]["tokens"] <= 0.02
