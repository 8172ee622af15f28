"""Jobs of the rank pool: functions `job(comm, ...)` that take and return plain data and that workers can import."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from apportion.ir.bytes.slices import Slice
from apportion.ir.isa import Op
from apportion.trainer.step.attention import (
    Communicator,
    PlanHandle,
    check_kernels,
    planned_attention,
    planned_attention_block,
)

#: the device of the tests, from an environment variable that is set before this module is imported
DEVICE = torch.device(os.environ.get("APPORTION_TEST_DEVICE", "cpu"))
Array = NDArray[Any]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shard(NamedTuple):
    """One rank's encoded slice and its float64 rows of a problem."""

    piece: bytes
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray


def handle_of(comm: Communicator, piece: bytes, padding: int = 0) -> PlanHandle:
    return PlanHandle(Slice.decode(piece), comm, padding=padding)


def inputs_of(comm: Communicator, shard: Shard) -> tuple[PlanHandle, list[Tensor]]:
    """The handle, and q, k and v as leaves."""
    handle = handle_of(comm, shard.piece)
    return handle, [leaf(x, handle.dtype) for x in (shard.q, shard.k, shard.v)]


def leaf(array: Array, dtype: torch.dtype) -> Tensor:
    return to_device(array).to(dtype).requires_grad_()


def to_device(array: Array) -> Tensor:
    return torch.from_numpy(array).to(DEVICE)


def to_arrays(tensors: Any) -> list[Any]:
    """Converts tensors to float64 arrays; keeps None."""
    return [t if t is None else t.detach().double().cpu().numpy() for t in tensors]


def attention(comm: Communicator, kind: Any, sinks: Any, options: dict[str, Any], shard: Shard) -> list[Any]:
    """out, dq, dk, dv, dsinks of one layer, as float64 arrays."""
    handle, (q, k, v) = inputs_of(comm, shard)
    logits = None if sinks is None else leaf(sinks, handle.dtype)
    out = planned_attention(q, k, v, handle, kind, sinks=logits, **options)
    out.backward(to_device(shard.do).to(handle.dtype))
    return to_arrays((out, *(t if t is None else t.grad for t in (q, k, v, logits))))


def there_and_back(comm: Communicator, dtype: str, columns: Any, rows: Array) -> tuple[Array, Array]:
    """Packs head columns of float32 rows [n, columns, width] into a message of a two-byte dtype, and unpacks them into
    the same columns; returns message and unpacked rows as float32 arrays."""
    from apportion.backends.torch.stage.launcher import default_launcher
    from apportion.backends.torch.stage.rowlists import SLOTS, Place, move, move_panels

    original, (count, of, width) = to_device(rows), rows.shape
    message = torch.empty(count, len(columns), width, dtype=DTYPES[dtype], device=DEVICE)
    found = torch.zeros_like(original)
    arrays: dict[Any, Tensor] = {"held": original, "message": message, "found": found}
    sent = Place("message", 0, tuple(range(len(columns))), len(columns), 2 * width, 2), 2 * width
    held, result = ((Place(name, 0, columns, of, 4 * width, 4), 4 * width) for name in ("held", "found"))
    for source, target in ((held, sent), (sent, result)):
        moves = move(list(move_panels([source], [target], count)))
        bases = [arrays[slot].data_ptr() for slot in moves.slots]
        tables = to_device(moves.panels), to_device(moves.chunks)
        args = *tables, *bases, *bases[:1] * (SLOTS - len(bases))
        default_launcher()("move", len(moves.chunks), args, moves.constants(dtype))
    return message.float().cpu().numpy(), found.cpu().numpy()


