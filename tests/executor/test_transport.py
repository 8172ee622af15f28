"""The transport, and the memory that calls share."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apportion import Batch, Cluster, Communicator, Model, Plan, PlanHandle, planned_attention
from apportion.backends.torch import engines
from apportion.backends.torch.autograd import backward_home, run, sink_gradient
from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.executor import Layer
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.memory.arenas import Pool
from apportion.backends.torch.recording import RecordingDevice
from apportion.ir.errors import ConfigError, ExecutionError, UnknownNameError
from apportion.ir.isa import Op
from apportion.ir.tensors import PHASES, Tensor as Name
from apportion.planner import api
from tests.ranks import jobs_transport
from tests.ranks.rank_pool import Pool as Ranks

CPU = torch.device("cpu")


def test_each_channel_has_its_own_process_group(pool: Ranks) -> None:
    for groups, same, agreed in pool.run(jobs_transport.channels, 8):
        assert groups >= 3
        assert same
        assert agreed


def test_ranks_gather_any_number_of_numbers(pool: Ranks) -> None:
    """More than 63 numbers, one of which is the transport's own, take a second exchange."""
    sizes = [0, 60, 61, 62, 63, 64, 200]
    expected = [[[*range(size)], [*range(size + 1)]] for size in sizes]
    assert pool.run(jobs_transport.gathers, 2, sizes) == [expected] * 2


def test_gradients_of_a_row_sent_to_many_are_summed_in_float32() -> None:
    """In bfloat16 a sum of ones would stop growing at 256."""
    single_rank: Any = SimpleNamespace(rank=0, ranks=1)
    numbers = torch.arange(1000)
    spread = Exchange(single_rank, "rows", 0 * numbers, [1000], numbers, [1000], 1000)
    row = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    spread(row).sum().backward()
    assert row.grad.tolist() == [[1000.0, 1000.0]]


def test_a_buffer_is_reused_by_the_next_layer() -> None:
    pool = Pool()
    first = pool.take(100, CPU)
    pool.give(first)
    assert pool.take(80, CPU) is first
    second = pool.take(80, CPU)
    assert second is not first
    pool.give(second)
    larger = pool.take(1000, CPU)  # replaces a buffer that is too small
    assert larger.data.numel() == 1000
    pool.give(larger)
    assert pool.take(80, CPU) is larger


def small_plan(dtype: str = "bf16", ranks: int = 2) -> Plan:
    model = Model(4, 2, 64, dtype=dtype)
    return api.plan(Batch.from_lengths([700, 300, 24]), Cluster(1, ranks), model, "fcp")


def inputs(handle: PlanHandle) -> list[torch.Tensor]:
    heads = handle.slice.header.q_heads, handle.slice.header.kv_heads, handle.slice.header.kv_heads
    return [torch.zeros(handle.rows, n, 64, dtype=handle.dtype, requires_grad=True) for n in heads]


def test_layers_share_memory_and_results_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, device = small_plan(), RecordingDevice(1, 2)
    handle = PlanHandle(plan.for_rank(1), device, engine=device.engine).prepare("cpu")
    buffers = []
    take = device.pool.take
    monkeypatch.setattr(device.pool, "take", lambda *args: buffers.append(take(*args)) or buffers[-1])
    outs = [planned_attention(*inputs(handle), handle) for _ in range(3)]
    assert len(buffers) == 3
    assert len(set(map(id, buffers))) == 1
    assert len({out.data_ptr() for out in outs}) == 3


def test_a_recording_device_counts_the_launches_of_an_instruction() -> None:
    plan, device = small_plan(), RecordingDevice(1, 2)
    handle = PlanHandle(plan.for_rank(1), device, engine=device.engine)
    q, k, v = inputs(handle)
    out = planned_attention(q, k, v, handle)
    steps = handle.program("default", "forward").steps
    assert device.launches["attend"] == sum(step.op == Op.ATTEND for step in steps)
    assert device.rounds == sum(step.op == Op.LAUNCH for step in steps)
    device.reset()
    out.backward(torch.zeros_like(out))
    steps = handle.program("default", PHASES[1]).steps
    grads = sum(step.op == Op.ATTEND_GRAD for step in steps)
    assert (device.launches["dq"], device.launches["dkdv"]) == (grads, grads)
    assert sum(device.launches.values()) <= 1.5 * len(steps)


