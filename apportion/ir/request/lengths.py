"""Reads document lengths from lines of integers or JSON, a JSON list, CSV, Parquet or a saved Hugging Face dataset.

    .json                 a list of integers or records
    .csv                  columns, named by the first line
    .parquet, a folder    Arrow columns; a folder has Parquet files, or the files of `Dataset.save_to_disk`
    any other file        an integer or a record per line

A record or table has its length in one column: an integer, or a list with an item per token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.ir.fields import integer, integers, load, read_text, sequence
from apportion.ir.masks.bands import MAX_TOKENS

#: columns to look for if none is named
COLUMNS = ("length", "input_ids")


def length_values(path: Path, column: str | None = None) -> list[int]:
    """The length of each document of a file or folder, at least 1. column: the name of the length column; None: the
    first of `COLUMNS` that exists. Raises ConfigError, and MissingDependencyError if pyarrow is needed but not
    installed."""
    if path.is_dir() or path.suffix == ".parquet":
        return [value for table in _tables(path) for value in _column(path, table, column)]
    if path.suffix == ".csv":
        rows = enumerate(csv.DictReader(read_text(path).splitlines()), 2)
        return [
            _length(f"{path}:{i}", {name: _read(cell) for name, cell in row.items()}, column)
            for i, row in rows
        ]
    if path.suffix == ".json":
        entries = enumerate(sequence(str(path), load(path)))
        return [_length(f"{path}[{i}]", value, column) for i, value in entries]
    lines = enumerate(read_text(path).splitlines(), 1)
    return [_length(f"{path}:{i}", _read(line), column) for i, line in lines if line.strip()]


def _read(text: str) -> Any:
    """A line or cell parsed as JSON; kept as text if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _length(field: str, value: Any, column: str | None) -> int:
    if isinstance(value, Mapping):
        value = value[_name(field, value, column)]
    elif column is not None:
        raise ConfigError("column", column, f"{field} is not a record", "leave it out")
    return integer(field, len(value) if isinstance(value, list) else value, 1, MAX_TOKENS)


def _name(field: str, names: Iterable[str], column: str | None) -> str:
    available = list(names)
    candidates = COLUMNS if column is None else (column,)
    for name in candidates:
        if name in available:
            return name
    rule = f"{field} has no {' or '.join(candidates)}, only {', '.join(map(str, available[:16]))}"
    raise ConfigError("column", column, rule, "name the column of lengths or of token ids")


def _tables(path: Path) -> Iterator[Any]:
    """Arrow tables of a Parquet file, or of the files of a folder in their order."""
    try:
        from pyarrow import ipc, parquet
    except ModuleNotFoundError:
        raise MissingDependencyError("pyarrow", "data", f"reading {path}") from None
    if (path / "state.json").is_file():
        state = load(path / "state.json")
        if state.get("_indices_files"):
            rule = "has its rows in a different order from its files"
            raise ConfigError("lengths", str(path), rule, "call flatten_indices() before save_to_disk")
        for data_file in state["_data_files"]:
            with ipc.open_stream(str(path / data_file["filename"])) as stream:
                yield stream.read_all()
        return
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        rule = "is a folder without Parquet files or a saved dataset"
        raise ConfigError("lengths", str(path), rule, "name the folder of one split")
    for file in files:
        yield parquet.read_table(file)


def _column(path: Path, table: Any, column: str | None) -> list[int]:
    from pyarrow import compute, types

    lengths = table[_name(str(path), table.column_names, column)]
    if types.is_list(lengths.type) or types.is_large_list(lengths.type):
        lengths = compute.list_value_length(lengths)
    values: list[int] = integers(f"{path}: {column or 'length'}", lengths.to_numpy(), 1, MAX_TOKENS).tolist()
    return values
