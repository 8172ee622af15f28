"""Checks the reduction of gradients (number of ranks, sum or average) against the factor of a loss."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from apportion.ir.errors import ConfigError

_CLOSE = 1e-6  # relative tolerance of a scale
SUMS = "call ap.sum_gradients(model): once after wrapping it in DDP or FSDP2, else before each optimizer step"


class Reduction(NamedTuple):
    """A reduction of gradients. name: the wrapper's; sums: whether it sums instead of averaging."""

    name: str
    ranks: int
    sums: bool


def reduction_of(
    wrapper: DistributedDataParallel | FullyShardedDataParallel | None, params: set[int]
) -> Reduction | None:
    """The reduction of DDP, FSDP1, or FSDP2 for the parameters with these ids, whole or sharded; an average if any
    averages. None for hooks other than torch's own, and for factors that give neither an average nor a sum."""
    if isinstance(wrapper, FullyShardedDataParallel):
        return Reduction("FSDP1", dist.get_world_size(wrapper.process_group), False)
    if wrapper is not None:
        is_default = all(hook.__module__.startswith("torch.") for hook, _ in wrapper._comm_hooks)
        ranks = dist.get_world_size(wrapper.process_group)
        return Reduction(type(wrapper).__name__, ranks, hasattr(wrapper, "_summed")) if is_default else None
    result = None
    for group, forms in _parameter_groups() if params else ():
        if params & {id(obj) for form in forms for obj in form} and group.gradient_divide_factor in (None, 1):
            result = Reduction("FSDP2", group.mesh_info.mesh.size(), group.gradient_divide_factor == 1)
            if not result.sums:
                return result
    return result


def _parameter_groups() -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """FSDP2's parameter groups, each with two tensors per parameter: the unsharded one (None before a forward), and
    the shard."""
    states: Any = (state() for state in [*_module_state_mapping.values()])
    for group in (group for state in states for group in getattr(state, "_fsdp_param_groups", ())):
        yield (
            group,
            [(vars(param).get("_unsharded_param"), param.sharded_param) for param in group.fsdp_params],
        )


def shards_of(whole: Container[Any]) -> Iterator[Any]:
    """FSDP2's shards of the parameters whose unsharded tensor is in `whole`."""
    forms = (form for _, forms in _parameter_groups() for form in forms)
    return (shard for param, shard in forms if param is not None and param in whole)


def holds_unreduced(shards: Iterable[Any]) -> bool:
    """True if FSDP2 holds gradients of these shards that no backward has reduced."""
    ids = {*map(id, shards)}
    params = (param for group, _ in _parameter_groups() for param in group.fsdp_params)
    held = (param for param in params if id(param.sharded_param) in ids)
    return any(
        param.unsharded_accumulated_grad is not None
        or getattr(vars(param).get("_unsharded_param"), "grad", None) is not None
        for param in held
    )


def averaging_error(reduction: Reduction) -> ConfigError:
    """The error for averaged gradients, which are too small."""
    name, ranks, _ = reduction
    rule = f"averages gradients, but losses are shares of one mean: they would be {ranks} times too small"
    return ConfigError("model", name, rule, f"{SUMS}; or call normalised_loss(..., averaged_over={ranks})")


def check_reduction(reduction: Reduction, scale: float, counted: int, factor: float = 1.0) -> None:
    """Checks a share of a mean, multiplied by `scale` in total and by `factor` in the loss itself, against the
    reduction. counted: number of ranks over whose tokens the mean is taken. Raises ConfigError."""
    name, ranks, sums = reduction
    if ranks == 1:
        return
    if not sums and factor == 1 and 0 < scale < 1 + _CLOSE and abs(1 / scale - round(1 / scale)) < _CLOSE:
        raise averaging_error(reduction)
    if sums and scale == ranks:
        rule = f"sums gradients, but the loss is also multiplied by the number of ranks, {ranks}"
        raise ConfigError("model", name, rule, "leave out sum_gradients, or averaged_over")
    total = scale / (1 if sums else ranks)
    if ranks > counted and abs(total - 1) < _CLOSE:
        rule = f"sums gradients over {ranks} ranks, but losses are shares of a mean over tokens of {counted}"
        remedy = (
            "pass replicas= to the loader for the other groups, or reduce only over the ranks of its plans"
        )
        raise ConfigError("model", name, rule, remedy)
    if not sums and factor not in (1, ranks, counted):
        rule = f"is not the number of ranks over which {name} averages gradients"
        raise ConfigError("averaged_over", factor, rule, f"pass {ranks}")
