"""The executor launches as many kernels, messages and rounds as the simulator counts, for every strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from apportion import Batch, Plan, PlanHandle, Sequence, planned_attention, simulate
from apportion.backends.torch.recording import RecordingDevice
from apportion.ir.plan.messages import ALIGNMENT
from apportion.ir.tensors import PHASES
from tests.ranks import cases
from tests.support.sparse import sparse
from tests.support.strategies import STRATEGIES, WIDE, plan_of

MATRIX = STRATEGIES | WIDE


def recorded_run(plan: Plan, rank: int) -> tuple[list[tuple[Any, ...]], int]:
    """(kernels, messages, rounds) of a rank, forward and backward, on a recording device; and the bytes sent."""
    device, header = RecordingDevice(rank, plan.header.ranks), plan.header
    handle, counts_by_phase = PlanHandle(plan.for_rank(rank), device, engine=device.engine), []
    widths, kv_heads = (header.head_dim, header.head_dim, header.v_head_dim), header.kv_heads
    shapes = zip((header.q_heads, kv_heads, kv_heads), widths, strict=True)
    rows = [torch.zeros(handle.rows, *each, dtype=handle.dtype, requires_grad=True) for each in shapes]
    out = planned_attention(*rows, handle)
    counts_by_phase.append((device.launches.total(), device.posts, device.rounds))
    device.reset()
    out.backward(torch.zeros_like(out))
    counts_by_phase.append((device.launches.total(), device.posts, device.rounds))
    loaded = [handle.executable("default", phase, torch.device("cpu")) for phase in PHASES]
    rounds = {id(one): one for each in loaded for one in each.rounds.of_step.values()}
    return counts_by_phase, sum(message.size for one in rounds.values() for message in one.sends)


CELLS = [
    (name, *case) for name in MATRIX for case in (("causal", "wide"), ("tree", "wide"), ("causal", "model"))
]


@pytest.mark.parametrize("cell", sparse(CELLS, 4), ids="-".join)
def test_launches_messages_and_rounds_equal_the_simulators(cell: tuple[str, ...]) -> None:
    name, mask, sent = cell
    batch = Batch.from_sequences([Sequence(*each) for each in cases.BATCHES[mask]])
    model = cases.model(4 if name in WIDE else 2, "bf16", (16, 24), kv_heads=2)
    plan = plan_of(batch, name, 4, replace(model, sent_gradients=sent))
    simulated = simulate(plan).runs
    for rank in range(4):
        counts_by_phase, sent = recorded_run(plan, rank)
        tiles = [plan.programs["default", phase].rank(rank)["transfers"]["send"].sum() for phase in PHASES]
        simulated_bytes = sum(simulated["default", phase].sent_bytes[rank] for phase in PHASES)
        assert 0 <= sent - simulated_bytes <= 2 * ALIGNMENT * sum(tiles)  # parts of a message are aligned
        for phase, counts in zip(PHASES, counts_by_phase, strict=True):
            run = simulated["default", phase]
            assert counts == (run.launches[rank], run.messages[rank], run.rounds[rank]), (rank, phase)
