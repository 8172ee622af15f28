"""Sums of gradients over ranks: every rank's loss is its share of one mean (`normalised_loss`), and shares add up.

DDP and FSDP average instead, which divides every gradient by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from apportion.ir.errors import ConfigError
from apportion.trainer.step import wiring
from apportion.trainer.step.reduction import Reduction, check_reduction

#: parameter -> hook that multiplies its gradients for DDP, and its factor
_factors: Any = WeakIdKeyDictionary()


def sum_gradients(model: nn.Module, group: Any = None) -> nn.Module:
    """Turns the gradients of `model` into sums over the ranks; returns the model.

    DDP or FSDP2 (`fully_shard`): call it once, after wrapping and before the first backward; gradients are then summed
    instead of averaged, with and without `no_sync`. Any other module: call it on every rank after the last backward of
    each optimizer step; it sums `.grad` over the ranks of `group` (None: all), with zeros for ranks without one, and
    skips parameters with an attribute `rank_local`, such as experts that other ranks do not have. Raises ConfigError
    for FSDP1, which can only average, and for gradients that are sums already.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    sharded = [module for module in inner.modules() if isinstance(module, FSDPModule)]
    if any(isinstance(module, FullyShardedDataParallel) for module in inner.modules()):
        remedy = "use fully_shard, or normalised_loss(…, averaged_over=ranks)"
        raise ConfigError("model", "FullyShardedDataParallel", "averages gradients", remedy)
    for module in inner.modules():  # Fabric wraps DDP
        if isinstance(module, DistributedDataParallel) and {*module.parameters()} == {*inner.parameters()}:
            inner = module
    if isinstance(inner, DistributedDataParallel):
        _multiply(inner, dist.get_world_size(inner.process_group))
    elif sharded:
        _sum_shards(sharded)
    elif dist.is_initialized():
        _sum_grads(inner, group)
    return model


def _multiply(model: nn.Module, ranks: int) -> None:
    """Multiplies each backward's gradients by the number of ranks, to undo DDP's averaging; not those in `.grad`."""
    if hasattr(model, "_summed"):
        rule = "sums its gradients already, and would multiply them by the number of ranks again"
        raise ConfigError("model", type(model).__name__, rule, "call sum_gradients once, after wrapping")
    model._summed = True  # type: ignore[assignment]
    for param in model.parameters():
        if param.requires_grad:
            _forget_factor(param)
            _factors[param] = param.register_hook(lambda grad: grad * ranks), ranks  # type: ignore[no-untyped-call]


def _forget_factor(param: nn.Parameter) -> int:
    """Removes the hook of an earlier DDP wrapper from a parameter, and returns its factor."""
    hook, factor = _factors.pop(param, (None, 1))
    if hook is not None:
        hook.remove()
    return int(factor)


def _sum_shards(modules: list[FSDPModule]) -> None:
    """Sets FSDP2 to sum; gloo has no pre-multiplied sum, so the factor is applied separately."""
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def _sum_grads(model: nn.Module, group: Any) -> None:
    """Sums gradients over the ranks; a parameter without a gradient on any rank keeps none."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    params = [parameter for parameter in trained if not getattr(parameter, "rank_local", False)]
    if not params:
        return
    if wiring.watch.staged and model not in wiring.watch.modules:
        _refuse_other_stages(params, group)
    _refuse_shards(params, group)
    _refuse_sums(model, params, group)
    _refuse_changed(model, params)
    wiring.watch.modules[model] = None
    for param in params:
        if (factor := _forget_factor(param)) > 1 and param.grad is not None:
            param.grad /= factor
    has_grad = torch.tensor([param.grad is not None for param in params], device=params[0].device).int()
    dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=group)
    works = [dist.all_reduce(grad, group=group, async_op=True) for grad in _grads(params, has_grad.tolist())]
    for work in works:
        work.wait()
    for param in params:
        if param.grad is not None:
            param.grad._summed_at = param.grad._version  # type: ignore[attr-defined]


def _refuse_other_stages(params: list[nn.Parameter], group: Any) -> None:
    """Raises ConfigError if ranks of the group hold different parameters, such as those of other stages, or equal ones
    in layers of several stages."""
    norms = torch.stack([param.detach().float().norm() for param in params])
    stages = [wiring.watch.stage_layers.get(param, -torch.inf) for param in params]  # that run each here
    count, highest = norms.new_tensor([len(params)]), norms.new_tensor(stages)
    lowest = torch.where(highest.isinf(), highest, -highest)
    for bounds in map(torch.stack, ((count, -count), (norms, -norms), (highest, lowest))):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        if (bounds.sum(0) > 1e-5 * bounds[0].abs()).any():
            rule = "hold different parameters, whose gradients would be added"
            ranks = f"{dist.get_world_size(group)} ranks"
            raise ConfigError("group", ranks, rule, "pass the ranks of one pipeline stage")


def _refuse_shards(params: list[nn.Parameter], group: Any) -> None:
    """Raises ConfigError if ranks of the group hold different shards of a parameter, as tensor-parallel ranks do."""
    ranks = {*dist.get_process_group_ranks(group or dist.group.WORLD)} - {dist.get_rank()}
    for mesh, placements in {(p.device_mesh, p.placements) for p in params if isinstance(p, DTensor)}:
        groups = (mesh.get_group(dim) for dim, one in enumerate(placements) if not one.is_replicate())
        if any(ranks & {*dist.get_process_group_ranks(one)} for one in groups):
            rule = "hold different shards of parameters, whose gradients would be added"
            remedy = "pass the ranks with the same shards, and to the loader too: communicator="
            raise ConfigError("group", f"{len(ranks) + 1} ranks", rule, remedy)


def _refuse_sums(model: nn.Module, params: list[nn.Parameter], group: Any) -> None:
    """Raises ConfigError if all gradients still contain the last call's sums, or if the loss was multiplied by the
    number of ranks."""
    grads = [param.grad for param in params if param.grad is not None]
    remedy = "call sum_gradients once, after the last backward of a step, and zero_grad after the step"
    if grads and all(grad._version == getattr(grad, "_summed_at", -1) for grad in grads):
        raise ConfigError("model", type(model).__name__, "has gradients that are sums already", remedy)
    reduction = Reduction(type(model).__name__, dist.get_world_size(group), True)
    wiring.watch.check_scaled(partial(check_reduction, reduction, counted=wiring.watch.ranks))
    wiring.watch.accumulation.forget()


def _refuse_changed(model: nn.Module, params: list[nn.Parameter]) -> None:
    """Raises ConfigError if all gradients were changed since their backward, from the second call on."""
    grads = [param.grad for param in params if hasattr(param.grad, "_backward_version")]
    if grads and all(grad._version != grad._backward_version for grad in grads if grad is not None):
        rule = "has gradients that were clipped or scaled by this rank's own values"
        remedy = "call sum_gradients after the last backward, and clip or unscale after it"
        raise ConfigError("model", type(model).__name__, rule, remedy)
    for param in params:
        if not hasattr(param, "_records_version"):
            param._records_version = param.register_post_accumulate_grad_hook(_record_version)  # type: ignore


def _record_version(param: Tensor) -> None:
    """Records versions after a backward, which raises them by 1; zero_grad raises them too, or replaces gradients."""
    if (grad := cast("Any", param.grad)) is not None:
        grad._backward_version = grad._version
        if grad._version - getattr(grad, "_summed_at", -2) == 1:  # added to sums
            grad._summed_at = grad._version


def _grads(params: list[nn.Parameter], flags: list[int]) -> Iterator[Tensor]:
    for param, has_grad in zip(params, flags, strict=True):
        if has_grad:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            yield param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