class HostWaits(TorchDispatchMode):
    """Counts ops that make the host wait for the device: reading a number, or creating a tensor from host numbers."""

    OPS = frozenset(
        getattr(torch.ops.aten, name).default
        for name in ("_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "is_nonzero")
    )

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in self.OPS:
            self.found.append(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ["stage", "flash", "plain"])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_layer_waits_for_its_device(engine: str, sinks: bool) -> None:
    plan, device = small_plan(ranks=1), RecordingDevice(0, 1)
    handle = PlanHandle(plan.for_rank(0), device, engine=device.engine if engine == "stage" else engine)
    q, k, v = (x.detach() for x in inputs(handle))
    layer = Layer(Score(0.1), torch.zeros(4, dtype=torch.bfloat16) if sinks else None)

    def run_both() -> tuple[torch.Tensor | None, ...]:
        home = {Name.Q: (q,), Name.KV: (k, v)}
        out, lse = run(handle, "default", "forward", home, layer).output(q.dtype)
        machine = run(handle, "default", "backward", backward_home(home, out, lse, out), layer)
        return *machine.input_gradients(q.dtype), sink_gradient(layer, machine.gradients)

    run_both()
    with HostWaits() as waits:
        run_both()
    assert not waits.found


def test_sinks_are_one_number_per_head_and_need_not_be_contiguous() -> None:
    handle = PlanHandle(small_plan("fp32", 1).for_rank(0))
    rows, table = inputs(handle), torch.tensor([0.0, 100.0] * 4)
    strided, expected = (planned_attention(*rows, handle, sinks=x) for x in (table[::2], torch.zeros(4)))
    torch.testing.assert_close(strided, expected)
    for sinks in (torch.zeros(1), torch.zeros(4, 1), torch.zeros(8)):
        with pytest.raises(ExecutionError, match=r"sinks has shape .* is \(4,\)"):
            planned_attention(*rows, handle, sinks=sinks)
    with pytest.raises(ExecutionError, match="must be floating-point numbers on cpu"):
        planned_attention(*rows, handle, sinks=torch.zeros(4, dtype=torch.int64))


def test_a_handle_stays_in_its_process() -> None:
    handle = PlanHandle(small_plan(ranks=1).for_rank(0))
    assert copy.deepcopy(handle) is handle
    with pytest.raises(ExecutionError, match=r"send `handle.slice.encode\(\)`"):
        handle.__reduce__()


def test_an_unavailable_engine_is_refused_with_its_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = PlanHandle(small_plan(ranks=1).for_rank(0))
    assert handle.engine_on(CPU) is engines.ENGINES["flash"]
    with pytest.raises(ConfigError, match="run on GPUs"):
        PlanHandle(handle.slice, engine="stage").engine_on(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert PlanHandle(handle.slice).engine_on(CPU) is engines.ENGINES["stage"]
    wide = PlanHandle(small_plan("fp64", 1).for_rank(0), engine="stage")
    with pytest.raises(ConfigError, match="float16, bfloat16 and float32"):
        wide.engine_on(CPU)
    with pytest.raises(UnknownNameError, match="engine"):
        PlanHandle(handle.slice, engine="fast")


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), ["FA3"]), ((10, 0), []), ((8, 0), [])])
def test_the_newest_available_flash_attention_is_activated(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: list[str]
) -> None:
    from torch.nn import attention

    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3"])
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    engines.activate_newest_flash(torch.device("cuda", 0))
    engines.activate_newest_flash(CPU)
    assert activated == chosen


def test_a_group_of_only_gpus_needs_a_group_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.backends.torch import transport

    monkeypatch.setattr(transport, "_has_backend", lambda group, backend: backend == "nccl")
    comm = Communicator.__new__(Communicator)
    comm._base, comm._hosts, comm._creates_groups = "nccl", None, False
    with pytest.raises(ConfigError, match="pass a gloo group of the same ranks"):
        comm._host_group()
