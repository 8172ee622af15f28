"""Two halves of an iteration as one microbatch of a trainer's model: their rows are concatenated, so row-wise modules
need no change, and each transformer layer splits them.

    rows of ping, rows of pong ──embedding──► layer ──► layer ──► head, loss
                                             └─ both: attention of one half overlaps the other's linear layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from apportion.backends.torch.handle import PlanHandle
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.step.pingpong import PingPongLayer, ping_pong


def joined(batches: Sequence[PlannedBatch]) -> PlannedBatch:
    """A microbatch unchanged, or the rows of two halves of an iteration under the first half's handle."""
    if len(batches) == 1:
        return batches[0]
    names = ("tokens", "labels", "position_ids")
    columns: Any = {name: torch.cat([getattr(one, name) for one in batches]) for name in names}
    fields = {name: torch.cat([one.fields[name] for one in batches]) for name in batches[0].fields}
    return replace(batches[0], **columns, fields=fields)


def both(
    layer: PingPongLayer, hidden: Tensor, handles: tuple[PlanHandle, ...], says: Mapping[str, Any]
) -> Tensor:
    """Runs hidden [rows, ...] of two halves through a layer. says: window, causal and layer, as in
    `planned_attention`. Raises as `ping_pong`, and ConfigError for a mask that differs from the plans'."""
    ping, pong = handles
    for handle in handles:
        handle.check(handle.kind(layer.kind), **says)
    first, second = torch.split(hidden, [handle.padded_rows for handle in handles])
    return torch.cat(ping_pong((layer,), first, second, ping, pong))
