"""The fields of a microbatch that losses use, and checks of a loss against them."""

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

#: the label of tokens that predict nothing, as torch has it
IGNORED = -100
WEIGHTS = "loss_weights"  # the field of samples
_COUNTED = (
    "batch.valid_tokens counts those that the samples have",
    "give loss_mask in the samples, or weights= of 0; hf.inputs and normalised_loss take batch.labels as they are",
)
_VALUES = 3  # beyond one a sample: these are weights by chance no more


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Microbatch:
    """One rank's rows of a planned microbatch, and where that stands in its iteration."""

    tokens: Tensor  # [rows] int64 token ids
    labels: Tensor  # [rows] int64, of the token to predict; IGNORED where there is nothing to
    sample_ids: Tensor  # [rows] int64, sample of the dataset; -1 for padding
    local_to_sample: Tensor  # [rows] int64, token of the sample; -1 for padding
    handle: PlanHandle
    iteration: int
    microbatch: int
    is_last: bool  # of its iteration: step the optimizer after it
    valid_tokens: int  # labels of all ranks, groups of ranks and microbatches of the iteration
    total_weight: float  # their loss weights; as many where samples have none
    fields: Mapping[str, Tensor]  # what else the samples have for each token, [rows, ...]
    feed: EncoderFeed | None = None  # where an encoder's rows stand for tokens
    _replicas: Transport | None = field(default=None, repr=False)  # this rank's place in each group
    _staged: bool = False  # ranks of the plan hold different layers: those of their pipeline stages
    _shifted: Collection[str] = ()  # fields that lie in the row that predicts their token
    _layers: Mapping[str, int] = field(default_factory=dict)  # of each kind that the plans are for

    def __repr__(self) -> str:
        place = f"microbatch {self.microbatch} of iteration {self.iteration}{', the last' * self.is_last}"
        return f"<{type(self).__name__}: {place}, {len(self.tokens)} rows, {self.handle!r}>"

    @property
    def tensors(self) -> list[Tensor]:
        """Those with an entry for each row, or for each that is fed."""
        held = [*vars(self).values(), *self.fields.values(), *(vars(self.feed).values() if self.feed else ())]
        return [one for one in held if isinstance(one, Tensor)]

    def check_unweighted(self, loss: str) -> None:
        """Raises ConfigError where the samples have loss weights, which `loss` would ignore, and for changed labels."""
        self.check_unchanged()
        if WEIGHTS in self.fields:
            remedy = "use normalised_loss(..., weights=) in a loop of your own"
            raise ConfigError(WEIGHTS, "a field of the samples", f"{loss} has no weights", remedy)

    def check_loss(self, divisor: float, weighted: bool) -> None:
        """Holds what a loss over these labels is divided by, and whether it has weights, against the iteration's.
        Warns where a kind is not called: its layers may be on another stage. Raises ConfigError, ExecutionError."""
        self.check_unchanged()
        require_calls(self.handle, 0, 1, "hand batch.handle on to every layer of the model")
        if WEIGHTS in self.fields and not weighted:
            remedy = f"give weights=batch.fields[{WEIGHTS!r}] and batch.total_weight, or leave the field out"
            raise ConfigError("weights", None, f"samples have {WEIGHTS}", remedy)
        if unused := sorted({*self.handle.kinds} - self.handle.called.keys()):
            warn(f"no layer has called attention of the kinds {unused}: give each its kind=", stacklevel=3)
        own = {float(max(self.valid_tokens, 1)), float(self.valid_tokens), self.total_weight}
        here = float((self.labels != IGNORED).sum()) if weighted and divisor not in own else divisor
        if divisor not in own and divisor == here:
            rule = f"labels of all ranks and microbatches of the step are {self.valid_tokens}"
            remedy = "give batch.valid_tokens; with weights, batch.total_weight or the sum over all ranks"
            raise ConfigError("valid_tokens", divisor, rule, remedy)

    def check_unchanged(self) -> None:
        """Raises ConfigError for labels that were written to."""
        if not self.labels.is_inference() and self.labels._version:
            raise ConfigError("labels", "changed", *_COUNTED)

    def check_others(self, labels: Tensor, divisor: float) -> None:
        """Raises ConfigError for labels [rows], or [rows - 1], that are what the next row has, of another text or rank,
        and for those of the batch of which some are left out, divided by the number of all."""
        if len(self.labels) - labels.numel() not in (0, 1):
            return
        columns = self.labels, self.tokens, self.sample_ids, self.local_to_sample
        own, tokens, samples, places = (one.cpu() for one in columns)
        given = labels.flatten().cpu()[: len(own) - 1]
        kept, ends = given != IGNORED, (samples[1:] != samples[:-1]) | (places[1:] != places[:-1] + 1)
        if torch.equal(given[kept], own[:-1][kept]):
            if divisor in (self.valid_tokens, self.total_weight) and kept.sum() < (own[:-1] != IGNORED).sum():
                raise ConfigError("labels", "fewer than the batch's", *_COUNTED)
        elif (kept & ends).any() and any(torch.equal(given[kept], one[1:][kept]) for one in (own, tokens)):
            rule = "are those of the rows behind, which are of other texts and ranks"
            raise ConfigError("labels", "shifted by a row", rule, "give batch.labels, or batch.roll of them")

    def check_kinds(self) -> None:
        """Holds how often layers called attention of each kind against the planned model. Raises ConfigError where
        kinds are swapped; warns where that would not be seen."""
        kinds = self.handle.kinds
        planned, called = ([own.get(kind, 0) for kind in kinds] for own in (self._layers, self.handle.called))
        wanted, found = (
            [number * sum(other) for number in own] for own, other in ((planned, called), (called, planned))
        )
        if found != wanted and sorted(found) == sorted(wanted):
            given = dict(zip(kinds, called, strict=True))
            rule = f"calls of layers are of other kinds than the layers of the planned model, {dict(self._layers)}"
            raise ConfigError("kind", given, rule, "give each layer its own kind=")
        if len({*planned}) < len(kinds) and {*kinds} - self.handle.declared:
            told = "would not be seen if they were swapped: give planned_attention each layer's window= (-1: no limit)"
            warn(f"the attention kinds {[*kinds]} {told}", stacklevel=1)

    def check_weights(self, weights: Tensor, rows: Tensor | None = None) -> float:
        """Raises ConfigError for weights [rows] that are a field beside its own tokens, or in proportion to one, where
        tokens of a sample differ in it. rows: which they are of, by default all. Gives by what they are a multiple of a
        shifted field, 0.0 where they are none, or of few samples, which may have factors of their own."""
        rows = torch.arange(len(self.labels)) if rows is None else rows.cpu()
        given, samples = weights.detach().double().flatten().cpu(), self.sample_ids.cpu()[rows]
        for name, values in self.fields.items():
            if values.dim() != 1:
                continue
            own = values.double().cpu()[rows]
            if name in self._shifted:
                if len({*samples.tolist()}) >= _VALUES and torch.allclose(
                    own * given.norm(), given * own.norm(), 1e-6
                ):
                    return float(given.norm() / own.norm())
                continue
            kinds = len({*zip(samples.tolist(), own.tolist(), strict=True)}) - len({*samples.tolist()})
            itself = weights.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            if kinds >= (1 if itself else _VALUES) and torch.allclose(
                own * given.norm(), given * own.norm(), 1e-2
            ):
                rule = "weighs a row by the row's own token, and its loss is of the token that it predicts"
                remedy = f"give the loader shifted=(..., {name!r}), or name the field {WEIGHTS}"
                raise ConfigError(f"weights = fields[{name!r}]", "not shifted", rule, remedy)
        return 0.0


def require_calls(handle: PlanHandle, before: int, layers: int, remedy: str) -> None:
    """Raises ExecutionError where fewer layers than these have run attention under the handle since it had `before`
    calls."""
    if (calls := handle.calls - before) < layers:
        raise ExecutionError(f"attention used the plan {calls} times in {layers} layers or more: {remedy}")
