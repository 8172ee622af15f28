"""Arguments of a loader, checked, and what it takes where they are left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from apportion.backends.torch.transport import Communicator, Transport
from apportion.ir.arrays import Ints
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.fields import flag, integers, name
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import Mask
from apportion.ir.request.sampling import Masks
from apportion.trainer.loading.rows import Dataset

MAX_RUN = 48  # characters: the service takes 64, and passes are numbered behind them


def lengths_of(dataset: Dataset, lengths: ArrayLike | None) -> Ints:
    """int64 [n]: tokens of each sample, as given or as the dataset has them. Raises ConfigError."""
    found = getattr(dataset, "lengths", None) if lengths is None else lengths
    if found is None:
        rule = "planning needs the length of each sample before it is read"
        raise ConfigError("lengths", None, rule, "give lengths, or a dataset that has them as `lengths`")
    listed = found if isinstance(found, list | tuple | range) else np.asarray(found)
    checked = integers("lengths", listed, 1, MAX_TOKENS)
    held = len(dataset) if isinstance(dataset, Sized) else "an unknown number of"
    if held != len(checked):
        rule = f"there must be one for each sample, and the dataset has {held} samples"
        raise ConfigError("lengths", f"{len(checked)} lengths", rule, "give the length of each sample")
    return checked


def masks_here(dataset: Dataset, masks: Masks) -> Masks:
    """As given or as the dataset has them. Raises ConfigError for what cannot be masks."""
    found: Masks = getattr(dataset, "masks", None) if masks is None else masks
    if isinstance(found, str) or not (found is None or isinstance(found, Mask | Sized)):
        rule = "must be a mask, {kind: mask}, or a list of these, one a sample"
        raise ConfigError("masks", found, rule, "write ap.masks.causal()")
    return found


def sampler_of(sampler: Iterable[Any] | None, shuffle: bool | None, seed: int | None) -> Iterable[Any] | None:
    """The trainer's own order of the samples. Raises ConfigError where it is none, or is given beside what only draws
    the default order."""
    drawn = None if shuffle is None else flag("shuffle", shuffle) or None
    if sampler is None:
        return None
    if isinstance(sampler, str) or not isinstance(sampler, Iterable):
        rule = "must be iterable, and give the sample numbers of each iteration"
        raise ConfigError("sampler", sampler, rule, "give lists, as torch's BatchSampler makes them")
    for field, value in (("shuffle", drawn), ("seed", seed)):
        if value is not None:
            rule = "is of the default order, and a sampler gives another"
            raise ConfigError(field, value, rule, "leave it or the sampler out")
    return sampler


def shifted_of(shifted: Collection[str]) -> frozenset[str]:
    """The names of fields. Raises ConfigError, also for a single name, whose letters would be names."""
    listed = isinstance(shifted, Iterable) and not isinstance(shifted, str)
    names = list(shifted) if listed else [None]
    if not all(isinstance(one, str) for one in names):
        raise ConfigError("shifted", shifted, "must be a list of fields' names", 'write ["labels"]')
    return frozenset(map(str, names))


def communicator_of(job: Job, given: Communicator | None, rank: int | None) -> Communicator:
    """The ranks that train together. Raises ConfigError where they are not the job's."""
    found = Communicator.shared() if given is None else given
    if not isinstance(found, Transport):
        raise ConfigError("communicator", found, "must be a Communicator", "make one of the process group")
    if found.ranks != job.ranks:
        rule = f"the job plans for {job.ranks} ranks, and this process is one of {found.ranks}"
        remedy = "initialise torch.distributed with as many before the loader is made, or make another job"
        raise ConfigError("cluster", f"{job.ranks} ranks", rule, remedy)
    if rank not in (None, found.rank):
        rule = f"this process is rank {found.rank} of its group"
        raise ConfigError("rank", rank, rule, "leave it out, or give the communicator of the right group")
    return found


def device_of(given: torch.device | str | None) -> torch.device:
    """Where attention runs: this process' GPU where it has one. With its number: threads have a current one of their
    own. Raises ConfigError."""
    try:
        device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        rule = f"is no device of torch ({str(error).splitlines()[0]})"
        raise ConfigError("device", given, rule, 'write "cpu", "cuda" or "cuda:0"') from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def run_of(run: str | None) -> str | None:
    """The name of a run. Raises ConfigError where it has no room for the number of a pass."""
    if run is not None and len(name("run", run)) > MAX_RUN:
        raise ConfigError("run", run, f"must have at most {MAX_RUN} characters", "write a shorter name")
    return run
