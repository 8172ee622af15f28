"""What adapters of trainers share: a loader from the plain fields of a config file, and groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError
from apportion.ir.fields import read_text
from apportion.ir.request.cluster import Cluster
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader


def configured_loader(
    dataset: str,
    given: Sequence[Any],
    *,
    ranks: int,
    positions: int,
    token_file: str | None = None,
    cluster: str | None = None,
    masks: Any = None,
    **options: Any,
) -> PlannedLoader:
    """dataset: "module.function", called with `given`. cluster: a file, by default one node of `ranks`. positions: that
    the model knows. masks: where the dataset has none. token_file: of a service, by default that of the environment.
    Raises ConfigError, and as the loader.
    """
    data = _named(dataset)(*given)
    if (longest := max(data.lengths)) > positions:
        rule = f"the model's positions end there, and a document has {longest} tokens"
        raise ConfigError("sequence length", positions, rule, "raise it, or cut the document")
    token = None if token_file is None else read_text(Path(token_file)).strip()
    planned_for = Cluster.load(cluster) if cluster else Cluster(1, ranks)
    own = getattr(data, "masks", None)
    return PlannedLoader(data, planned_for, token=token, masks=masks if own is None else own, **options)


def endless(loader: PlannedLoader) -> Iterator[PlannedBatch]:
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


def _named(path: str) -> Any:
    module, _, function = path.rpartition(".")
    found = getattr(import_module(module), function, None) if module else None
    if found is None:
        raise ConfigError("dataset", path, "must name a function", 'write "module.function"')
    return found
