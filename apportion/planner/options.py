"""Parameters of passes and solvers: fields of frozen dataclasses, validated by their annotations.

    buffers: Annotated[int, Meta(ge=1)] = 3     ->  checked, described, listed by `apportion recipes`, in a JSON Schema

msgspec reads the annotations. Classes check rules across fields in `__post_init__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Self, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, inspect

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import MAX_COUNT, MAX_INT, mapping, scalar, suggestion

T = TypeVar("T")

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Bytes = Annotated[int, Meta(ge=1, le=MAX_INT)]
#: a time or a slack: non-negative and finite
Amount = Annotated[float, Meta(ge=0, le=1e300)]
Positive = Annotated[float, Meta(gt=0, le=1e300)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Option(ABC):
    """A parameter type with its own parser, for types that msgspec does not support."""

    @abstractmethod
    def parse(self, where: str, value: Any) -> Self:
        """Parses a `value` given instead of this default. Raises ConfigError, which names the field `where`."""

    @abstractmethod
    def describe(self) -> str:
        """Describes the accepted values, to follow `must be`."""

    @abstractmethod
    def data(self) -> Any:
        """The value as plain data."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the accepted values."""


@dataclass(frozen=True)
class Parameter:
    """A field of a dataclass: its default, and its accepted values in words and as a JSON Schema."""

    name: str
    default: Any
    takes: str
    schema: Mapping[str, Any] = field(hash=False)


def read(cls: type[T], path: str, params: Mapping[str, Any], base: T | None = None) -> T:
    """Builds a dataclass of options from plain data.

    path: its name in errors. base: provides missing values; None: the fields' defaults. Raises ConfigError,
    UnknownNameError.
    """
    hints, values = _hints(cls), {} if base is None else {name: getattr(base, name) for name in _hints(cls)}
    for name, value in mapping(path, params).items():
        if name not in hints:
            rule = f"has the parameters {', '.join(hints)}" if hints else "has no parameters"
            raise ConfigError(path, name, rule, "leave it out or correct it")
        values[name] = _value(cls, f"{path}.{name}", name, value)
    return cls(**values)


def keep(options: Any, path: str) -> None:
    """Validates the fields of a dataclass of options by their annotations. Raises the errors of `read`."""
    for name in _hints(type(options)):
        value = _value(type(options), f"{path}.{name}", name, getattr(options, name))
        object.__setattr__(options, name, value)


def parameters(cls: type[Any]) -> Iterator[Parameter]:
    """The parameters of a dataclass of options."""
    for name, (hint, default) in _hints(cls).items():
        if isinstance(default, Option):
            yield Parameter(name, default.data(), default.describe(), default.schema())
        else:
            yield Parameter(name, default, _describe(inspect.type_info(hint)), msgspec.json.schema(hint))


def schema(cls: type[Any]) -> dict[str, Any]:
    """JSON Schema of the data that `read` accepts."""
    properties = {option.name: {**option.schema, "default": option.default} for option in parameters(cls)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


_HINTS: dict[type[Any], Mapping[str, tuple[Any, Any]]] = {}


def _hints(cls: type[Any]) -> Mapping[str, tuple[Any, Any]]:
    """Name -> annotation and default of each field of a dataclass."""
    if cls not in _HINTS:
        hints = get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {item.name: (hints[item.name], item.default) for item in fields(cls)}
    return _HINTS[cls]


def _value(cls: type[Any], path: str, name: str, value: Any) -> Any:
    (hint, default), value = _hints(cls)[name], scalar(value)
    if isinstance(default, Option):
        return default.parse(path, value)
    if is_dataclass(default):
        return value if isinstance(value, type(default)) else read(type(default), path, value)
    try:
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError):
        pass
    info = inspect.type_info(hint)
    if isinstance(value, str) and (words := _literal_words(info)):
        raise UnknownNameError(path, value, f"must be {_describe(info)}", suggestion(value[:64], words))
    raise ConfigError(
        path,
        value,
        f"must be {_describe(info)}",
        f"leave it out for the default, {msgspec.json.encode(default).decode()}",
    )


def _literal_words(info: inspect.Type) -> list[str]:
    """The literal words accepted by a type."""
    if isinstance(info, inspect.UnionType):
        return [word for member in info.types for word in _literal_words(member)]
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else []


def _describe(info: inspect.Type) -> str:
    """Describes the values of a type, to follow `must be`."""
    match info:
        case inspect.UnionType(types=types):
            return " or ".join(_describe(member) for member in types)
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.IntType() | inspect.FloatType():
            return ("an integer" if isinstance(info, inspect.IntType) else "a number") + _range(info)
        case inspect.TupleType(item_types=types):
            return f"a list of {len(types)}: " + ", ".join(_describe(item) for item in types)
        case inspect.VarTupleType(item_type=item):
            return f"a list, each {_describe(item)}"
        case inspect.StrType():
            return "a name"
        case inspect.DictType():
            return "a mapping"
    return "plain data"


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    low, high = info.ge, info.le
    if low is not None and high is not None and high < MAX_COUNT:
        return f" from {low:g} to {high:g}"
    if info.gt is not None:
        return f" greater than {info.gt:g}"
    return "" if low is None else f" of at least {low:g}"
