"""Shared parts of trainer adapters: attention kinds by the windows of layers, groups of ranks, passes and epochs, and
two halves of an iteration as one microbatch of a trainer's model.

Passes over shuffled samples differ in length, but Trainer and Lightning assume the first length for all. So their
epochs continue where the previous one ended, even in the middle of a pass, and only the loader's own state determines
what is skipped or resumed. Rows of halves are concatenated, so row-wise modules need no change, and each transformer
layer splits them:

    rows of ping, rows of pong ──embedding──► layer ──► layer ──► head, loss
                                             └─ run_halves: attention of one half overlaps the other's linear layers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.masks.specs import causal, sliding_window
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.step.pingpong import PingPongLayer, ping_pong


def kinds_of(windows: Sequence[int], full: str, window: str) -> tuple[Any, Any]:
    """(`layers` of a Model, the mask of each kind) for layers with these windows, 0 or less for no limit. full, window:
    the trainer's names of the kinds. If all layers are causal: their number, and None. Raises ConfigError for different
    windows."""
    names = [window if tokens > 0 else full for tokens in windows]
    if window not in names:
        return len(names), None
    if len(widths := sorted({width for width in windows if width > 0})) > 1:
        raise ConfigError(
            "windows of layers", widths, f"all layers of the kind {window!r} share a mask", "use one"
        )
    kinds = zip(names, windows, strict=True)
    return dict(Counter(names)), {
        name: sliding_window(width) if width > 0 else causal() for name, width in kinds
    }


def count_planned(
    parts: Iterable[Any], attribute: str, planned: type, remedy: str, recurrent: tuple[type, ...] = ()
) -> int:
    """The number of layers on this stage with planned attention as `attribute`. recurrent: classes of other layers that
    support plans. Raises ConfigError if a layer has no attention, or attention of a different class: a recurrent layer
    would see only a rank's rows."""
    count, parts = 0, [*parts]
    for name, layer in (named for part in parts for named in _layers(part).named_children()):
        if not any(hasattr(child, attribute) or isinstance(child, recurrent) for child in layer.modules()):
            rule = f"has no {attribute}, and may look at rows that other ranks hold"
            raise ConfigError(
                f"layers.{name}", type(layer).__name__, rule, "plan models with attention layers only"
            )
    for name, module in (named for part in parts for named in part.named_modules()):
        if (instance := getattr(module, attribute, None)) is None:
            continue
        if not isinstance(instance, planned):
            type_name = type(instance).__name__
            raise ConfigError(f"{name}.{attribute}", type_name, "does not support plans", remedy)
        count += 1
    return count


def endless(
    loader: PlannedLoader, passes: Callable[[PlannedLoader], Iterable[Any]] = iter
) -> Generator[Any, None, None]:
    """Iterates over passes endlessly, from the loader's position. passes: function that returns one, such as
    `PlannedLoader.pairs`. Raises ConfigError for a pass without a batch, which would never end."""
    while True:
        start = loader.state_dict()
        yield from passes(loader)
        end = loader.state_dict()
        if (start["iteration"], end["iteration"]) == (0, 0):
            raise ConfigError("sampler", "an empty pass", "a pass must have batches", "pass more samples")
        loader.set_epoch(end["epoch"] + 1)


def _layers(part: Any) -> Any:
    """The layers of a Megatron or Titan model."""
    return getattr(getattr(part, "decoder", part), "layers", Module())


def require(field: str, value: Any, expected: Any, rule: str) -> None:
    """Raises ConfigError if a trainer's field has another value."""
    if value != expected:
        raise ConfigError(field, value, rule, f"set it to {expected}")


def require_known(package: str, owner: type, *methods: str, remedy: str) -> None:
    """Raises ConfigError if a class overrides methods that its trainer's package defines, and that plans replace."""
    for method in methods:
        module = getattr(owner, method).__module__
        if module.partition(".")[0] != package:
            rule = f"overrides a method of {package}, and plans would leave out what it computes"
            raise ConfigError(f"{owner.__name__}.{method}", module, rule, remedy)


def digest_of(handle: PlanHandle, columns: Iterable[Tensor], before: int = 0) -> int:
    """A checksum of a batch's plan and columns, continued from that of earlier batches."""
    data = b"".join(column.cpu().numpy().tobytes() for column in columns)
    return crc32(handle.name.encode() + data, before)


