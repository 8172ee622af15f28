"""Scenarios: their changes, plans' times under them by hand, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apportion import Batch, Cluster, ConfigError, Hardware, Model
from apportion.ir.request.figures import Figure
from apportion.planner import api
from apportion.planner.congestion import Congestion
from apportion.planner.cost import CostModel
from apportion.planner.simulate import makespans_us, simulate, simulate_with
from apportion.planner.simulate.scenarios import SCENARIOS, SET_ASIDE, Scenario, apply
from tests.support.timelines import CLUSTER, Unit, plan_of, run_invariants, transfers, work

H100 = Hardware.load("h100")
BY_NAME = {one.name: one for one in SCENARIOS}
LINKS = Cluster(1, 2, **CLUSTER)
PROGRAMS = (
    f"launch 0: send KV.home[0:8) to 1\n{work(20)}\nwait 0",
    f"launch 0: receive KV.work[0:8) from 0\n{work(4)}\nwait 0\n{work(5)}",
)


def finish_times(scenario: Scenario) -> list[float]:
    """The finish times of the two ranks on the links of the scenario."""
    _, cluster = apply(scenario, H100, LINKS)
    run = simulate_with(plan_of(*PROGRAMS), Unit(), cluster=cluster).runs["default", "forward"]
    return run.finish_us.tolist()


def test_slower_links_by_hand() -> None:
    """8 us on the wire and 3 of latency, then work of 5."""
    assert finish_times(BY_NAME["nominal"]) == [20.0, 16.0]
    assert finish_times(BY_NAME["half-bandwidth"]) == [20.0, 2 * 8 + 3 + 5]
    assert finish_times(BY_NAME["latency-x4"]) == [20.0, 8 + 4 * 3 + 5]
    assert finish_times(BY_NAME["slow-kernels"]) == [20.0, 16.0]  # set by the hardware, not by the links
    assert finish_times(BY_NAME["contention"]) == [20.0, 16.0]
    assert finish_times(BY_NAME["all"]) == [28.0, 2 * 8 + 4 * 3 + 5]


def test_scenarios_keep_what_they_do_not_change() -> None:
    cluster = Cluster(2, 4, speeds=(1.0,) * 8)
    assert BY_NAME["nominal"] is SCENARIOS[0]
    hardware, links = apply(SCENARIOS[0], H100, cluster)
    assert hardware is H100
    assert links is cluster
    measured = replace(H100, contention=Figure(0.2, "measured"))
    assert apply(BY_NAME["contention"], measured, cluster)[0] is measured
    measured = replace(H100, incast=Figure(0.2, "measured"), one_peer=Figure(0.5, "measured"))
    assert apply(BY_NAME["incast"], measured, cluster)[0] is measured
    assert apply(BY_NAME["one-peer"], measured, cluster)[0] is measured


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenarios_scale_figures_and_grids(scenario: Scenario) -> None:
    hardware, cluster = apply(scenario, H100, H100.cluster(2))
    assert hardware.mismatch(cluster) == []
    assert cluster.inter_gbs == 50 * scenario.bandwidth
    assert cluster.intra_latency_us == 5 * scenario.latency
    assert hardware.contention.value == scenario.contention
    congestion = CostModel(hardware, Model()).congestion or Congestion()
    assert (congestion.incast, congestion.one_peer) == (scenario.incast, scenario.one_peer)
    assert Hardware.from_data(hardware.to_data()) == hardware
    changed = [name for name, figure in hardware.figures().items() if figure != H100.figures().get(name)]
    assert all(hardware.figures()[name].assumed for name in changed)
    assert all("scenario" in hardware.figures()[name].source for name in changed)
    assert (hardware.digest() == H100.digest()) == (scenario.name == "nominal")
    model, rows = Model(), np.array([128, 1000, 5000])
    scaled, own = CostModel(hardware, model), CostModel(H100, model)
    for phase in ("forward", "backward"):
        times = [cost.attention_us(phase, rows, rows, rows * rows, 32, 8) for cost in (scaled, own)]
        np.testing.assert_allclose(times[0], scenario.compute * times[1])
        assert scaled.launch_us(phase) == own.launch_us(phase)
        chains = [cost.chain_us(phase, rows, rows, 2 * rows) for cost in (scaled, own)]
        np.testing.assert_allclose(chains[0], scenario.compute * chains[1])
    assert float(scaled.linear_us(100)) == pytest.approx(scenario.compute * float(own.linear_us(100)))
    assert float(scaled.rowop_us(10**6)) == float(own.rowop_us(10**6))


def test_simulating_on_another_cluster_equals_a_plan_made_for_it() -> None:
    other = {"intra_gbs": 0.016, "intra_latency_us": 7.0, "speeds": [1.0, 0.5]}
    own = simulate_with(plan_of(*PROGRAMS, **other), Unit())
    slower = replace(LINKS, **other | {"speeds": (1.0, 0.5)})
    overridden = simulate_with(plan_of(*PROGRAMS), Unit(), cluster=slower)
    for key, run in own.runs.items():
        assert transfers(run) == transfers(overridden.runs[key])
        assert run.finish_us.tolist() == overridden.runs[key].finish_us.tolist()
    assert own.to_data() == overridden.to_data()
    assert overridden.cluster != overridden.plan.request.cluster


def test_a_cluster_with_another_number_of_ranks_is_refused() -> None:
    for shape in ((1, 4), (2, 1)):
        with pytest.raises(ConfigError, match=r"cluster.nodes x cluster.ranks_per_node = .*1 x 2 ranks"):
            simulate(plan_of(*PROGRAMS), cluster=Cluster(*shape))


@pytest.mark.parametrize("recipe", ["fcp", "ring", "zeppelin", "ulysses"])
def test_no_plan_is_faster_under_a_scenario(recipe: str) -> None:
    batch = Batch.from_lengths([20_000, 9000, 900, 500, 292, 3000, 2000, 800])
    cluster = Cluster(2, 4)
    plan = api.plan(batch, cluster, Model(8, 4, 64), recipe=recipe, verify=False)
    total = {}
    for scenario in SCENARIOS:
        hardware, links = apply(scenario, H100, cluster)
        found = simulate(plan, hardware, links)
        for run in found.runs.values():
            run_invariants(run, scenario.contention)
        total[scenario.name] = found.forward_ms + found.backward_ms
        assert found.hardware == ("h100" if scenario.name == "nominal" else f"h100-{scenario.name}")
    assert min(total.values()) == total["nominal"]
    assert max(total.values()) == total["all"]
    assert total["nominal"] < total["slow-kernels"] < 1.1 * total["nominal"]


def test_names_and_factors_are_checked() -> None:
    made = Scenario("mine", np.float32(0.5), np.int8(2), np.float32(2), np.float32(0.5))
    assert not [value for value in vars(made).values() if isinstance(value, np.generic)]
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert round(132 / 124 - 1, 3) == SET_ASIDE
    wrong = {"bandwidth": 0, "latency": -1, "compute": "1", "contention": float("nan"), "one_peer": 0}
    for field, value in wrong.items():
        with pytest.raises(ConfigError, match=f"scenario.{field}"):
            Scenario("mine", **{field: value})
    with pytest.raises(ConfigError, match=r"scenario\.name"):
        Scenario("a b")
    with pytest.raises(ConfigError, match=r"hardware\.figures\.contention"):
        apply(Scenario("mine", contention=99.0), H100, LINKS)


@pytest.mark.parametrize("recipe", ["ring", "contiguous"])
def test_makespans_under_all_scenarios_equal_those_of_simulations(recipe: str) -> None:
    plan = api.plan(Batch.from_lengths([3000, 500, 600, 40]), H100.cluster(2), Model(), recipe)
    cases = [apply(scenario, H100, H100.cluster(2)) for scenario in SCENARIOS]
    found = makespans_us(plan, [(CostModel(hardware, Model()), cluster) for hardware, cluster in cases])
    for (hardware, cluster), times in zip(cases, found, strict=True):
        runs = simulate(plan, hardware, cluster).runs
        assert times == {key: run.makespan_us for key, run in runs.items()}
