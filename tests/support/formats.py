"""The package's schemas, and plans in the form that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from apportion.ir.isa import MOVE_COLUMNS, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES
from tests.support.stand_alone import read_plan as reader

SCHEMAS = Path(__file__).parents[2] / "apportion/schemas"


def decoded(data: bytes) -> dict[str, Any]:
    """The plan in the form of `plan.schema.json`, decoded by stock msgpack."""
    plan = msgpack.unpackb(data)
    for name in ("header", "request", "layouts", "moves", "report"):
        plan[name] = msgpack.unpackb(plan[name])
    header_and_moves = plan["header"], plan["moves"]
    parts = [reader.read_part(part, rank, *header_and_moves) for rank, part in enumerate(plan["parts"])]
    for part in parts:
        part["layouts"] = [columns(rows, SPAN_COLUMNS) for rows in part["layouts"]]
        part["moves"] = [columns(rows, MOVE_COLUMNS) for rows in part["moves"]]
        if "recurrent" in part:
            held = {name: rows for name, rows in part["recurrent"].items() if rows}
            part["recurrent"] = {name: columns(rows, RECURRENCE_TABLES[name]) for name, rows in held.items()}
        for phases in part["programs"].values():
            for phase, tables in phases.items():
                phases[phase] = {name: columns(rows, TABLES[name]) for name, rows in tables.items() if rows}
    return {**plan, "parts": parts, "id": plan["id"].hex()}


def columns(rows: list[dict[str, int]], names: tuple[str, ...]) -> list[list[int]]:
    return [[row[name] for row in rows] for name in names] if rows else []


def validator(name: str) -> Draft202012Validator:
    """Of the JSON Schema with that name."""
    loaded = {path: json.loads(path.read_text()) for path in SCHEMAS.glob("*.schema.json")}
    registry = Registry().with_resources(
        (data["$id"], Resource.from_contents(data)) for data in loaded.values()
    )
    schema = loaded[SCHEMAS / f"{name}.schema.json"]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, registry=registry)


def schema_accepts(name: str, data: object) -> bool:
    return bool(validator(name).is_valid(data))
