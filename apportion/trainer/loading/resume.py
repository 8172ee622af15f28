"""Where a loader is, as plain data, and what that is worth to another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from apportion.ir.bytes.origin import difference
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer

VERSION = 2


class Place(NamedTuple):
    """The microbatch that comes next: of an iteration, and that of an epoch."""

    epoch: int = 0
    iteration: int = 0
    microbatch: int = 0


def state_of(place: Place, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `place_of` reads: JSON-like data. facts: what must be the same where a pass goes on."""
    return {"version": VERSION, **place._asdict(), **facts}


def place_of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Place:
    """Where the loader was that this state is of. Raises ConfigError where it had other samples, another job or another
    order, by the name of what differs."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION or not all(name in state for name in Place._fields):
        rule = "is not the state of a loader of this release"
        raise ConfigError("state", version, rule, "give what `state_dict()` returned")
    found = difference({name: state.get(name) for name in facts}, facts)
    if found is not None:
        name, saved, own = found
        rule = f"the state was saved with another {name.removeprefix('job.')}: this loader has {own!r}"
        remedy = "give the loader what it had then, or leave the state out and begin anew"
        raise ConfigError(f"state.{name}", saved, rule, remedy)
    return Place(*(integer(f"state.{name}", state[name], 0) for name in Place._fields))
