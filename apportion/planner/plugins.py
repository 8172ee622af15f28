"""Entry points of other packages: discovery and loading."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from apportion.ir.errors import ConfigError


def discover(group: str) -> dict[str, EntryPoint]:
    """name -> entry point of the group, sorted by name, not yet loaded. Raises ConfigError if two share a name."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            rule = f"is added by {distribution(other)} and by {distribution(point)}"
            raise ConfigError(f"entry point {group}", point.name, rule, "uninstall one of them")
    return points


def load(point: EntryPoint, expected: type[Any] | tuple[type[Any], ...]) -> Any:
    """Loads an entry point. Raises ConfigError, naming the distribution, if it cannot be imported or is not an instance
    of `expected`."""
    try:
        value = point.load()
    except Exception as error:
        rule = f"{distribution(point)} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(_field(point), point.value, rule, "repair or uninstall it") from error
    if not isinstance(value, expected):
        names = " or ".join(
            kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,))
        )
        rule = f"{distribution(point)} has the type {type(value).__name__}, not {names}"
        raise ConfigError(_field(point), point.value, rule, "repair or uninstall it")
    return value


def distribution(point: EntryPoint) -> str:
    """The distribution of an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def _field(point: EntryPoint) -> str:
    return f"entry point {point.group}:{point.name}"


def entry_point_error(point: EntryPoint, rule: str, remedy: str) -> ConfigError:
    """The ConfigError that names an entry point and its distribution."""
    return ConfigError(f"entry point {point.group}", point.name, f"{distribution(point)} {rule}", remedy)
