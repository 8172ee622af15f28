"""Checks the arguments of a loader and fills in their defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.distributed import ProcessGroup
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from apportion.backends.torch.transport import Communicator, Transport
from apportion.ir.arrays import Ints
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.fields import flag, integers
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import Mask
from apportion.ir.request.sampling import Masks
from apportion.ir.request.sequences import DEFAULT_KIND
from apportion.trainer.loading.rows import LABELS, Dataset

_PARTS = 16  # datasets to look at in a list, whose items may also be samples


def own_lengths(dataset: Any) -> Any:
    """The `lengths` of a dataset; of torch's Subset and ConcatDataset, those of their samples; None: it has none."""
    if isinstance(dataset, Subset):
        values = own_lengths(dataset.dataset)
        return None if values is None else np.asarray(values)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [own_lengths(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    return getattr(dataset, "lengths", None)


def own_masks(dataset: Any) -> Any:
    """The `masks` of a dataset; of torch's Subset and ConcatDataset, those of their samples; None: it has none."""
    if isinstance(dataset, Subset):
        masks = own_masks(dataset.dataset)
        return masks if _is_single(masks) else [masks[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts: list[Any] = [(part, own_masks(part)) for part in dataset.datasets]
        if all(masks is None for _, masks in parts):
            return None
        lists = ([masks] * len(part) if _is_single(masks) else masks for part, masks in parts)
        return [*chain.from_iterable(lists)]
    return getattr(dataset, "masks", None)


def _hidden_masks(dataset: Any, depth: int = 3) -> tuple[str, Any] | None:
    """The masks of samples that a wrapper without `masks` reads, and the attribute with these samples; None: none."""
    if isinstance(dataset, ConcatDataset):
        return next(filter(None, map(_hidden_masks, dataset.datasets)), None)
    if depth == 0 or hasattr(dataset, "masks"):
        return None
    attributes: dict[str, Any] = getattr(dataset, "__dict__", {})
    for name, value in attributes.items():
        parts = value[:_PARTS] if isinstance(value, list | tuple) else [value]
        for part in (part for part in parts if hasattr(part, "__getitem__")):
            if _are_masks(masks := own_masks(part)):
                return name, masks
            if inner := _hidden_masks(part, depth - 1):
                return f"{name}.{inner[0]}", inner[1]
    return None


def _is_single(masks: Any) -> bool:
    return isinstance(masks, Mask | Mapping | None)


def _are_masks(masks: Any) -> bool:
    """Whether a dataset's `masks` are a plan's, not such as a dataset of images has."""
    return any(isinstance(one, Mask | Mapping) for one in (masks if isinstance(masks, Sequence) else [masks]))


def check_map_style(dataset: Any) -> None:
    """Raises ConfigError for a stream, such as a generator or one of torch's iterable datasets."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        rule, remedy = "has no length", "give a map-style dataset, or a stream to ap.StreamedLoader"
        raise ConfigError("dataset", type(dataset).__name__, rule, remedy)


def lengths_of(dataset: Dataset, lengths: ArrayLike | None) -> Ints:
    """int64 [n]: tokens of each sample, from the argument or the dataset. Raises ConfigError."""
    check_map_style(dataset)
    values = own_lengths(dataset) if lengths is None else lengths
    if values is None:
        rule = "planning needs the length of each sample before it is read"
        raise ConfigError("lengths", None, rule, "pass lengths, or a dataset that has them as `lengths`")
    array = values if isinstance(values, list | tuple | range) else np.asarray(values)
    checked = integers("lengths", array, 1, MAX_TOKENS)
    if len(dataset) != len(checked):
        rule = f"there must be one for each sample, and the dataset has {len(dataset)} samples"
        raise ConfigError("lengths", f"{len(checked)} lengths", rule, "give the length of each sample")
    return checked


def masks_of(dataset: Dataset, masks: Masks) -> Masks:
    """The masks, from the argument or the dataset. Raises ConfigError for values that are not masks, for a single mask
    that would replace the dataset's masks, one per sample, and for masks that a wrapper does not pass on."""
    own: Masks = own_masks(dataset)
    value = own if masks is None else masks
    if isinstance(value, str) or not isinstance(value, Mask | Sized | None):
        rule = "must be a mask, {kind: mask}, or a list of these, one per sample"
        raise ConfigError("masks", value, rule, "write ap.masks.causal()")
    hidden = None if own is not None else _hidden_masks(dataset)
    if hidden is not None and (masks is None or (_is_single(masks) and not _is_single(hidden[1]))):
        rule, remedy = (
            "would be ignored: its wrapper has no masks",
            "add the attribute, or give the loader a list",
        )
        raise ConfigError(f"dataset.{hidden[0]}.masks", "given", rule, remedy)
    if isinstance(masks, Mask | Mapping) and not _is_single(own):
        rule = (
            "would replace the dataset's masks, one per sample, such as those of packed documents or of trees"
        )
        remedy = "leave it out, or pass a list made from dataset.masks; for trees, disable the model's sliding window"
        raise ConfigError("masks", masks, rule, remedy)
    return value


def check_kinds(job: Job, masks: Masks) -> None:
    """Raises ConfigError if the attention kinds of the masks are not those of the model's layers.

    masks: as in batches; if there is one per sample, only the first is checked, since all must have its kinds."""
    layers = job.model.layers
    if not isinstance(layers, Mapping):
        return
    first = masks if masks is None or isinstance(masks, Mask | Mapping) else next(iter(masks), None)
    kinds = sorted(first) if isinstance(first, Mapping) else [DEFAULT_KIND]
    if kinds != sorted(layers):
        rule = f"the masks have the attention kinds {kinds}, the layers of the job's model {sorted(layers)}"
        raise ConfigError("masks", kinds, rule, "give a mask of each kind, masks={kind: mask, …}")


def sampler_of(sampler: Iterable[Any] | None, shuffle: bool | None) -> Iterable[Any] | None:
    """The trainer's own order of the samples. Raises ConfigError if it is not iterable, or combined with `shuffle`."""
    if sampler is None:
        return None
    if isinstance(sampler, str) or not isinstance(sampler, Iterable):
        rule = "must be iterable, and yield the sample numbers of each iteration"
        raise ConfigError("sampler", sampler, rule, "give lists, as torch's BatchSampler yields them")
    if shuffle is not None and flag("shuffle", shuffle):
        rule = "applies to the default order, and a sampler replaces it"
        raise ConfigError("shuffle", shuffle, rule, "leave it or the sampler out")
    return sampler


def field_names(shifted: Collection[str]) -> frozenset[str]:
    """The names of the shifted fields. Raises ConfigError, also for a string, whose letters would become names."""
    is_list = isinstance(shifted, Iterable) and not isinstance(shifted, str)
    if not is_list or not all(isinstance(name, str) for name in shifted):
        raise ConfigError("shifted", shifted, "must be a list of field names", 'write ["labels"]')
    if LABELS not in shifted:
        rule = f"must have {LABELS!r}, which always belong to the predicted token"
        raise ConfigError("shifted", [*shifted], rule, "add it; give labels of the own token another name")
    return frozenset(shifted)


def communicator_of(job: Job, value: Communicator | None) -> Communicator:
    """The communicator of the ranks that train together. Raises ConfigError if they are not the job's."""
    communicator = Communicator.shared() if value is None else value
    if not isinstance(communicator, Transport):
        raise ConfigError(
            "communicator", communicator, "must be a Communicator", "make one from the process group"
        )
    if communicator.ranks != job.ranks:
        rule = f"the job plans for {job.ranks} ranks, and this process is one of {communicator.ranks}"
        remedy = "initialise torch.distributed before creating the loader, or pass another cluster"
        raise ConfigError("cluster", f"{job.ranks} ranks", rule, remedy)
    return communicator


def replicas_of(value: Transport | Any) -> Transport | None:
    """The transport of the ranks in this rank's position in each group, None for one group. Raises ConfigError."""
    if value is None or isinstance(value, Transport):
        return value
    if not isinstance(value, ProcessGroup):
        rule = "must be a process group of the ranks in this rank's position in each group"
        raise ConfigError("replicas", value, rule, "pass one from torch.distributed.new_group")
    return Communicator(value)


def device_of(value: torch.device | str | None) -> torch.device:
    """The device of attention, with an index because each thread has its own current device; by default this process'
    GPU, else the CPU. Raises ConfigError."""
    try:
        device = torch.device(value or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        rule = f"is not a torch device ({str(error).splitlines()[0]})"
        raise ConfigError("device", value, rule, 'write "cpu", "cuda" or "cuda:0"') from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
