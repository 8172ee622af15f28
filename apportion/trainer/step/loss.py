"""Normalised loss: a rank's sum divided by the step's valid tokens on all ranks; and checks of a rank's share of the
step's mean: its labels, its autograd graph, its reduction."""

from __future__ import annotations

from functools import partial
from typing import Any, cast
from warnings import warn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import cross_entropy

from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import IGNORED as IGNORED, Microbatch
from apportion.trainer.step.reduction import Reduction, check_reduction, reduction_of
from apportion.trainer.step.terms import MULTIPLIED, SHARE, has_unmarked_path, is_multiplied, mark

_ATTENTION = ("ScaledDotProduct", "FlashAtt", "FlexAtt", "SoftmaxBackward")  # in names of autograd's nodes


def normalised_loss(
    logits: Tensor, labels: Tensor, valid_tokens: float, averaged_over: int = 1, weights: Tensor | None = None
) -> Tensor:
    """This rank's share of the step's mean token loss: the shares of all ranks and microbatches sum to it.

    logits [rows, vocabulary], labels [rows] (IGNORED for rows without a label), both already in this rank's row order;
    weights [rows]: factor of each row's loss, None for 1. Each may have a leading batch dimension of 1. The loss is in
    float32, for float64 logits in float64. valid_tokens: `PlannedBatch.valid_tokens`, over all ranks and all
    microbatches of the optimizer step; with weights, batch.total_weight or their sum. averaged_over: the ranks over
    which the trainer averages gradients (DDP and FSDP do); 1 if it sums them. A rank without tokens gets 0 with a
    gradient path, and runs backward like the others.

    Raises ConfigError for other shapes, for a valid_tokens that is negative or differs from that of the labels' batch,
    and for sample weights that are missing or not shifted; ExecutionError if no attention has used the batch's plan;
    and the errors of `check_share`.
    """
    logits = _rows("logits", logits)
    batch, labels, weights = checked_labels(logits, labels, valid_tokens, weights)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if weights is None:
        total = cross_entropy(values, labels, ignore_index=IGNORED, reduction="sum")
    else:
        losses = cross_entropy(values, labels, ignore_index=IGNORED, reduction="none")
        total = (losses * weights.to(losses.dtype)).sum()
    return share_of(total, batch, valid_tokens, averaged_over)


def checked_labels(
    rows: Tensor, labels: Tensor, valid_tokens: float, weights: Tensor | None
) -> tuple[Microbatch | None, Tensor, Tensor | None]:
    """Checks labels and weights of a loss over `rows`. Returns the batch that the labels belong to, if any, and both,
    [rows] each. Raises the errors of `normalised_loss`."""
    batch, watch = batch_of(labels), wiring.watch
    if valid_tokens < 0:
        rule, remedy = "is the divisor of the sum", "pass batch.valid_tokens, or batch.total_weight"
        raise ConfigError("valid_tokens", valid_tokens, rule, remedy)
    if batch is not None:
        batch.check_loss(float(valid_tokens), weighted=weights is not None)
    if not watch.settled and not is_compiling():
        watch.divisor = float(valid_tokens)
        if batch is None:
            watch.check_divisor()
        for microbatch in watch.batches if batch is None else ():
            microbatch.check_other_labels(labels, watch.divisor)
        if batch is not None and weights is not None and 0 < weights.numel() == len(batch.labels):
            watch.multiple = batch.check_weights(weights)
    return batch, _rows("labels", labels, rows), None if weights is None else _rows("weights", weights, rows)


def share_of(total: Tensor, batch: Microbatch | None, valid_tokens: float, averaged_over: int) -> Tensor:
    """This rank's share of the step's mean, from the sum over its rows. Raises the errors of `normalised_loss`."""
    share = total * (averaged_over / (valid_tokens or 1))
    check_share(share, batch, averaged_over)
    return share


def _rows(name: str, tensor: Tensor, logits: Tensor | None = None) -> Tensor:
    """The tensor without its batch dimension of 1, if it has one: logits, or a tensor with an entry for each row."""
    dims, shape = (2, "[rows, vocabulary]") if logits is None else (1, "[rows]")
    rows = tensor[0] if tensor.dim() == dims + 1 and len(tensor) == 1 else tensor
    if rows.dim() != dims:
        rule = f"must be {shape}, optionally in a batch of 1"
        raise ConfigError(f"{name}.shape", tuple(tensor.shape), rule, "pass this rank's rows, concatenated")
    if logits is not None and len(rows) != len(logits):
        remedy = "pass both for the rows that this rank holds, unshifted"
        raise ConfigError(f"{name}.shape", tuple(tensor.shape), f"logits have {len(logits)} rows", remedy)
    return rows


