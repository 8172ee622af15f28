"""Prices of recurrent layers, against the formulas written out."""

from __future__ import annotations

import pytest

import apportion as ap
from apportion import Hardware, Recurrent
from apportion.planner.cost import CostModel
from apportion.planner.search.candidates import ALIGN
from apportion.planner.simulate import recurrent as prices, simulate

KIND = Recurrent(heads=4, key_dim=32, value_dim=64, conv=4, layers=3)
HARDWARE = Hardware.load("h100")


def model(kind: Recurrent = KIND) -> ap.Model:
    return ap.Model(q_heads=4, kv_heads=4, head_dim=32, layers=1, recurrent={"linear": kind})


def run(
    lengths: list[int], ranks: int, kind: Recurrent = KIND, phase: str = "forward"
) -> prices.RecurrentRun:
    cluster = ap.Cluster(ranks_per_node=ranks)
    plan = ap.plan(ap.Batch.from_lengths(lengths), cluster, model(kind), recipe="contiguous")
    return simulate(plan, HARDWARE).recurrent["linear", phase]


def flop_us(kind: Recurrent = KIND) -> float:
    costs = CostModel(HARDWARE, model(kind))
    return float(costs.linear_us(1)) / (2 * costs.linear_parameters * prices.SHARE)


def test_whole_documents_take_only_the_time_of_the_kernel() -> None:
    found = run([128, 128], 2)
    chunk, key, value = prices.CHUNK, 32, 64
    summary, scan = 2 * chunk * (key + value) + 4 * key * value, 2 * chunk * (2 * key + value)
    flops = 4 * (summary + scan + 2 * key * value)
    assert found.makespan_us == pytest.approx(128 * flops * flop_us())
    assert (found.bytes, found.fold_us, found.halo_us, found.states_us) == (0, 0.0, 0.0, (0.0, 0.0))
    assert found.ideal_us == pytest.approx(found.makespan_us)


def test_a_document_on_two_ranks_sends_its_state_and_waits_for_one() -> None:
    found = run([256], 2)
    state = 4 * 32 * 64  # bytes of a head, of which each rank folds two
    halo = 3 * KIND.conv_channels * 2
    # the first run's U of two heads goes to the other rank, the incoming state of two heads comes back from the first
    assert found.bytes == halo + 2 * state + 2 * state
    costs = CostModel(HARDWARE, model())
    sent = 2 * state
    wire = sent / 450e3 + 5 + 2 * float(costs.rowop_us(2 * sent))
    assert found.states_us == pytest.approx((wire, wire))
    kernel = 128 * prices.token_flops(KIND) * flop_us()
    assert found.kernel_us.tolist() == pytest.approx([kernel, kernel])
    more = 128 * prices.transition_flops(KIND) * flop_us()  # on rank 1, whose only run is a last one
    after = 128 * prices.output_flops(KIND) * flop_us()
    waited = max(kernel + more, kernel + 2 * wire + found.fold_us)
    assert found.makespan_us == pytest.approx(found.halo_us + waited + after)
    assert found.summary_us.tolist() == pytest.approx([0.0, more + after])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_short_last_run_waits_for_its_state(phase: str) -> None:
    found = run([140, 116], 2, phase=phase)
    row = prices.token_flops(KIND) * flop_us() * (1 if phase == "forward" else prices.BACKWARD)
    exchanged = sum(found.states_us) + found.fold_us
    assert found.summary_us.tolist() == [0.0, 0.0]
    first, whole, last = 128 * row, 116 * row, 12 * row
    if phase == "forward":
        expected = max(found.halo_us + whole, found.halo_us + first + exchanged) + last
    else:
        expected = max(last + whole, last + exchanged + first + found.halo_us)
    assert found.makespan_us == pytest.approx(expected)


def test_a_middle_run_sends_its_transition_matrix() -> None:
    found = run([384], 3)
    more = 128 * (prices.transition_flops(KIND) + prices.output_flops(KIND)) * flop_us()
    assert found.summary_us.tolist() == pytest.approx([0.0, more, more])  # the last run is early


def test_a_chain_is_folded_step_by_step() -> None:
    short, long = run([4 * 64], 4), run([8 * 64], 8)
    assert long.fold_us - short.fold_us == pytest.approx(4 * prices.STEP_US, rel=0.05)


def test_a_plain_decay_sends_no_matrices() -> None:
    plain = Recurrent(heads=4, key_dim=32, value_dim=64, delta=False)
    matrices = Recurrent(heads=4, key_dim=32, value_dim=64)
    assert run([256], 4, plain).bytes < run([256], 4, matrices).bytes
    assert prices.transition_flops(plain) == 0 < prices.transition_flops(matrices)


def test_the_search_includes_the_time_of_recurrent_layers() -> None:
    cluster, batch = ap.Cluster(ranks_per_node=4), ap.Batch.from_lengths([900, 300, 200, 100])
    plan = ap.plan(batch, cluster, model(), recipe="auto", hardware=HARDWARE)
    found, search = simulate(plan, HARDWARE), plan.report["search"]
    total = found.forward_ms + found.backward_ms + KIND.layers * found.recurrent_ms
    assert search["ms"] == pytest.approx(total / (1 + KIND.layers))


@pytest.mark.parametrize("recipe", ["fcp", "blend"])
def test_cuts_are_at_multiples_of_the_kernels_chunk(recipe: str) -> None:
    """With the alignment of the candidates of `auto`, a run that continues on another rank leaves no chunk partly
    empty."""
    steps = {"shard": {"sequences": {}}, "place": {"blend": {"weigh": "time", "align": ALIGN}}}
    aligned = {"name": "aligned", "steps": {**steps, "schedule": {"matchings": {}}}}
    requested = aligned if recipe == "blend" else recipe
    batch = ap.Batch.from_lengths([9000, 5001, 2000, 383])
    plan = ap.plan(batch, ap.Cluster(ranks_per_node=4), model(), recipe=requested)
    assert plan.recurrence is not None
    runs = plan.recurrence["runs"]
    leads = runs["rows"][runs["leads"] > 0]
    assert len(leads) > 2
    assert not (leads % prices.CHUNK).any()
