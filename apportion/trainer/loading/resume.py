"""Where a loader is, as plain data, and what that is worth to another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer
from apportion.ir.hashing import digest
from apportion.ir.request.sampling import Masks, Sampling
from apportion.trainer.loading.iterations import Asked

VERSION = 1
_SHOWN = 16  # hex digits of a fingerprint
_NUMBERS = ("epoch", "iteration", "microbatch")


@dataclass(frozen=True)
class Place:
    """The microbatch that comes next: of an iteration, and that of an epoch."""

    epoch: int = 0
    iteration: int = 0
    microbatch: int = 0

    def after(self, iteration: int, microbatch: int, is_last: bool) -> Place:
        """The one behind that microbatch."""
        if is_last:
            return Place(self.epoch, iteration + 1)
        return Place(self.epoch, iteration, microbatch + 1)

    def at(self, iteration: int) -> Place:
        """The begin of an iteration of this epoch."""
        return replace(self, iteration=iteration, microbatch=0)


def fingerprint(asked: Asked, sampling: Sampling | None) -> dict[str, Any]:
    """What must be the same where a pass goes on: of the samples, of the job, of their order."""
    job = {name: _digest(data) for name, data in sorted(asked.job.to_data().items())}
    return {
        "lengths": _digest(
            [len(asked.lengths), digest(np.ascontiguousarray(asked.lengths, "<i8").tobytes())]
        ),
        "masks": _digest(_masks_data(asked.masks)),
        "job": job,
        "seed": None if sampling is None else sampling.seed,
        "shuffle": None if sampling is None else sampling.shuffle,
    }


def state_of(place: Place, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `place_of` reads: JSON-like data."""
    return {"version": VERSION, **{name: getattr(place, name) for name in _NUMBERS}, **facts}


def place_of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Place:
    """Where the loader was that this state is of. Raises ConfigError where it had other samples, another job or another
    order, by the name of what differs."""
    _check_form(state)
    held, own = _flat(facts), _flat({name: state.get(name) for name in facts})
    for name, there in held.items():
        if own.get(name) != there:
            rule = f"the state was saved with another {name.removeprefix('job.')}: this loader has {there!r}"
            remedy = "give the loader what it had then, or leave the state out and begin anew"
            raise ConfigError(f"state.{name}", own.get(name), rule, remedy)
    return Place(*(integer(f"state.{name}", state[name], 0) for name in _NUMBERS))


def _check_form(state: Any) -> None:
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION or not all(name in state for name in _NUMBERS):
        rule = "is not the state of a loader of this release"
        raise ConfigError("state", version, rule, "give what `state_dict()` returned")


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    job = facts.get("job")
    rest = {name: value for name, value in facts.items() if name != "job"}
    return rest | {f"job.{name}": value for name, value in (job if isinstance(job, Mapping) else {}).items()}


def _masks_data(masks: Masks) -> Any:
    """Specs as their classes print them: equal specs print alike; kinds by name."""
    if isinstance(masks, Mapping):
        return sorted((kind, repr(spec)) for kind, spec in masks.items())
    return [_masks_data(one) for one in masks] if isinstance(masks, list | tuple) else repr(masks)


def _digest(data: Any) -> str:
    return digest(msgspec.msgpack.encode(data)).hex()[:_SHOWN]
