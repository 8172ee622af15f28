"""The loss seam: local sum over global valid tokens, once per optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from apportion.ir.errors import ConfigError
from apportion.trainer.step.microbatch import IGNORED as IGNORED
from apportion.trainer.step.shares import batch_of, check_share


def normalised_loss(
    logits: Tensor, labels: Tensor, valid_tokens: float, averaged_over: int = 1, weights: Tensor | None = None
) -> Tensor:
    """This rank's share of the step's mean token loss: the shares of all ranks and microbatches sum to it.

    logits [rows, vocabulary], labels [rows] (IGNORED where there is nothing to predict), both already in this
    rank's row order; weights [rows]: what each row's loss is multiplied by, None for 1. Each may have a leading batch
    dimension of 1. The loss is in float32, of float64 logits in float64. valid_tokens: `PlannedBatch.valid_tokens`, of
    all ranks and all microbatches of the optimizer step; with weights, batch.total_weight or what else these sum to.
    averaged_over: the ranks over which the trainer averages gradients (DDP and FSDP do); 1 where it sums them. A rank
    without tokens gets 0 with a gradient path, and runs backward like the others.

    Raises ConfigError for other shapes and a negative number, and where the labels are a batch's, for another number
    than the batch has, and weights of its samples that are left out; ExecutionError where no attention has used the
    batch's plan, and as `check_share`.
    """
    batch = batch_of(labels)
    if valid_tokens < 0:
        rule, remedy = "is what the sum is divided by", "give batch.valid_tokens, or batch.total_weight"
        raise ConfigError("valid_tokens", valid_tokens, rule, remedy)
    if batch is not None:
        batch.check_loss(float(valid_tokens), weighted=weights is not None)
    logits, labels = _rows("logits", logits, 2), _rows("labels", labels, 1)
    _check_count("labels", labels, logits)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if weights is None:
        total = cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    else:
        weights = _rows("weights", weights, 1)
        _check_count("weights", weights, logits)
        losses = cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
        total = (losses * weights.to(losses.dtype)).sum()
    share = total * (averaged_over / (valid_tokens or 1))
    check_share(share, batch, averaged_over)
    return share


def _rows(name: str, tensor: Tensor, dims: int) -> Tensor:
    """The tensor without its batch dimension of 1, if it has one."""
    if tensor.dim() == dims + 1 and len(tensor) == 1:
        return tensor[0]
    if tensor.dim() != dims:
        shape = "[rows, vocabulary]" if dims == 2 else "[rows]"
        rule = f"must be {shape}, or that in a batch of 1"
        raise ConfigError(f"{name}.shape", tuple(tensor.shape), rule, "give this rank's rows end to end")
    return tensor


def _check_count(name: str, tensor: Tensor, logits: Tensor) -> None:
    if len(tensor) != len(logits):
        remedy = "give both for the rows that this rank holds, unshifted"
        raise ConfigError(f"{name}.shape", tuple(tensor.shape), f"logits have {len(logits)} rows", remedy)
