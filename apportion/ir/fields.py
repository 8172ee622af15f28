"""Validation of plain data on input: an error names field, value, rule and remedy."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError, UnknownNameError

MAX_INT = 2**62  # fits 64-bit arithmetic with room for one addition
MAX_COUNT = 2**31 - 1  # fits the columns that store counts
MAX_FILE_BYTES = 2**30
#: smallest positive and largest number accepted: sums and products of a few such numbers stay finite
LEAST, MOST = 1e-15, 1e15
_MAX_DEPTH = 32
_SHOWN = 120  # characters shown of a line that does not parse

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)

Checked = TypeVar("Checked")


def scalar(value: Any) -> Any:
    """Converts a numpy number, boolean or zero-dimensional array to a Python scalar; returns other values unchanged."""
    if not isinstance(value, np.generic | np.ndarray) or value.ndim or value.dtype.kind not in "biuf":
        return value
    return float(value) if value.dtype.kind == "f" else value.item()


def integer(field: str, value: Any, low: int = 1, high: int = MAX_INT) -> int:
    """Returns `value` as an int in [low, high]. Booleans, floats and strings are refused, numpy integers accepted."""
    whole = value if type(value) is int else scalar(value)
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise ConfigError(field, value, "must be an integer", f"write a whole number of at least {low}")
    if not low <= whole <= high:
        rule = f"must be at least {low}" if high == MAX_INT and whole < low else f"must be in [{low}, {high}]"
        raise ConfigError(field, whole, rule, "write a number in that range")
    return int(whole)


def keep(owner: Any, field: str, check: Callable[..., Any], *limits: Any) -> None:
    """Validates a field of a frozen dataclass, the last part of the path `field`, and stores the result of `check`,
    which converts numpy numbers to Python ones."""
    name = field.rpartition(".")[2]
    object.__setattr__(owner, name, check(field, getattr(owner, name), *limits))


def number(field: str, value: Any, low: float = 0.0, exclusive: bool = False) -> float:
    """Returns `value` as a float in [low, MOST]; if `exclusive`, at least LEAST greater than `low`; if `low` is minus
    infinity, any finite number. Booleans and strings are refused."""
    result = value if type(value) is float else scalar(value)
    if isinstance(result, bool) or not isinstance(result, int | float):
        remedy = "write a number without quotes (YAML reads 4e2 as text, 4.0e+2 as a number)"
        raise ConfigError(field, value, "must be a number", remedy)
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(field, result, "must be finite", "write a finite number")
    rule = _broken_rule(result, low, exclusive)
    if rule is not None:
        raise ConfigError(field, result, rule, "write a number in that range")
    return float(result)


def _broken_rule(value: float, low: float, exclusive: bool) -> str | None:
    """The rule of `number` that a finite number breaks, or None."""
    maximum = sys.float_info.max if low == -math.inf else MOST
    minimum = max(low, -maximum)
    if value > maximum:
        return f"must be at most {maximum:g}"
    if value < minimum or (exclusive and value == low):
        return f"must be {'greater than' if exclusive else 'at least'} {minimum:g}"
    return f"must be at least {LEAST:g}" if exclusive and value - low < LEAST else None


def amount(field: str, value: Any, least: float, most: float) -> float:
    """Returns `value` as a float in [least, most]."""
    checked = number(field, value)
    if not least <= checked <= most:
        raise ConfigError(field, value, f"must be in [{least:g}, {most:g}]", "check its unit")
    return checked


def short_text(field: str, value: Any, most: int) -> str:
    """Returns `value` if it is a string of 1 to `most` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise ConfigError(field, value, f"must be a string of 1 to {most} characters", "correct it")
    return value


def flag(field: str, value: Any) -> bool:
    """Returns `value` if it is true or false."""
    result = value if type(value) is bool else scalar(value)
    if not isinstance(result, bool):
        raise ConfigError(field, value, "must be true or false", "write true or false")
    return result


def instance(field: str, value: Any, kind: type[Checked], remedy: str | None = None) -> Checked:
    """Returns `value` if it is an instance of the class."""
    if not isinstance(value, kind):
        hint = f"make one with {kind.__name__}(...)"
        raise ConfigError(field, value, f"must be a {kind.__name__}", remedy or hint)
    return value


