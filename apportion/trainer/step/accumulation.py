"""Check that gradients change only in backwards while microbatches of an iteration accumulate them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from apportion.trainer.step.microbatch import Microbatch

_CLOSE = 1e-5  # relative tolerance of norms
_SAMPLED = 64  # parameters whose gradients are compared
_ROUNDS = 3  # callbacks of callbacks, after which DDP and FSDP2 have set the gradients of a backward
_engine: Any = Variable._execution_engine


class Accumulation:
    """Norms of some gradients at the end of the latest backward of an iteration."""

    def __init__(self) -> None:
        self._backward = -1  # autograd's number of the latest one
        self._iteration = -1
        self._norms: Any = {}  # by parameter

    def forget(self) -> None:
        """Accepts a change of gradients."""
        self._iteration = -1

    def begin(self, batch: Microbatch, parameters: Iterable[Tensor], checks: bool) -> None:
        """Called in a backward of the batch, from its second call on without effect. parameters: with a gradient from
        then on. checks: whether no gradient of the backward is set yet, so that a change can be warned of."""
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if self._backward in (before, -1):
            return
        if checks and batch.microbatch and self._iteration == batch.iteration:
            norms = _norms_of(parameters)
            pairs = [(self._norms[one], norms[one]) for one in self._norms if one in norms]
            if changed := sum(abs(old - new) > _CLOSE * max(old, new) for old, new in pairs):
                place = f"microbatch {batch.microbatch} of iteration {batch.iteration}"
                text = f"{changed} gradients have changed before {place}, other than by a backward"
                rule = (
                    "a step needs the sum over all microbatches: call zero_grad, and clip, only after is_last"
                )
                warn(f"{text}: {rule}", stacklevel=1)
        _engine.queue_callback(partial(self._keep, batch.iteration, parameters, _ROUNDS))

    def _keep(self, iteration: int, parameters: Iterable[Tensor], rounds: int) -> None:
        """Keeps the norms, `rounds` callbacks later."""
        if rounds:
            _engine.queue_callback(partial(self._keep, iteration, parameters, rounds - 1))
        else:
            self._iteration, self._norms = iteration, _norms_of(parameters)


def _norms_of(parameters: Iterable[Tensor]) -> Any:
    norms: Any = WeakIdKeyDictionary()
    for parameter in [*parameters][:_SAMPLED]:
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        norms[parameter] = 0.0 if grad is None else float(grad.detach().norm())
    return norms
