"""Plans of a run in an envelope: rows, buffers and tables are the same in every step, and so are results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import apportion as ap
from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.backends.torch.recording import RecordingDevice
from apportion.ir.errors import ConfigError

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=16, dtype="bf16")
RANKS, STEPS = 4, 32


def slices(rank: int) -> Iterator[ap.Slice]:
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        lengths = rng.integers(1, 300, rng.integers(2, 9)).tolist()
        recipe = ("fcp", "mixed", "ulysses", "ring")[step % 4]
        yield ap.plan(ap.Batch.from_lengths(lengths), ap.Cluster(1, RANKS), MODEL, recipe).for_rank(rank)


def handle_of(piece: ap.Slice, envelope: Envelope = UNPADDED) -> ap.PlanHandle:
    device = RecordingDevice(piece.rank, RANKS)
    return ap.PlanHandle(piece, device, device.engine, envelope=envelope).prepare("cpu")


def test_shapes_buffers_and_tables_are_equal_over_many_steps() -> None:
    pieces = list(slices(rank=2))
    envelope = Envelope.around((handle_of(piece).sizes() for piece in pieces), 1.0)
    assert len({handle_of(piece).sizes() for piece in pieces}) > STEPS / 2
    shapes = set()
    for piece in pieces:
        handle = handle_of(piece, envelope)
        q, k = (torch.zeros(handle.padded_rows, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
        shapes.add((*handle.sizes(), ap.planned_attention(q, k, k, handle).shape))
    assert shapes == {(envelope.rows, envelope.buffer_bytes, envelope.table_numbers, (envelope.rows, 4, 16))}


def test_another_step_compiles_nothing() -> None:
    counter, weight = CompileCounterWithBackend("eager"), torch.eye(64, dtype=torch.bfloat16)

    @torch.compile(backend=counter, dynamic=False)
    def layer(x: torch.Tensor, handle: ap.PlanHandle) -> torch.Tensor:
        q, k = (x @ weight).view(-1, 4, 16), x[:, :32].view(-1, 2, 16)
        return ap.planned_attention(q, k, k, handle).flatten(1) @ weight

    pieces = [piece for piece, _ in zip(slices(rank=1), range(12), strict=False)]
    envelope = Envelope.around(handle_of(piece).sizes() for piece in pieces)
    for piece in pieces:
        handle = handle_of(piece, envelope)
        layer(torch.zeros(handle.padded_rows, 64, dtype=torch.bfloat16), handle)
    assert counter.frame_count == 1


@pytest.mark.parametrize("field", ["rows", "buffer_bytes", "table_numbers"])
def test_a_plan_that_exceeds_the_envelope_is_refused_by_field(field: str) -> None:
    piece = next(slices(rank=0))
    need = dict(zip(("rows", "buffer_bytes", "table_numbers"), handle_of(piece).sizes(), strict=True))[field]
    handle_of(piece, Envelope(**{field: need}))
    with pytest.raises(ConfigError, match=f"envelope.{field} = {need - 1}: a plan needs {need} on this rank"):
        handle_of(piece, Envelope(**{field: need - 1}))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"envelope\.rows = -1"):
        Envelope(rows=-1)
    with pytest.raises(ConfigError, match="must be the sizes of at least one plan"):
        Envelope.around([])
