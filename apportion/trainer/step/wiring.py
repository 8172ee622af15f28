"""Checks that plans which a model is given reach its attention, before an optimizer steps on the gradients."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.errors import ExecutionError


class Watch:
    """Stops the first optimizer step of the process where attention has run under none of the handles given by then.
    Later steps are not watched, since a trainer may fetch batches ahead."""

    def __init__(self) -> None:
        self._given: list[PlanHandle] = []
        self._hook: Any = None
        self._reached = False

    def add(self, handle: PlanHandle) -> None:
        """Names a handle that a model is about to be given."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._check)
        if not self._seen():
            self._given.append(handle)

    def _seen(self) -> bool:
        if not self._reached and any(handle.calls for handle in self._given):
            self._reached = True
            self._given.clear()
        return self._reached

    def _check(self, *_: Any) -> None:
        """Raises ExecutionError."""
        if not self._seen() and self._given:
            raise ExecutionError(
                "a batch was given to a model, and no attention has used its plan: hand its handle on to every layer; "
                "with models of transformers it is the argument 'apportion' of hf.inputs(batch)"
            )


_watch = Watch()


def expect_attention(handle: PlanHandle) -> None:
    """Has the first optimizer step raise ExecutionError where no attention has used a plan by then."""
    _watch.add(handle)


def require_calls(handle: PlanHandle, before: int, layers: int, remedy: str) -> None:
    """Raises ExecutionError where fewer layers than these have run attention under the handle since it had `before`
    calls."""
    if (calls := handle.calls - before) < layers:
        raise ExecutionError(f"attention used the plan {calls} times in {layers} layers or more: {remedy}")
