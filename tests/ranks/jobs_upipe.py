"""Rank pool jobs with head stages: attention layers with projections, plain or under FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apportion import Communicator, HeadProjection, planned_attention_block
from apportion.backends.torch.autograd import backward_home, prepare, run
from apportion.backends.torch.executor import Layer as AttentionLayer
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.demo.decoder import rotate
from apportion.ir.tensors import Tensor as Name
from tests.ranks import cases, jobs

Array = NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    q_heads: int
    kv_heads: int
    head_dim: int = 4
    v_head_dim: int = 4
    hidden: int = 12
    depth: int = 1
    dtype: torch.dtype = torch.float64
    autocast: bool = False


class Layer(nn.Module):
    """Attention with biases, QK-norm, RoPE and an output projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s = sizes
        self.q = nn.Linear(s.hidden, s.q_heads * s.head_dim)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head_dim)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.v_head_dim)
        self.out = nn.Linear(s.q_heads * s.v_head_dim, s.hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(s.head_dim, eps=1e-6) for _ in range(2))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        self.heads = range(s.q_heads), range(s.kv_heads)
        widths = s.head_dim, s.v_head_dim
        self.project = HeadProjection(self.q, self.k, self.v, *widths, *self.norms, rotary=rotate)

    def forward(self, hidden: Tensor, position_ids: Tensor, handle: Any, mask: Tensor | None) -> Tensor:
        """Runs the layer on hidden [n, E] under the handle's plan; without a handle, all heads with a dense mask."""
        if handle is None:
            out = cases.sdpa(*self.project(hidden, position_ids, *self.heads), None, mask)
        else:
            params = self.project.params
            out = planned_attention_block(hidden, position_ids, handle, self.project, params)
        return hidden + self.out(out.flatten(1))


class Stack(nn.Module):
    """A stack of layers whose weights depend only on the sizes and are exact in bfloat16."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.depth))
        self.to(torch.bfloat16).to(sizes.dtype)

    def forward(self, hidden: Tensor, *arguments: PlanHandle | Tensor | None) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *arguments)
        return hidden


def results(
    stack: Any, autocast: bool, hidden: Any, loss_weight: Any, *arguments: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """out, the gradient of hidden, and the gradients of all parameters by name (unsharded under FSDP2)."""
    x = jobs.leaf(hidden, next(stack.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, autocast):
        out = stack(x, *arguments)
    (out * torch.from_numpy(loss_weight).to(out.dtype)).sum().backward()
    grads = {name: _whole(p.grad).double().numpy() for name, p in stack.named_parameters()}
    return out.detach().double().numpy(), x.grad.double().numpy(), grads


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def run_planned(
    comm: Communicator, sizes: Sizes, sharded: bool | None, shard: tuple[bytes, Array, Array]
) -> tuple[Array, Array, dict[str, Array]]:
    """Runs the layers on this rank's rows. sharded: FSDP2's `reshard_after_forward` (gradients are means), or None."""
    piece, hidden, loss_weight = shard
    handle, stack = jobs.handle_of(comm, piece), Stack(sizes)
    if sharded is not None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(comm._groups[0], "cpu")
        for module in (*stack.layers, stack):
            fully_shard(module, mesh=mesh, reshard_after_forward=sharded)
    return results(stack, sizes.autocast, hidden, loss_weight, handle.position_ids, handle, None)


def arena_rows(comm: Communicator, shard: tuple[bytes, int]) -> list[dict[int, tuple[int, ...]]]:
    """{tensor: (rows, heads)} of the executor's work rows in a call, for each phase."""
    piece, hidden = shard
    handle, found = jobs.handle_of(comm, piece), []
    for phase in ("forward", "backward"):
        x = torch.zeros(handle.rows, hidden, dtype=handle.dtype)
        home = {Name.X: (x, handle.position_ids)}
        memory = prepare(handle, handle.kinds[0], phase, home, AttentionLayer(Score(1.0))).memory
        found.append({int(name): tuple(parts[0].shape[:2]) for name, parts in memory.work.items()})
    return found


def held_bytes(comm: Communicator, sizes: Sizes, shard: tuple[bytes, Array, Array]) -> tuple[int, int]:
    """The bytes of home rows (without position ids) and work rows of a backward on the stage engine, before and after
    its last step, dX."""
    piece, hidden, do = shard
    handle, layer = jobs.handle_of(comm, piece), Layer(sizes).to(sizes.dtype)
    x, kind = jobs.to_device(hidden).to(sizes.dtype), handle.kinds[0]
    arguments = {Name.X: (x, handle.position_ids)}
    program = AttentionLayer(Score(0.5), project=layer.project, params=tuple(layer.project.params))
    out, lse = run(handle, kind, "forward", arguments, program).output(sizes.dtype)
    gradient = jobs.to_device(do).to(sizes.dtype)
    machine = prepare(handle, kind, "backward", backward_home(arguments, out, lse, gradient), program)
    *steps, last = machine.program.steps
    machine.execute(steps)
    found = [_memory_bytes(machine)]
    machine.execute([last])
    machine.close()
    return found[0], _memory_bytes(machine)


def _memory_bytes(machine: Any) -> int:
    home = {name: parts[:1] if name == Name.X else parts for name, parts in machine.memory.home.items()}
    storages = [one.untyped_storage() for parts in (*home.values(), machine._results) for one in parts]
    home_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return home_bytes + sum(one.nbytes for parts in machine.memory.work.values() for one in parts)
