"""Lightning on planned batches.

    class Net(Planned, LightningModule):
        def training_step(self, batch, index):          batch: PlannedBatch on the module's device
            logits = self.net(batch.tokens, batch.position_ids, batch.handle)
            return self.shared_loss(batch, normalised_loss(logits, batch.labels, batch.valid_tokens))

    trainer.fit(Net(), PlannedBatches(loader), PlannedBatches(evaluated, training=False))

where `loader` and `evaluated` are loaders, or functions that make them: Lightning starts its ranks in `fit`.

Written for lightning 2.6; N ranks are N data-parallel ranks to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.shared import Epochs
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import check_share
from apportion.trainer.step.microbatch import require_calls
from apportion.trainer.step.terms import MULTIPLIED, SHARE, holds, mark

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependencyError("lightning", "lightning", "apportion.trainer.lightning") from error


class PlannedBatches:
    """A loader as Lightning's data, or a function that makes it when Lightning has started its ranks. Its state is in
    Lightning's checkpoints, and a resumed run gets the batches that would have come. training: False for validation and
    tests, of which every epoch is the whole pass. Raises ConfigError where epochs are not whole steps."""

    def __init__(self, loader: PlannedLoader | Callable[[], PlannedLoader], training: bool = True) -> None:
        self._loader, self._training = loader, training
        if not isinstance(loader, PlannedLoader) and not callable(loader):
            raise _no_loader(loader)

    @cached_property
    def epochs(self) -> Epochs:
        loader = self._loader if isinstance(self._loader, PlannedLoader) else self._loader()
        if not isinstance(loader, PlannedLoader):
            raise _no_loader(loader)
        return Epochs(loader, loader.job.microbatches if self._training else None)

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[Arriving]:
        return map(Arriving, self.epochs)

    def state_dict(self) -> dict[str, Any]:
        return self.epochs.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs.loader.load_state_dict(state)


def _no_loader(given: Any) -> ConfigError:
    rule = "must be a PlannedLoader, or a function without arguments that makes one"
    remedy = "give PlannedBatches(lambda: ap.PlannedLoader(...))"
    return ConfigError("loader", type(given).__name__, rule, remedy)


class Arriving:
    """A batch on its way to the device: what Lightning moves is the PlannedBatch from then on."""

    def __init__(self, batch: PlannedBatch) -> None:
        self._batch = batch

    def to(self, device: torch.device, **options: Any) -> PlannedBatch:
        return self._batch.to(device, **options)


def _check_made(share: Tensor) -> None:
    """Raises ConfigError for what `shared_loss` has multiplied already; notes what is made of no share."""
    watch = wiring.watch
    watch.accounted = True
    if watch.settled or not share.requires_grad:
        return
    watch.unknown = not holds(share, SHARE)
    if not watch.unknown and holds(share, MULTIPLIED):
        rule = "is what shared_loss has returned, and would be multiplied by the ranks once more"
        raise ConfigError("share", "multiplied", rule, "call shared_loss once, and return what it gives")


class Planned:
    """Mixed into a LightningModule, before it."""

    trainer: Any
    log: Any
    _shares: dict[str, Tensor]

    def shared_loss(self, batch: PlannedBatch, share: Tensor, name: str | None = None) -> Tensor:
        """What a step returns of `share`, this rank's part of the mean loss (`normalised_loss`): times what Lightning
        divides by, microbatches and the ranks over which gradients are averaged. Logs the mean over all tokens of the
        iteration as `name` ("train_loss", "val_loss" in validation); over an epoch Lightning makes the mean over
        tokens. Every rank calls it. Raises ConfigError where a step is not an iteration, ExecutionError where attention
        has not used the batch's plan, in one layer or in all."""
        require_calls(batch.handle, 0, 1, "hand batch.handle on to every layer, or call hf.enable(model)")
        check_share(share, batch, None)
        _check_made(share)
        trainer, stage = self.trainer, "train" if self.trainer.training else "val"
        steps = batch.microbatch + 1 == trainer.accumulate_grad_batches
        if trainer.training and steps != batch.is_last:
            rule, given = "a step must be an iteration", trainer.accumulate_grad_batches
            remedy = "give it as many as the loader's microbatches"
            raise ConfigError("accumulate_grad_batches", given, rule, remedy)
        self._log(batch, share.detach(), name or f"{stage}_loss")
        averaged = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        loss: Tensor = share * averaged * trainer.accumulate_grad_batches
        mark(loss, MULTIPLIED)
        return loss

    def _log(self, batch: PlannedBatch, share: Tensor, name: str) -> None:
        held = self.__dict__.setdefault("_shares", {})
        held[name] = share if batch.microbatch == 0 else held[name] + share
        if batch.is_last:
            mean = self.trainer.strategy.reduce(held[name].clone(), reduce_op="sum")
            evaluating = not self.trainer.training  # Lightning asks for it; the mean of equal values
            self.log(name, mean, batch_size=batch.valid_tokens, sync_dist=evaluating)
