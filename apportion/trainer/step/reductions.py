"""What reduces gradients between ranks: DDP, known by its forward, or FSDP2, by its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel


class Reduction(NamedTuple):
    """What reduces gradients, over how many ranks, to sums or to averages."""

    name: str
    ranks: int
    sums: bool


def reduction_of(wrapper: DistributedDataParallel | None, params: set[int]) -> Reduction | None:
    """DDP's, or FSDP2's of the parameters of these ids, whole or sharded: averages where one does. None for
    communication hooks but torch's own, which average, and for other factors than those of an average and a sum."""
    if wrapper is not None:
        own = all(hook.__module__.startswith("torch.") for hook, _ in wrapper._comm_hooks)
        ranks = dist.get_world_size(wrapper.process_group)
        return Reduction(type(wrapper).__name__, ranks, hasattr(wrapper, "_summed")) if own else None
    found = None
    states: Any = (state() for state in [*_module_state_mapping.values()] if params)
    for group in (group for state in states for group in getattr(state, "_fsdp_param_groups", ())):
        held = [
            vars(one).get(name) for one in group.fsdp_params for name in ("_unsharded_param", "sharded_param")
        ]
        if params & {*map(id, held)} and group.gradient_divide_factor in (None, 1):
            found = Reduction("FSDP2", group.mesh_info.mesh.size(), group.gradient_divide_factor == 1)
            if not found.sums:
                return found
    return found