def batch_of(labels: Tensor) -> Microbatch | None:
    """The batch whose labels these are, as a view or else (until ranks have been compared) as a copy, of the newest
    batch: several may have only ignored labels, or none. Raises ConfigError for the batch's tokens, and for labels that
    are shifted twice."""
    newest_first = [] if is_compiling() else [*wiring.watch.batches][::-1]
    if not labels.numel():
        without_rows = [batch for batch in newest_first if not batch.labels.numel()]
        return next(
            (batch for batch in without_rows if batch.labels is labels), next(iter(without_rows), None)
        )
    for batch in newest_first:
        if _is_view_of(labels, batch.tokens):
            rule = "are the rows' inputs, not the tokens that they predict"
            raise ConfigError("labels", "the batch's tokens", rule, "pass batch.labels")
        if _is_view_of(labels, batch.labels):
            shifted = batch.labels[1:]
            if 1 < labels.numel() == shifted.numel() and labels.data_ptr() == shifted.data_ptr():
                rule = "belong to the next token already, and would be shifted again"
                raise ConfigError("labels", "batch.labels[1:]", rule, "pass batch.labels, and all logits")
            return cast("Microbatch", batch)
    for batch in newest_first if not wiring.watch.settled else ():
        if labels.numel() == batch.labels.numel() and torch.equal(labels.flatten().cpu(), batch.labels.cpu()):
            return cast("Microbatch", batch)
    return None


def _is_view_of(part: Tensor, whole: Tensor) -> bool:
    """True if `part` is `whole` or a view of it."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def check_share(loss: Tensor, batch: Microbatch | None, factor: float | None = 1.0) -> None:
    """Checks a share of the step's mean, loss / factor, and its reduction; factor None: a term of a loss.

    batch: of the loss, if known. Raises ExecutionError if attention looked only at a rank's rows. Backward raises
    ConfigError if DDP or FSDP2 average gradients and the loss does not compensate, or sum them and it does."""
    if is_compiling() or not loss.requires_grad:
        return
    watch = wiring.watch
    if batch is not None:
        watch.record_loss(batch, loss)
    scanned = len(watch.scanned)
    for node in watch.graph(loss):
        if batch is not None and batch.handle.communicator.ranks > 1 and not batch.handle.gathered:
            _check_attention(node, batch.handle.padded_rows)
    if factor is None:
        return
    mark(loss)
    if factor != 1:
        mark(loss, MULTIPLIED)
    if len(watch.scanned) > scanned or not watch.settled:
        wrapper, params = None if batch is None else batch.handle.wrapper, {*map(id, watch.owners)}
        count = batch.microbatch + 1 if batch is not None and batch.is_last else 1
        loss.register_hook(partial(check_scale, reduction_of(wrapper, params), factor, count))  # type: ignore[no-untyped-call]


def _check_attention(node: Any, rows: int) -> None:
    """Raises ExecutionError if attention has run over exactly this rank's rows, without the plan."""
    if rows < 2 or not any(part in node.name() for part in _ATTENTION):
        return
    shape = tuple(node._input_metadata[0].shape)
    if len(shape) > 2 and (shape[-2:] == (rows, rows) if "Softmax" in node.name() else rows in shape[1:-1]):
        message = f"attention ({node.name()}) looked only at the {rows} rows of this rank, without the plan"
        remedy = "pass batch.handle to every layer, and call ap.planned_attention there"
        raise ExecutionError(f"{message}: {remedy}")


def check_scale(
    reduction: Reduction | None, factor: float, microbatches: int, grad: Tensor | None, known: str = SHARE
) -> None:
    """Raises the errors of `check_reduction`, here or before a GradScaler's step. Warns of a division by microbatches,
    since a share may be part of a loss on purpose, and of unknown terms."""
    if grad is None:
        return
    watch = wiring.watch
    watch.begin_backward()
    watch.accounted, watch.unknown, watch.scale = True, False, float(grad) * factor
    if has_unmarked_path(known):
        warn(f"the loss has a term other than its cross entropy: {wiring.UNKNOWN}", stacklevel=1)
    if reduction is not None and is_multiplied():
        factor = reduction.ranks
    watch.check_scaled(partial(_check_scale, reduction, factor, microbatches))


def _check_scale(reduction: Reduction | None, factor: float, microbatches: int, scale: float) -> None:
    if microbatches > 1 and abs(scale / factor * microbatches - 1) < 1e-6:
        warn(
            f"the loss is divided by {microbatches}, the iteration's number of microbatches, but is already a share of "
            "the mean over all of them: remove that (with accelerate, gradient_accumulation_steps=1), unless it "
            "weights a term of the loss",
            stacklevel=1,
        )
    if reduction is not None:
        check_reduction(reduction, scale, wiring.watch.ranks, factor)
