"""Lightning adapter for planned batches.

    class Net(PlannedModule, LightningModule):
        def training_step(self, batch, index):          batch: PlannedBatch on the module's device
            logits = self.net(batch.tokens, batch.position_ids, batch.handle)
            return self.shared_loss(batch, normalised_loss(logits, batch.labels, batch.valid_tokens))

    trainer.fit(Net(), PlannedBatches(loader), PlannedBatches(eval_loader, training=False))

where `loader` and `eval_loader` are loaders, or functions that create them, since Lightning starts its ranks in `fit`.

Written for lightning 2.6, which sees N ranks as N data-parallel ranks.
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
from apportion.trainer.step.reduction import reduction_of
from apportion.trainer.step.terms import MULTIPLIED, SHARE, has_term, mark

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependencyError("lightning", "lightning", "apportion.trainer.lightning") from error


class PlannedBatches:
    """A loader as Lightning's data, or a function that creates it after Lightning has started its ranks. Lightning's
    checkpoints hold the loader's state, so resuming continues with the next batch. training: False for validation and
    tests, where every epoch is a whole pass. Raises ConfigError if epochs are not whole steps."""

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

    def __iter__(self) -> Iterator[HostBatch]:
        return map(HostBatch, self.epochs)

    def state_dict(self) -> dict[str, Any]:
        return self.epochs.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs.loader.load_state_dict(state)


def _no_loader(value: Any) -> ConfigError:
    rule = "must be a PlannedLoader, or a function without arguments that returns one"
    remedy = "pass PlannedBatches(lambda: ap.PlannedLoader(...))"
    return ConfigError("loader", type(value).__name__, rule, remedy)


class HostBatch:
    """A batch before its transfer to the device: Lightning calls `to`, which returns the PlannedBatch."""

    def __init__(self, batch: PlannedBatch) -> None:
        self._batch = batch

    def to(self, device: torch.device, **options: Any) -> PlannedBatch:
        return self._batch.to(device, **options)


def _check_unmultiplied(share: Tensor) -> None:
    """Raises ConfigError for a share already multiplied by the number of ranks; records whether it is a share."""
    watch = wiring.watch
    watch.accounted = True
    if watch.settled or not share.requires_grad:
        return
    watch.unknown = not has_term(share, SHARE)
    if has_term(share, MULTIPLIED):
        rule = "is a result of shared_loss, or has averaged_over: it would be multiplied by the ranks again"
        remedy = "call shared_loss once, without averaged_over, and return its result"
        raise ConfigError("share", "multiplied", rule, remedy)


class PlannedModule:
    """Mixin for a LightningModule, listed before it in the bases."""

    trainer: Any
    log: Any
    automatic_optimization: Any
    parameters: Any
    _shares: dict[str, Tensor]
    _starts: dict[tuple[int, int], list[Any]]  # trainer and step of the latest start -> states of its loaders

    def shared_loss(self, batch: PlannedBatch, share: Tensor, name: str | None = None) -> Tensor:
        """The loss that a step returns: `share`, this rank's part of the mean loss (`normalised_loss`),
        times Lightning's divisors (microbatches, and ranks over which gradients are averaged). Logs the mean
        over all tokens of the iteration as `name` ("train_loss", "val_loss" in validation); Lightning averages over an
        epoch's tokens. Every rank calls it. Raises ConfigError if a step is not an iteration, ExecutionError if
        attention of some or all layers has not used the batch's plan."""
        if share is None:  # the loss of a model without labels: see `hf.inputs`
            batch.check_unweighted("the model's own loss")
        require_calls(batch.handle, 0, 1, "pass batch.handle to every layer, or call hf.enable(model)")
        check_share(share, batch, None)
        _check_unmultiplied(share)
        trainer, stage = self.trainer, "train" if self.trainer.training else "val"
        steps = batch.microbatch + 1 == trainer.accumulate_grad_batches
        if trainer.training and self.automatic_optimization and steps != batch.is_last:
            rule, actual = "a step must be an iteration", trainer.accumulate_grad_batches
            remedy = "set it to the loader's microbatches"
            raise ConfigError("accumulate_grad_batches", actual, rule, remedy)
        if trainer.training and trainer.fit_loop._combined_loader_states_to_load:
            rule = "has not loaded the data position, so the samples of earlier epochs would be repeated"
            raise ConfigError("on_train_start", "your own", rule, "call super().on_train_start() there")
        if trainer.training and trainer.overfit_batches:
            rule = "would train on new batches: an epoch continues where the last one ended"
            remedy = "give the loader a dataset of the samples to overfit"
            raise ConfigError("overfit_batches", trainer.overfit_batches, rule, remedy)
        self._log(batch, share.detach(), name or f"{stage}_loss")
        sharded = reduction_of(None, {*map(id, self.parameters())})  # over any ranks of the strategy's mesh
        replicas = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        loss: Tensor = share * (sharded.ranks if sharded else replicas) * trainer.accumulate_grad_batches
        mark(loss, MULTIPLIED)
        return loss

    def on_train_start(self) -> None:
        """Loads the position in the data from a checkpoint saved at an epoch's end, which Lightning does not do, or,
        after trial steps (a learning-rate finder's), the position before them."""
        loop, start = self.trainer.fit_loop, (id(self.trainer), self.trainer.global_step)
        loaders = [one for one in loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
        states = loop._combined_loader_states_to_load or self.__dict__.get("_starts", {}).get(start, [])
        for one, state in zip(loaders, states, strict=False):
            if isinstance(one, PlannedBatches | PlannedLoader):
                one.load_state_dict(state)
        self._starts = {start: [one.state_dict() for one in loaders]}
        loop._combined_loader_states_to_load = []

    def _log(self, batch: PlannedBatch, share: Tensor, name: str) -> None:
        shares = self.__dict__.setdefault("_shares", {})
        shares[name] = share + (shares.get(name, 0) if batch.microbatch else 0)
        if batch.is_last:
            mean = self.trainer.strategy.reduce(shares[name].clone(), reduce_op="mean") * wiring.watch.ranks
            is_evaluation = not self.trainer.training  # Lightning requires it; all values are equal
            self.log(name, mean, batch_size=batch.valid_tokens, sync_dist=is_evaluation)
