"""The fields of a microbatch for losses, and checks of a loss against them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from warnings import warn

import torch
from torch import Tensor

from apportion.backends.torch.feed import EncoderFeed
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.transport import Transport
from apportion.ir.errors import ConfigError, ExecutionError

#: the label of tokens without a prediction, as in torch
IGNORED = -100
WEIGHTS = "loss_weights"  # the field of samples
_COUNTED = (
    "batch.valid_tokens counts the labels of the samples",
    "put loss_mask into the samples, or pass weights= of 0; hf.inputs and normalised_loss take batch.labels unchanged",
)
_VALUES = 3  # samples, or values beyond one per sample, from which a match with weights is no coincidence


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Microbatch:
    """One rank's rows of a planned microbatch, and its position in the iteration."""

    tokens: Tensor  # [rows] int64 token ids
    labels: Tensor  # [rows] int64, of the token to predict; IGNORED if there is none
    sample_ids: Tensor  # [rows] int64, sample of the dataset; -1 for padding
    local_to_sample: Tensor  # [rows] int64, token of the sample; -1 for padding
    handle: PlanHandle
    iteration: int
    microbatch: int
    is_last: bool  # of its iteration; the optimizer steps after it
    valid_tokens: int  # labels of all ranks, groups of ranks and microbatches of the iteration
    total_weight: float  # sum of their loss weights; their number if samples have no weights
    fields: Mapping[str, Tensor]  # other per-token fields of the samples, [rows, ...]
    feed: EncoderFeed | None = None  # where tokens stand for an encoder's rows
    # ranks in this rank's position in each group
    _replicas: Transport | None = field(default=None, repr=False)
    _staged: bool = False  # ranks of the plan hold different layers, by pipeline stage
    _shifted: Collection[str] = ()  # fields stored in the row that predicts their token
    _layers: Mapping[str, int] = field(default_factory=dict)  # kind -> number of layers of the planned model

    def __repr__(self) -> str:
        position = f"microbatch {self.microbatch} of iteration {self.iteration}{', the last' * self.is_last}"
        return f"<{type(self).__name__}: {position}, {len(self.tokens)} rows, {self.handle!r}>"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with an entry for each row, or for each fed row."""
        values = [
            *vars(self).values(),
            *self.fields.values(),
            *(vars(self.feed).values() if self.feed else ()),
        ]
        return [value for value in values if isinstance(value, Tensor)]

    def check_unweighted(self, loss: str) -> None:
        """Raises ConfigError if the samples have loss weights, which `loss` would ignore, and for changed labels."""
        self.check_unchanged()
        if WEIGHTS in self.fields:
            remedy = "use normalised_loss(..., weights=) in your own loop"
            raise ConfigError(WEIGHTS, "a field of the samples", f"{loss} has no weights", remedy)

    def check_loss(self, divisor: float, weighted: bool) -> None:
        """Checks the divisor of a loss over these labels, and whether it has weights, against the iteration's. Warns if
        a kind is not called: its layers may be on another stage. Raises ConfigError, ExecutionError."""
        self.check_unchanged()
        require_calls(self.handle, 0, 1, "pass batch.handle to every layer of the model")
        if WEIGHTS in self.fields and not weighted:
            remedy = f"pass weights=batch.fields[{WEIGHTS!r}] and batch.total_weight, or remove the field"
            raise ConfigError("weights", None, f"samples have {WEIGHTS}", remedy)
        if unused := sorted({*self.handle.kinds} - self.handle.called.keys()):
            warn(f"no layer has called attention of the kinds {unused}: give each its kind=", stacklevel=3)
        allowed = {float(max(self.valid_tokens, 1)), float(self.valid_tokens), self.total_weight}
        local = float((self.labels != IGNORED).sum()) if weighted and divisor not in allowed else divisor
        if divisor not in allowed and divisor == local:
            rule = f"labels of all ranks and microbatches of the step are {self.valid_tokens}"
            remedy = "pass batch.valid_tokens; with weights, batch.total_weight or the sum over all ranks"
            raise ConfigError("valid_tokens", divisor, rule, remedy)

    def check_unchanged(self) -> None:
        """Raises ConfigError for labels that were modified."""
        if not self.labels.is_inference() and self.labels._version:
            raise ConfigError("labels", "changed", *_COUNTED)

    def check_other_labels(self, labels: Tensor, divisor: float) -> None:
        """Raises ConfigError for labels [rows], or [rows - 1], that belong to the next row, of any text or rank,
        and for a part of the batch's labels that is divided by the number of all labels."""
        if len(self.labels) - labels.numel() not in (0, 1):
            return
        columns = self.labels, self.tokens, self.sample_ids, self.local_to_sample
        targets, tokens, samples, positions = (column.cpu() for column in columns)
        values = labels.flatten().cpu()[: len(targets) - 1]
        is_label = values != IGNORED
        ends = (samples[1:] != samples[:-1]) | (positions[1:] != positions[:-1] + 1)
        if torch.equal(values[is_label], targets[:-1][is_label]):
            if (
                divisor in (self.valid_tokens, self.total_weight)
                and is_label.sum() < (targets[:-1] != IGNORED).sum()
            ):
                raise ConfigError("labels", "fewer than the batch's", *_COUNTED)
        elif (is_label & ends).any() and any(
            torch.equal(values[is_label], column[1:][is_label]) for column in (targets, tokens)
        ):
            rule = "are the labels of the next rows, which may belong to other texts and ranks"
            raise ConfigError("labels", "shifted by a row", rule, "pass batch.labels, or batch.roll of them")

    def check_kinds(self) -> None:
        """Checks the numbers of attention calls per kind against the planned model. Raises ConfigError if kinds are
        swapped; warns if that could not be detected."""
        kinds = self.handle.kinds
        planned, called = (
            [counts.get(kind, 0) for kind in kinds] for counts in (self._layers, self.handle.called)
        )
        expected_calls, actual_calls = (
            [number * sum(other) for number in counts]
            for counts, other in ((planned, called), (called, planned))
        )
        if actual_calls != expected_calls and sorted(actual_calls) == sorted(expected_calls):
            by_kind = dict(zip(kinds, called, strict=True))
            rule = f"the layers call kinds other than those of the planned model, {dict(self._layers)}"
            raise ConfigError("kind", by_kind, rule, "give each layer its own kind=")
        if len({*planned}) < len(kinds) and {*kinds} - self.handle.declared:
            warning = "could be swapped unnoticed: give planned_attention each layer's window= (-1: no limit)"
            warn(f"the attention kinds {[*kinds]} {warning}", stacklevel=1)

    def check_weights(self, weights: Tensor, rows: Tensor | None = None) -> float:
        """Raises ConfigError for weights [rows] that are a multiple of an unshifted field with different values within
        a sample. rows: the rows of the weights, by default all. Returns the factor by which the weights are a multiple
        of a shifted field; 0.0 if they are not, or if there are too few samples to tell."""
        rows = torch.arange(len(self.labels)) if rows is None else rows.cpu()
        actual, samples = weights.detach().double().flatten().cpu(), self.sample_ids.cpu()[rows]
        for name, values in self.fields.items():
            if values.dim() != 1:
                continue
            expected = values.double().cpu()[rows]
            if name in self._shifted:
                if len({*samples.tolist()}) >= _VALUES and torch.allclose(
                    expected * actual.norm(), actual * expected.norm(), 1e-6
                ):
                    return float(actual.norm() / expected.norm())
                continue
            extra = len({*zip(samples.tolist(), expected.tolist(), strict=True)}) - len({*samples.tolist()})
            is_field = weights.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            if extra >= (1 if is_field else _VALUES) and torch.allclose(
                expected * actual.norm(), actual * expected.norm(), 1e-2
            ):
                rule = "weights a row by its own token, but its loss belongs to the token that it predicts"
                remedy = f"give the loader shifted=(..., {name!r}), or name the field {WEIGHTS}"
                raise ConfigError(f"weights = fields[{name!r}]", "not shifted", rule, remedy)
        return 0.0


def require_calls(handle: PlanHandle, before: int, layers: int, remedy: str) -> None:
    """Raises ExecutionError if fewer than `layers` layers have run attention under the handle since `handle.calls`
    was `before`."""
    if (calls := handle.calls - before) < layers:
        raise ExecutionError(f"attention used the plan {calls} times in at least {layers} layers: {remedy}")
