"""Transfer times, by hand: senders that share a receiver, NICs with one peer, and short messages."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Batch, Cluster, ConfigError, Hardware, Model
from apportion.ir.request.figures import Figure, MessageRates
from apportion.planner import api
from apportion.planner.congestion import Congestion
from apportion.planner.cost import CostModel
from apportion.planner.simulate import prepare, run_all
from tests.support.timelines import Unit, forward, run_invariants, transfers

H100 = Hardware.load("h100")
RATES = MessageRates((64, 1024), (0.25, 1.0), (0.2, 0.9), (0.3, 1.0), "made up", True)


def to_rank_0(senders: int) -> list[str]:
    """Rank 0 receives eight rows, 16 us on the wire, from each of the others."""
    rows = ", ".join(f"receive KV.work[{8 * i}:{8 * i + 8}) from {i + 1}" for i in range(senders))
    return [f"launch 0: {rows}\nwait 0", *["launch 0: send KV.home[0:8) to 0\nwait 0"] * senders]


@pytest.mark.parametrize("senders", [1, 2, 3, 5])
def test_each_further_sender_makes_all_of_them_slower(senders: int) -> None:
    nodes = {"nodes": senders + 1, "ranks_per_node": 1}
    for incast, most in ((0.0, 9), (0.5, 9), (0.5, 2)):
        run = forward(*to_rank_0(senders), costs=Unit(congestion=Congestion(incast, most)), **nodes)
        slow = 1 + incast * min(senders - 1, most)
        assert run.makespan_us == pytest.approx(16 * senders * slow + 5)
        run_invariants(run)


def test_ranks_that_share_a_nic_are_one_sender() -> None:
    """Ranks 1 and 2 are on one node; with a NIC each they congest rank 0."""
    program = [*to_rank_0(2), ""]
    program = [program[0].replace("from 2", "from 3").replace("from 1", "from 2"), "", *program[1:3]]
    for nics, slow in ((1, 1.0), (2, 1.5)):
        cluster = {"nodes": 2, "ranks_per_node": 2, "nics_per_node": nics}
        run = forward(*program, costs=Unit(congestion=Congestion(0.5)), **cluster)
        assert run.makespan_us == pytest.approx(2 * 16 * slow + 5)


def test_a_single_peer_has_a_share_of_the_rate() -> None:
    alone = Congestion(one_peer=0.5)
    nodes = {"nodes": 3, "ranks_per_node": 1}
    single = ["launch 0: send KV.home[0:8) to 1\nwait 0", "launch 0: receive KV.work[0:8) from 0\nwait 0", ""]
    assert forward(*single, costs=Unit(congestion=alone), **nodes).makespan_us == 32 + 5
    assert forward(*to_rank_0(2), costs=Unit(congestion=alone), **nodes).makespan_us == 32 + 5
    inside = forward(*single, costs=Unit(congestion=alone), nodes=1, ranks_per_node=3)
    assert inside.makespan_us == 8 + 3  # congestion is only between nodes


def test_short_messages_reach_a_share_of_the_rate() -> None:
    """A row of 64 bytes reaches a quarter of the rate; longer messages are interpolated linearly in the logarithm."""
    nodes = {"nodes": 2, "ranks_per_node": 1}
    for rows, share in ((1, 0.25), (8, 0.25 + 0.75 * 3 / 4), (16, 1.0), (32, 1.0)):
        half = rows // 2 or 1  # in two tiles, which are one message
        tiles = [(0, half), (half, rows)] if rows > 1 else [(0, 1)]
        sent = ", ".join(f"send KV.home[{a}:{b}) to 1" for a, b in tiles)
        received = ", ".join(f"receive KV.work[{a}:{b}) from 0" for a, b in tiles)
        costs = Unit(congestion=Congestion(rates=RATES))
        run = forward(f"launch 0: {sent}\nwait 0", f"launch 0: {received}\nwait 0", costs=costs, **nodes)
        assert run.makespan_us == pytest.approx(2 * rows / share + 5)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=8),
    recipe=st.sampled_from(["fcp_paper", "dcp", "distca", "blend", "ring"]),
    incast=st.floats(0, 1),
    one_peer=st.floats(0.3, 1),
)
def test_congestion_speeds_up_no_transfer_and_bounds_still_hold(
    lengths: list[int], recipe: str, incast: float, one_peer: float
) -> None:
    plan = api.plan(Batch.from_lengths(lengths), Cluster(2, 2), Model(4, 2, 16), recipe=recipe, verify=False)
    plain = CostModel(H100, plan.request.model)
    figures = {"incast": Figure(incast, "x"), "one_peer": Figure(one_peer, "x")}
    slow = CostModel(replace(H100, **figures), plan.request.model)
    for own, item in zip(prepare(plan, plain), prepare(plan, slow), strict=True):
        far = own.traffic.in_port >= 2 * plan.header.ranks
        assert (item.traffic.wire_us[far] >= own.traffic.wire_us[far]).all()
        assert (item.traffic.wire_us[~far] == own.traffic.wire_us[~far]).all()
        (run,) = run_all(plan, [item], slow).runs.values()
        assert own.least_us <= item.least_us <= run.makespan_us * (1 + 1e-9)
        if incast == 0 and one_peer == 1:
            assert transfers(run) == transfers(next(iter(run_all(plan, [own], plain).runs.values())))


def test_congestion_figures_come_from_the_hardware_file() -> None:
    incast = {"incast": Figure(0.17, "x", interval=(0.0, 0.34)), "incast_peers": Figure(7, "x")}
    hardware = replace(H100, **incast, one_peer=Figure(0.65, "x"), message_rates=RATES)
    assert CostModel(H100, Model()).congestion is None
    assert CostModel(hardware, Model()).congestion == Congestion(0.17, 7, 0.65, RATES)
    assert Hardware.from_data(json.loads(json.dumps(hardware.to_data()))) == hardware
    assert hardware.digest() != H100.digest()
    for name, value in (("bytes", (64, 64)), ("low", (0.2,)), ("share", (0.5, 1.0))):
        with pytest.raises(ConfigError, match=f"hardware.message_rates.{name}"):
            replace(RATES, **{name: value})
    assert RATES.of(np.array([1, 64, 256, 1 << 20])).tolist() == pytest.approx([0.25, 0.25, 0.625, 1.0])