def attention_with_lse(
    comm: Communicator, sinks: Any, options: dict[str, Any], uses_out: bool, compiled: bool, loss_of: Any
) -> list[Any]:
    """out, lse, dq, dk, dv, dsinks of one layer in a batch of one, as float64 arrays; the loss uses lse, and out if
    `uses_out`."""
    shard, dlse = loss_of
    handle = handle_of(comm, shard.piece)
    q, k, v = (leaf(x[None], handle.dtype) for x in (shard.q, shard.k, shard.v))
    logits = None if sinks is None else leaf(sinks, handle.dtype)

    def layer(q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        return planned_attention(q, k, v, handle, sinks=logits, return_lse=True, **options)

    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out, lse = layer(q, k, v, logits)
    loss = (lse * to_device(dlse)).sum()
    if uses_out:
        loss = loss + (out * to_device(shard.do)).sum()
    loss.backward()
    of_sinks = None if logits is None else logits.grad
    return to_arrays([out[0], lse[0], *(x.grad[0] for x in (q, k, v)), of_sinks])


def attention_on_nan(comm: Communicator, sinks: Array, check: bool, shard: Shard) -> list[Array]:
    """Like `attention`, with uninitialized memory set to NaN. check: enables `check_kernels`."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with check_kernels(check):
            return attention(comm, None, sinks, {}, shard)
    finally:
        torch.use_deterministic_algorithms(False)


def twice(comm: Communicator, shard: Shard) -> list[list[bytes]]:
    """Runs the same plan twice on the same inputs, with two handles; returns the bytes of all results."""
    results = [attention(comm, None, None, {}, shard) for _ in range(2)]
    return [[x.tobytes() for x in result if x is not None] for result in results]


def microbatches(comm: Communicator, order: str, shards: tuple[Shard, Shard]) -> list[list[Array]]:
    """The gradients of two microbatches, with forward and backward passes in this order, such as "F0F1B1B0"."""
    losses, leaves = {}, {}
    for step, index in zip(order[::2], map(int, order[1::2]), strict=True):
        shard = shards[index]
        if step == "F":
            handle, leaves[index] = inputs_of(comm, shard)
            out = planned_attention(*leaves[index], handle)
            losses[index] = (out * torch.from_numpy(shard.do)).sum()
        else:
            losses[index].backward()
    return [[x.grad.numpy() for x in leaves[index]] for index in (0, 1)]


def checkpointed(comm: Communicator, reentrant: bool | None, shard: Shard) -> list[Array]:
    """out and gradients of two layers, the second on the output of the first, with recomputation in backward."""
    handle, inputs = inputs_of(comm, shard)

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return planned_attention(planned_attention(q, k, v, handle), k, v, handle)

    out = layers(*inputs) if reentrant is None else checkpoint(layers, *inputs, use_reentrant=reentrant)
    out.backward(torch.from_numpy(shard.do))
    return [out.detach().numpy(), *(x.grad.numpy() for x in inputs)]


def compiled(comm: Communicator, shards: tuple[Shard, ...]) -> tuple[int, float]:
    """Runs a compiled layer under several plans: (number of compiled graphs, largest difference from eager)."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, k: Tensor, v: Tensor, handle: PlanHandle) -> Tensor:
        return planned_attention(q * 2, k, v, handle).sin()

    fast = torch.compile(layer, backend=counter, fullgraph=True)
    worst = 0.0
    for shard in shards:
        results = []
        for function in (layer, fast):
            handle, inputs = inputs_of(comm, shard)
            out = function(*inputs, handle)
            out.backward(torch.from_numpy(shard.do))
            results.append([out.detach(), *(x.grad for x in inputs)])
        worst = max([worst, *(float((a - b).abs().max()) for a, b in zip(*results, strict=True) if len(a))])
    return counter.frame_count, worst


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for selective activation checkpointing that saves attention."""
    attends = op == torch.ops.apportion.attend.default
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


def rounds(
    comm: Communicator, checkpointing: str | None, compiled: bool, shard: Shard
) -> tuple[tuple[int, int], list[int], list[Array]]:
    """The rounds that forward and backward launch, the rounds of their programs, and out with gradients.

    checkpointing: None, "full" or "selective", of a layer whose backward needs its attention again."""
    handle, inputs = inputs_of(comm, shard)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        return planned_attention(q * 2, k, v, handle).sin()

    block: Any = layer
    if checkpointing:
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
        options = contexts if checkpointing == "selective" else {}
        block = partial(checkpoint, layer, use_reentrant=False, **options)
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager", fullgraph=True)
    with mock.patch.object(comm, "batch", wraps=comm.batch) as launch:
        out = block(*inputs)
        forward = launch.call_count
        out.backward(torch.from_numpy(shard.do))
    programs = [handle.program("default", phase) for phase in ("forward", "backward")]
    planned = [sum(step.op == Op.LAUNCH for step in program.steps) for program in programs]
    launched = forward, launch.call_count - forward
    return launched, planned, [out.detach().numpy(), *(x.grad.numpy() for x in inputs)]


class Weights:
    """A projection that depends on positions: (x @ w) * (1 + position / 8) per head."""

    def __init__(self, w_q: Array, w_k: Array, w_v: Array) -> None:
        self.params = tuple(leaf(w, torch.float64) for w in (w_q, w_k, w_v))

    def __call__(self, hidden: Tensor, positions: Tensor, q_heads: Any, kv_heads: Any) -> tuple[Tensor, ...]:
        scaled = hidden * (1 + positions[:, None] / 8)
        heads = zip(self.params, (q_heads, kv_heads, kv_heads), strict=True)
        return tuple(torch.einsum("te,hed->thd", scaled, w[list(chosen)]) for w, chosen in heads)


def block(comm: Communicator, weights: list[Array], shard: tuple[bytes, Array, Array, Array]) -> list[Array]:
    """out, dX and weight gradients of planned_attention_block."""
    piece, hidden, position_ids, do = shard
    handle, project = handle_of(comm, piece), Weights(*weights)
    x = leaf(hidden, torch.float64)
    out = planned_attention_block(x, torch.from_numpy(position_ids), handle, project, project.params)
    out.backward(torch.from_numpy(do))
    return [out.detach().numpy(), x.grad.numpy(), *(w.grad.numpy() for w in project.params)]


def strided(comm: Communicator, shard: Shard) -> bool:
    """Whether non-contiguous tensors, with an expanded gradient, give the same results as contiguous ones."""
    results = []
    for copy in (False, True):
        handle = handle_of(comm, shard.piece)
        heads_first = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (shard.q, shard.k, shard.v))
        inputs = [leaf(x, handle.dtype) for x in heads_first]
        views = [x.transpose(0, 1) for x in inputs]
        out = planned_attention(*([x.contiguous() for x in views] if copy else views), handle)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