def instances(field: str, values: Any, kind: type[Checked]) -> Iterator[Checked]:
    """Yields `values` one by one, each checked to be an instance of the class."""
    try:
        items = iter(values)
    except TypeError:
        rule = f"must be a list of {kind.__name__} objects"
        raise ConfigError(field, values, rule, f"make each with {kind.__name__}(...)") from None
    return (instance(f"{field}[{i}]", value, kind) for i, value in enumerate(items))


def integers(field: str, values: Any, low: int = 1, high: int = MAX_INT) -> Ints:
    """Returns `values` as a flat int64 array, each in [low, high]. Accepts the inputs of `sequence`, and arrays of an
    integer dtype."""
    array = as_array(field, values)
    if array is not None:
        return _array(field, array, low, high)
    values = sequence(field, values)
    if all(kind is int for kind in map(type, values)):
        return _require_range(field, _int64(field, values), low, high)
    return np.array([integer(f"{field}[{i}]", v, low, high) for i, v in enumerate(values)], np.int64)


def as_array(field: str, values: Any) -> NDArray[Any] | None:
    """Returns `values` as an array, if they are one or convert to one (`__array__`), otherwise None."""
    if isinstance(values, np.generic | type) or not hasattr(values, "__array__"):
        return None
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            field, values, f"is not an array: {error}", "pass a numpy array, or a list"
        ) from None


def _int64(field: str, values: Iterable[int]) -> Ints:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        value = next(v for v in values if abs(v) > MAX_INT)
        raise ConfigError(field, value, "must fit 64 bits", "write a smaller number") from None


def _array(field: str, values: NDArray[Any], low: int, high: int) -> Ints:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(
            field, values, "must be one-dimensional and of an integer dtype", "pass an int64 array"
        )
    return _require_range(field, values, low, high).astype(np.int64)


def _require_range(field: str, values: NDArray[Any], low: int, high: int) -> Ints:
    if len(values) and (values.min() < low or values.max() > high):
        i = int(np.argmax((values < low) | (values > high)))
        raise ConfigError(
            f"{field}[{i}]", int(values[i]), f"must be in [{low}, {high}]", "write a number in that range"
        )
    return values


def rows(field: str, values: Any, width: int, names: str) -> list[list[Any]]:
    """Returns `values` as a list of lists of `width` items."""
    table = []
    for i, row in enumerate(sequence(field, values)):
        table.append(list(row if isinstance(row, list | tuple) else sequence(f"{field}[{i}]", row)))
        if len(table[-1]) != width:
            raise ConfigError(f"{field}[{i}]", row, f"must be [{names}]", f"write {width} numbers")
    return table


def sequence(field: str, value: Any) -> Sequence[Any]:
    """Returns `value` as a list, if it is a list, tuple, range, array or iterator. Refuses sets, mappings, strings and
    bytes."""
    if isinstance(value, list | tuple | range):
        return value
    array = as_array(field, value)
    if array is not None and array.ndim:
        return array.tolist()  # type: ignore[no-any-return]
    if array is not None or not isinstance(value, Iterable) or isinstance(value, _NO_LISTS):
        raise ConfigError(field, value, "must be a list", "write [...]")
    return list(value)


