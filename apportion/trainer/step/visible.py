"""Rows for a kernel of the layer's own: `gather_visible`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.visible import Visible as Visible, gather
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer.step import wiring


def gather_visible(x: Tensor | Sequence[Tensor], handle: PlanHandle, kind: str | None = None) -> Visible:
    """The rows of all ranks that this rank's queries may see under the kind's mask, for attention that chooses at run
    time which of them it looks at; every rank calls it in the same way, also one without tokens.

    x [rows, ...]: keys, latents, what an indexer scores, of any dtype and width: this rank's rows in the plan's home
    layout; or several such tensors, which travel together. Queries stay where they are. kind: attention kind, may be
    omitted where the plan has one. Returns `Visible`, whose rows are differentiable in x once: gradients of all ranks
    come back and are added up, in float32 (float64 for float64), on the ways of the rows. On every rank the loss must
    depend on them.

    Raises ConfigError where the plan splits heads or moves queries of the kind, UnknownNameError for a kind that it
    does not have, ExecutionError for another number of rows, and where ranks call differently.
    """
    wiring.watch.require_all_rows("gather_visible")
    if not isinstance(handle, PlanHandle):
        raise ConfigError("handle", handle, "rows are gathered under a plan", "pass batch.handle")
    tensors = (x,) if isinstance(x, Tensor) else tuple(x)
    if not tensors:
        raise ExecutionError("there is nothing to gather: give a tensor, or several")
    found: Visible = gather(handle, handle.kind(kind), tensors)
    return replace(found, rows=found.rows[0]) if isinstance(x, Tensor) else found
