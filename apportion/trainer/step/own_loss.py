"""Checks a loss computed by the user's code: infers its divisor from the gradient of the logits.

A cross entropy's gradient in a row is s · (softmax - one-hot of the label) in any implementation; s gives the divisor.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from apportion.ir.errors import ConfigError
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import check_scale
from apportion.trainer.step.microbatch import IGNORED, WEIGHTS, Microbatch
from apportion.trainer.step.reduction import Reduction, reduction_of
from apportion.trainer.step.terms import LOGITS, mark

_ROWS = 64  # rows to check
_FIT_TOLERANCE = 0.02  # tolerance relative to a gradient's norm, in 16 bits
_CLOSE = 5e-3  # relative tolerance of a scale
_TRIES = 8
_SCALED = 65536  # initial scale of torch's GradScaler


def check_next_forward(module: nn.Module, tries: int = _TRIES) -> None:
    """Checks the logits of one of the module's next forwards; tries again if all ranks have equally many labels."""
    hook: list[Any] = []
    hook.append(module.register_forward_hook(partial(_inspect, hook, tries)))


def _inspect(hook: list[Any], tries: int, module: nn.Module, _: Any, output: Any) -> None:
    trial = wiring.watch.trial
    if trial is None or trial.part is not None or not torch.is_grad_enabled():
        return
    batch = wiring.watch.find_batch(trial.handle())
    first = output[0] if isinstance(output, tuple | list) else output
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", first)
    if batch is None or not batch.is_last or not isinstance(logits, Tensor) or not logits.requires_grad:
        return
    rows = torch.nonzero(batch.labels != IGNORED).flatten()[:_ROWS].to(logits.device)
    shape = logits.shape[1:] if logits.dim() == 3 and len(logits) == 1 else logits.shape
    if len(rows) < 2 or len(shape) != 2 or shape[0] != len(batch.labels) or shape[1] <= batch.labels.max():
        return
    batch.check_unchanged()
    hook.pop().remove()
    labels = batch.labels.to(logits.device)[rows]
    expected = logits.detach().view(shape)[rows].float().softmax(-1)
    expected.scatter_add_(1, labels[:, None], -torch.ones_like(expected[:, :1]))
    mark(logits, LOGITS)
    logits.register_hook(partial(_check, batch, rows, expected, module, tries))  # type: ignore[no-untyped-call]


def _check(
    batch: Microbatch, rows: Tensor, expected: Tensor, module: nn.Module, tries: int, grad: Tensor | None
) -> None:
    """Raises ConfigError for a mean over a rank's own rows, for unshifted weights, and the errors of `check_scale`."""
    if grad is None:  # accelerate's mixed precision copies the logits
        return
    actual = grad.view(-1, grad.shape[-1])[rows].float()
    scales = (actual * expected).sum(1) / expected.square().sum(1)
    if ((actual - scales[:, None] * expected).norm(dim=1) > _FIT_TOLERANCE * actual.norm(dim=1)).any():
        return  # not a cross entropy
    scale = float(scales.mean())
    if not (scales / scale - 1).abs().max() < _CLOSE:
        batch.check_weights(scales, rows)
    elif scale > 0 and (tries < _TRIES or not wiring.watch.accounted or wiring.watch.unknown):
        weights = batch.fields.get(WEIGHTS)
        if weights is not None and len({*weights[rows.to(weights.device)].tolist()}) > 1:
            batch.check_unweighted("the loss")
        reduction = reduction_of(batch.handle.wrapper, {*map(id, module.parameters())})
        exact = 1e-5 if grad.dtype.itemsize > 2 else 2e-3
        if not _is_divisor_known(batch, scale, exact, reduction) and tries > 1:
            check_next_forward(module, tries - 1)


def _is_divisor_known(batch: Microbatch, scale: float, exact: float, reduction: Reduction | None) -> bool:
    """True if the divisor is known not to be this rank's number of labels. exact: relative precision of the scale."""
    ranks = batch.handle.communicator.ranks if reduction is None else reduction.ranks
    total, share = int((batch.labels != IGNORED).sum()), scale * batch.valid_tokens
    scaled = _SCALED if share > _SCALED / 2 else 1
    share, scale = share / scaled, scale / scaled
    factor = min((1, ranks), key=lambda value: abs(share / value - 1))
    shared_error = abs(share / factor - 1)
    factors = product((1, batch.microbatch + 1), (1, ranks))
    local_error = min(abs(scale * total * count / times - 1) for count, times in factors)
    if local_error < _CLOSE and 4 * local_error + exact < shared_error:
        rule = f"is a mean over the {total} labels of this rank, so tokens of different ranks have different weights"
        remedy = "use ap.normalised_loss(logits, batch.labels, batch.valid_tokens), or divide by batch.valid_tokens"
        raise ConfigError("loss", "cross entropy", rule, remedy)
    if shared_error < _CLOSE:
        check_scale(reduction, float(factor), 1, torch.tensor(float(scaled)), LOGITS)
    return 4 * shared_error + exact < local_error
