"""The fields of a microbatch that losses use, and checks of a loss against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from warnings import warn

from torch import Tensor

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.transport import Transport
from apportion.ir.errors import ConfigError, ExecutionError

#: the label of tokens that predict nothing, as torch has it
IGNORED = -100
WEIGHTS = "loss_weights"  # the field of samples


@dataclass(frozen=True, eq=False, kw_only=True)
class Microbatch:
    """One rank's rows of a planned microbatch, and where that stands in its iteration."""

    tokens: Tensor  # [rows] int64 token ids
    labels: Tensor  # [rows] int64, of the token to predict; IGNORED where there is nothing to
    handle: PlanHandle
    iteration: int
    microbatch: int
    is_last: bool  # of its iteration: step the optimizer after it
    valid_tokens: int  # labels of all ranks, groups of ranks and microbatches of the iteration
    total_weight: float  # their loss weights; as many where samples have none
    fields: Mapping[str, Tensor]  # what else the samples have for each token, [rows, ...]
    _replicas: Transport | None = field(default=None, repr=False)  # this rank's place in each group

    def check_unweighted(self, loss: str) -> None:
        """Raises ConfigError where the samples have loss weights, which `loss` would ignore."""
        if WEIGHTS in self.fields:
            remedy = "use normalised_loss(..., weights=) in a loop of your own"
            raise ConfigError(WEIGHTS, "a field of the samples", f"{loss} has no weights", remedy)

    def check_loss(self, divisor: float, weighted: bool) -> None:
        """Holds what a loss over these labels is divided by, and whether it has weights, against the iteration's.
        Warns where a kind is not called: its layers may be on another stage. Raises ConfigError, ExecutionError."""
        require_calls(self.handle, 0, 1, "hand batch.handle on to every layer of the model")
        if WEIGHTS in self.fields and not weighted:
            remedy = f"give weights=batch.fields[{WEIGHTS!r}] and batch.total_weight, or leave the field out"
            raise ConfigError("weights", None, f"samples have {WEIGHTS}", remedy)
        if unused := sorted({*self.handle.kinds} - self.handle.called):
            warn(f"no layer has called attention of the kinds {unused}: give each its kind=", stacklevel=3)
        own = {float(max(self.valid_tokens, 1)), float(self.valid_tokens), self.total_weight}
        here = float((self.labels != IGNORED).sum()) if weighted and divisor not in own else divisor
        if divisor not in own and divisor == here:
            rule = f"labels of all ranks and microbatches of the step are {self.valid_tokens}"
            remedy = "give batch.valid_tokens; with weights, batch.total_weight or the sum over all ranks"
            raise ConfigError("valid_tokens", divisor, rule, remedy)


def require_calls(handle: PlanHandle, before: int, layers: int, remedy: str) -> None:
    """Raises ExecutionError where fewer layers than these have run attention under the handle since it had `before`
    calls."""
    if (calls := handle.calls - before) < layers:
        raise ExecutionError(f"attention used the plan {calls} times in {layers} layers or more: {remedy}")
