"""Builds frozen dataclasses from plain data and validates their fields by annotations with msgspec's `Meta`.

    nodes: Count = 1                                 Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
    dtype: Annotated[str, one_of(DTYPES)] = "bf16"

`read` builds an instance from data, `check` validates the fields of an instance; both accept numpy scalars. Errors come
from `ir.fields`, so a field's error is the same from every source. Classes check rules between fields themselves.
(`msgspec.convert` ignores unknown fields of dataclasses, refuses numpy scalars, and names neither keys of mappings nor
close matches in its errors.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, TypeVar

from msgspec import Meta, inspect

from apportion.ir import fields as checks
from apportion.ir.errors import ConfigError

T = TypeVar("T")
Rule = Callable[[str, Any], Any]  # (field, value) -> the validated value

MAX_TEXT = 400
_PLAIN = (int, float, str, bool, type(None))
Count = Annotated[int, Meta(ge=1, le=checks.MAX_INT)]
Natural = Annotated[int, Meta(ge=0, le=checks.MAX_INT)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


def one_of(words: Collection[str]) -> Meta:
    """Annotation of a field with a fixed set of words."""
    return Meta(extra={"words": tuple(words)})


def check(owner: Any, name: str) -> None:
    """Validates the fields of an instance by their annotations. name: its name in errors. Raises ConfigError."""
    for key, rule in _rules(owner.__class__, False).items():
        object.__setattr__(owner, key, rule(f"{name}.{key}", getattr(owner, key)))


def read(cls: Callable[..., T], name: str, data: Any) -> T:
    """Builds an instance from plain data. Raises ConfigError."""
    return cls(**values(cls, name, mapping_of(cls, name, data)))


def mapping_of(cls: Any, name: str, data: Any) -> Mapping[str, Any]:
    """Returns `data` if it is a mapping with fields of a dataclass, including all required ones. Raises ConfigError."""
    required = [item.name for item in fields(cls) if item.default is item.default_factory is MISSING]
    return checks.known(name, data, [item.name for item in fields(cls)], required)


def values(cls: Any, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Validated field values of a dataclass from plain data. Raises ConfigError."""
    rules = _rules(cls, True)
    return {key: rules[key](f"{name}.{key}", value) for key, value in data.items()}


def to_data(owner: Any) -> dict[str, Any]:
    """Plain data with every field of an instance."""
    items = ((item.name, getattr(owner, item.name)) for item in fields(owner))
    return {key: value if type(value) in _PLAIN else _data(value) for key, value in items}


def _data(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item if type(item) in _PLAIN else _data(item) for item in value]
    if is_dataclass(value):
        return value.to_data() if hasattr(value, "to_data") else to_data(value)
    return dict(value)


@cache
def _rules(cls: Any, plain: bool) -> Mapping[str, Rule]:
    """Field -> check by its annotation. plain: True if values are plain data."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.DataclassType)
    return {item.name: _rule(item.type, plain) for item in info.fields}


def _rule(kind: inspect.Type, plain: bool) -> Rule:
    match kind:
        case inspect.Metadata(extra={"words": words}):
            return partial(checks.choice, allowed=words)
        case inspect.IntType(ge=int(low), le=int(high)):
            return partial(checks.integer, low=low, high=high)
        case inspect.FloatType(gt=None, ge=low, le=float(high)) if low is not None:
            return partial(checks.amount, least=low, most=high)
        case inspect.FloatType(gt=low):
            return partial(checks.number, exclusive=low is not None)
        case inspect.BoolType():
            return checks.flag
        case inspect.StrType(pattern=str()):
            return checks.name
        case inspect.StrType(max_length=int(most)):
            return partial(checks.short_text, most=most)
        case inspect.UnionType(types=types) if any(isinstance(member, inspect.NoneType) for member in types):
            (inner,) = (_rule(member, plain) for member in types if not isinstance(member, inspect.NoneType))
            return lambda field, value: None if value is None else inner(field, value)
        case inspect.VarTupleType(item_type=item):
            return partial(_checked_items, _rule(item, plain))
        case inspect.DictType(value_type=item, max_length=int(most)):
            return partial(_checked_entries, _rule(item, plain), most)
        case inspect.DataclassType(cls=cls) if not plain:
            return partial(checks.instance, kind=cls)
        case inspect.DataclassType(cls=cls):
            return (
                (lambda _, value: cls.from_data(value)) if hasattr(cls, "from_data") else partial(read, cls)
            )
    return lambda _, value: value


def _checked_items(rule: Rule, field: str, value: Any) -> tuple[Any, ...]:
    return tuple(rule(f"{field}[{i}]", item) for i, item in enumerate(checks.sequence(field, value)))


def _checked_entries(rule: Rule, limit: int, field: str, value: Any) -> dict[str, Any]:
    if len(checks.mapping(field, value)) > limit:
        raise ConfigError(field, len(value), f"must be at most {limit}", "list fewer")
    return {checks.name(field, key): rule(f"{field}.{key}", item) for key, item in value.items()}