def require_equal(digests: Iterable[int], groups: Iterable[Any], device: torch.device) -> None:
    """Raises ExecutionError if the ranks of these groups, which hold parts of one model, have read different batches.
    digests: this rank's, one per chunk of the model. A collective."""
    digests = [*digests]
    bounds = torch.tensor([max(digests), -min(digests)], device=device)
    for group in groups:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if bounds.sum():
        rule = "tensor-parallel ranks, or stages or chunks of a pipeline, have read different batches"
        remedy = (
            "give their loaders the same samples in the same order: trainers may seed each stage differently"
        )
        raise ExecutionError(f"{rule}: {remedy}")


def communicator_of(groups: Sequence[Sequence[int]]) -> Communicator:
    """The communicator of this process's group; the groups partition the world, and each runs its own plans. A
    collective of the world."""
    if len(groups) == 1:
        return Communicator.shared()
    shares: Any = partial(dist.new_subgroups_by_enumeration, [list(ranks) for ranks in groups])
    group, hosts = shares()[0], shares(backend="gloo")[0]
    return Communicator(group, hosts=hosts)


def join_halves(batches: Sequence[PlannedBatch]) -> PlannedBatch:
    """A microbatch unchanged, or the rows of two halves of an iteration under the first half's handle."""
    if len(batches) == 1:
        return batches[0]
    names = ("tokens", "labels", "position_ids")
    columns: Any = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    fields = {name: torch.cat([batch.fields[name] for batch in batches]) for name in batches[0].fields}
    return replace(batches[0], **columns, fields=fields)


def run_halves(
    layer: PingPongLayer, hidden: Tensor, handles: tuple[PlanHandle, ...], settings: Mapping[str, Any]
) -> Tensor:
    """Runs hidden [rows, ...] of two halves through a layer. settings: window, causal and layer, as in
    `planned_attention`. Raises `ping_pong`'s errors, and ConfigError for a mask that differs from the plans'."""
    ping, pong = handles
    for handle in handles:
        handle.check(handle.kind(layer.kind), **settings)
    first, second = torch.split(hidden, [handle.padded_rows for handle in handles])
    return torch.cat(ping_pong((layer,), first, second, ping, pong))


@dataclass
class Epochs:
    """A loader in epochs of equal length and optimizer steps of equal numbers of microbatches, as trainers expect.

    accumulated: microbatches of an optimizer step, None for evaluation, where every epoch is a whole pass over all
    samples, also of the loader that is being trained on.
    valid_tokens: labels so far in this epoch, on all ranks. Raises ConfigError if steps do not fit iterations."""

    loader: PlannedLoader
    accumulated: int | None = None
    valid_tokens: int = 0

    def __post_init__(self) -> None:
        if self.accumulated is None:
            self.loader = self.loader._for_evaluation()
        with torch.set_grad_enabled(self.accumulated is not None):
            self._length = len(self.loader)
        if self.accumulated is not None and self._length % self.accumulated:
            rule = f"an epoch of {self._length} microbatches is not a whole number of steps"
            remedy = "accumulate the loader's number of microbatches, and give the loader drop_last=True"
            raise ConfigError("accumulated microbatches", self.accumulated, rule, remedy)

    def __len__(self) -> int:
        """The number of microbatches of an epoch."""
        return self._length

    def __iter__(self) -> Generator[PlannedBatch, None, None]:
        """Iterates over an epoch; closes its pass at the end, or when it is abandoned. Raises ExecutionError."""
        batches, self.valid_tokens = self._pass(), 0
        try:
            for _ in range(len(self)):
                with torch.set_grad_enabled(self.accumulated is not None):
                    batch = next(batches)
                self._check(batch)
                self.valid_tokens += batch.valid_tokens if batch.is_last else 0
                yield batch
        finally:
            state = self.loader.state_dict()
            batches.close()
            self.loader.load_state_dict(state)

    def _pass(self) -> Generator[PlannedBatch, None, None]:
        return iter(copy(self.loader)) if self.accumulated is None else endless(self.loader)

    def _check(self, batch: PlannedBatch) -> None:
        if self.accumulated is not None and batch.is_last != (batch.microbatch + 1 == self.accumulated):
            message = (
                f"iteration {batch.iteration} does not have the {self.accumulated} microbatches of a step"
            )
            remedy = f"make the loader with microbatches={self.accumulated} and drop_last=True"
            raise ExecutionError(f"{message}: {remedy}")
