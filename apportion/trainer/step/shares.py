"""Checks of a loss that is a rank's share of the step's mean: what it is of, what it goes through, what reduces it."""

from __future__ import annotations

from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import Microbatch

_SCALED = 65536  # by torch's GradScaler, to begin with
_ATTENTION = ("ScaledDotProduct", "FlashAtt", "FlexAtt", "SoftmaxBackward")  # in names of autograd's nodes


def batch_of(labels: Tensor) -> Microbatch | None:
    """The batch whose labels these are, or a view or, until ranks were compared, a copy of them. Raises ConfigError for
    its tokens, and for labels that are shifted once more."""
    for batch in wiring.watch.batches if labels.numel() and not is_compiling() else ():
        if _within(labels, batch.tokens):
            rule = "are what rows are given, not what they predict"
            raise ConfigError("labels", "the batch's tokens", rule, "give batch.labels")
        copied = not wiring.watch.settled and labels.numel() == batch.labels.numel()
        if (viewed := _within(labels, batch.labels)) or (
            copied and torch.equal(labels.flatten().cpu(), batch.labels.cpu())
        ):
            behind = batch.labels[1:]
            if viewed and 1 < labels.numel() == behind.numel() and labels.data_ptr() == behind.data_ptr():
                rule = "are those of the next token already, and would be shifted once more"
                raise ConfigError("labels", "batch.labels[1:]", rule, "give batch.labels, and all logits")
            found: Microbatch = batch
            return found
    return None


def _within(one: Tensor, whole: Tensor) -> bool:
    """Whether it is the other tensor, or a part of it."""
    return one.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def batch_under(handle: PlanHandle) -> Microbatch | None:
    """The batch of a handle."""
    return next((one for one in wiring.watch.batches if one.handle is handle), None)


def check_share(loss: Tensor, batch: Microbatch | None, factor: float | None = 1.0) -> None:
    """Checks a share of the step's mean, loss / factor, or with None what a loss is made of, and what reduces it.

    batch: its own, where that is known. Raises ExecutionError where attention looked at a rank's rows alone. Its
    backward raises ConfigError where DDP or FSDP2 average gradients and nothing makes up for it, or where something
    does and they sum."""
    if is_compiling() or not loss.requires_grad:
        return
    watch = wiring.watch
    if batch is not None:
        watch.behind = batch
    leaves = set[int]()
    for node in watch.graph(loss):
        leaves |= {id(node.variable)} if hasattr(node, "variable") else set()
        if batch is not None and batch.handle.communicator.ranks > 1:
            _check_attention(node, batch.handle.padded_rows)
    if factor is not None and (leaves or not watch.settled):
        wrapper = None if batch is None else batch.handle.wrapper
        count = batch.microbatch + 1 if batch is not None and batch.is_last else 1
        loss.register_hook(partial(_check_scale, wiring.reduction_of(wrapper, leaves), factor, count))  # type: ignore[no-untyped-call]


def _check_attention(node: Any, rows: int) -> None:
    """Raises ExecutionError for attention over as many rows as this rank has."""
    if rows < 2 or not any(part in node.name() for part in _ATTENTION):
        return
    shape = tuple(node._input_metadata[0].shape)
    if len(shape) > 2 and (shape[-2:] == (rows, rows) if "Softmax" in node.name() else rows in shape[1:-1]):
        raise ExecutionError(
            f"attention ({node.name()}) looked at the {rows} rows of this rank alone, and not by the plan: hand "
            "batch.handle on to every layer, and call ap.planned_attention there"
        )


def _check_scale(
    reduction: wiring.Reduction | None, factor: float, microbatches: int, grad: Tensor | None
) -> None:
    """Raises ConfigError where the share goes into a loss as it is, or over a number of microbatches, and gradients are
    averaged; or times the ranks, and they are summed. Warns of a division by microbatches: a share may be half of a
    loss on purpose."""
    if grad is None:
        return
    scale = float(grad) * factor
    scale = wiring.watch.scale = scale / _SCALED if scale % _SCALED == 0 else scale
    wiring.watch.accounted = True
    if microbatches > 1 and abs(scale * microbatches - 1) < 1e-6:
        warn(
            f"the loss is divided by {microbatches}, as many as the iteration has microbatches, and is a share of the "
            "mean of all of them already: leave that out (with accelerate, gradient_accumulation_steps=1)",
            stacklevel=1,
        )
    if reduction is None or reduction.ranks == 1:
        return
    if not reduction.sums and scale > 0 and abs(1 / scale - round(1 / scale)) < 1e-6:
        raise wiring.averaged(reduction)
    if reduction.sums and scale == reduction.ranks:
        rule = f"sums gradients, and the loss is multiplied by the {reduction.ranks} ranks as well"
        raise ConfigError("model", reduction.name, rule, "leave out sum_gradients, or averaged_over")
