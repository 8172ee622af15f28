"""What adapters of trainers share: kinds of attention by the windows of layers, passes, and groups of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError
from apportion.ir.masks.specs import causal, sliding_window
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader


def kinds_of(windows: Sequence[int], full: str, window: str) -> tuple[Any, Any]:
    """(`layers` of a Model, the mask of each kind) of layers that see so many tokens, 0 or fewer for all. full, window:
    what the trainer calls the kinds. Where all layers are causal: their number, and None."""
    names = [window if tokens > 0 else full for tokens in windows]
    if window not in names:
        return len(names), None
    kinds = zip(names, windows, strict=True)
    return dict(Counter(names)), {name: sliding_window(own) if own > 0 else causal() for name, own in kinds}


def count_planned(parts: Iterable[Any], attribute: str, planned: type, remedy: str) -> int:
    """How many layers of a model's parts on this stage have planned attention as `attribute`. Raises ConfigError where
    one has another."""
    found = 0
    for name, module in (named for part in parts for named in part.named_modules()):
        if (own := getattr(module, attribute, None)) is None:
            continue
        if not isinstance(own, planned):
            given = type(own).__name__
            raise ConfigError(f"{name}.{attribute}", given, "would not know the plan", remedy)
        found += 1
    return found


def endless(loader: PlannedLoader) -> Generator[PlannedBatch, None, None]:
    """Pass after pass, from where the loader is. Raises ConfigError for a whole pass without a batch, which would go on
    for ever."""
    while True:
        begun = loader.state_dict()
        yield from loader
        over = loader.state_dict()
        if (begun["iteration"], over["iteration"]) == (0, 0):
            raise ConfigError("sampler", "an empty pass", "a pass must have batches", "give more samples")
        loader.set_epoch(over["epoch"] + 1)


def require(field: str, value: Any, wanted: Any, rule: str) -> None:
    """Raises ConfigError where a trainer's field has another value."""
    if value != wanted:
        raise ConfigError(field, value, rule, f"set it to {wanted}")


def communicator_of(groups: Sequence[Sequence[int]]) -> Communicator:
    """Of the group that holds this process; groups share the world out, and each runs plans of its own. All processes
    of the world call it."""
    if len(groups) == 1:
        return Communicator.shared()
    shares: Any = partial(dist.new_subgroups_by_enumeration, [list(ranks) for ranks in groups])
    own, hosts = shares()[0], shares(backend="gloo")[0]
    return Communicator(own, hosts=hosts)