def mapping(field: str, value: Any) -> Mapping[str, Any]:
    """Returns `value` if it is a mapping with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(field, value, "must be a mapping with names as keys", "write {name: value}")
    return value


def known(field: str, data: Any, allowed: Iterable[str], required: Iterable[str] = ()) -> Mapping[str, Any]:
    """Returns `data` if it is a mapping whose keys are all `allowed` and include all `required` ones."""
    checked, allowed = mapping(field, data), tuple(allowed)
    for key in checked:
        if key not in allowed:
            raise ConfigError(
                f"{field}.{key[:64]}", checked[key], "unknown field", suggestion(key[:64], allowed)
            )
    for key in required:
        if key not in checked:
            raise ConfigError(f"{field}.{key}", None, "missing field", f"add {key}")
    return checked


def name(field: str, value: Any) -> str:
    """Returns `value` if it is a name: 1 to 64 letters, digits, `_`, `-` or `.`."""
    is_legal = isinstance(value, str) and 0 < len(value) <= 64 and value.isascii()
    if not is_legal or not all(c.isalnum() or c in "_-." for c in value):
        raise ConfigError(
            field, value, "must be a name", "write 1 to 64 letters, digits, '_', '-' or '.', as in global"
        )
    return str(value)


def choice(field: str, value: Any, allowed: Iterable[str]) -> str:
    """Returns `value` if it is one of `allowed`. Raises UnknownNameError, which lists them."""
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise UnknownNameError(field, value, "unknown name", suggestion(str(value)[:64], allowed))
    return str(value)


def suggestion(key: str, allowed: Iterable[str]) -> str:
    """Suggests a close match for `key`, and lists the allowed names."""
    allowed = tuple(allowed)
    matches = difflib.get_close_matches(key, allowed, n=1)
    names = ", ".join(allowed) or "none"
    return f"did you mean {matches[0]}? Known: {names}" if matches else f"write one of {names}"


def text(field: str, value: str) -> str:
    """Returns `value` as a plain str, if it can be written as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(field, ascii(value), "must be text in UTF-8", "remove lone surrogates") from None
    return str(value)


def plain(field: str, value: Any, depth: int = 0) -> Any:
    """A copy of `value` if it is plain data: None, booleans, 64-bit integers, finite floats, strings, lists
    and mappings of these, at most 32 deep."""
    if depth > _MAX_DEPTH:
        raise ConfigError(field, "...", f"must be at most {_MAX_DEPTH} levels deep", "flatten it")
    value = scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(field, value)
    if isinstance(value, int):
        return integer(field, value, -MAX_INT)
    if isinstance(value, float):
        return number(field, value, -math.inf)
    if isinstance(value, list | tuple | range | np.ndarray):
        items = enumerate(sequence(field, value))
        return [plain(f"{field}[{i}]", item, depth + 1) for i, item in items]
    return {
        text(field, key): plain(f"{field}.{key}", item, depth + 1)
        for key, item in mapping(field, value).items()
    }


def load(path: str | Path) -> Any:
    """The data of a JSON (`.json`) or YAML (`.yaml`, `.yml`) file. Raises ConfigError."""
    path = Path(path)
    parse: dict[str, Callable[[str], Any]] = {".json": _json, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in parse:
        raise ConfigError(str(path), path.suffix, "unknown file type", "name it .json, .yaml or .yml")
    text = read_text(path)
    try:
        return parse[path.suffix](text)
    except (ValueError, RecursionError) as error:
        raise _syntax_error(path, text, error) from error


def _syntax_error(path: Path, text: str, error: Exception) -> ConfigError:
    """A ConfigError that shows the line at which `text` fails to parse as JSON or YAML."""
    line, column, reason = _error_place(error)
    value = (text.split("\n")[line - 1] if line else text)[:_SHOWN].strip()
    position = f" at line {line}, column {column}" if line else ""
    return ConfigError(str(path), value, f"does not parse{position} ({reason})", "correct the file")


def _error_place(error: Exception) -> tuple[int, int, str]:
    """(line, column, reason) of a parser's error, counted from 1; line 0 if unknown."""
    if isinstance(error, json.JSONDecodeError):
        return error.lineno, error.colno, error.msg
    if mark := getattr(error.__cause__, "problem_mark", None):  # set by PyYAML
        return mark.line + 1, mark.column + 1, str(getattr(error.__cause__, "problem", ""))
    return 0, 0, " ".join(str(error).split())


def read_text(path: Path) -> str:
    """Reads a UTF-8 text file of at most 1 GiB. Raises ConfigError, or OSError if it cannot be read."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(str(path), path.stat().st_size, "must be at most 1 GiB", "split the file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), error.reason, "is not UTF-8 text", "use a text file") from error


def _yaml(text: str) -> Any:
    from apportion.ir.yaml_text import parse

    return parse(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_pairs)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return result
