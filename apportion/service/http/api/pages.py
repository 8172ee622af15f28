"""/docs: the OpenAPI document as a page that needs nothing from elsewhere, no script and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
summary { cursor: pointer; padding: .4rem 0 } code, pre { font: 14px/1.4 ui-monospace, monospace }
pre { background: #f4f5f7; padding: .8rem; overflow: auto } table { border-collapse: collapse; margin: .5rem 0 }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top }
.verb { display: inline-block; min-width: 4.5rem; font-weight: 600; color: #0a58ca }
.says { color: #57606a } section { border-top: 1px solid #d8dee4 } a { color: #0a58ca }
"""
_REF = "#/components/schemas/"


def page(document: dict[str, Any]) -> bytes:
    """UTF-8 HTML."""
    return "".join(_lines(document)).encode()


def _lines(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title}</h1>"
    yield from (f"<p>{_marked(part)}</p>" for part in info["description"].strip().split("\n\n"))
    yield "<p><a href=/openapi.json>OpenAPI document</a></p><h2>Routes</h2>"
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            yield from _operation(path, verb, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield from _schema(name, schema)


def _operation(path: str, verb: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<section><details><summary><span class=verb>{verb.upper()}</span> <code>{escape(path)}</code> "
    yield f"<span class=says>{escape(operation['summary'])}</span></summary>"
    yield f"<p>{_marked(operation.get('description', ''))}</p>"
    keys = " or ".join(f"the {key} key" for rule in operation.get("security", []) for key in rule)
    yield f"<p>Needs {keys or 'no key'}.</p>"
    rows = [_parameter(parameter) for parameter in operation.get("parameters", [])]
    yield _table("Parameters", rows)
    if "requestBody" in operation:
        yield f"<p>Body: {_contents(operation['requestBody'])}</p>"
    yield _table("Answers", [_answer(status, told) for status, told in operation["responses"].items()])
    yield "</details></section>"


def _parameter(parameter: dict[str, Any]) -> tuple[str, ...]:
    kind = ", ".join(f"{name} {value}" for name, value in parameter["schema"].items() if name != "title")
    where = parameter["in"] + (", required" if parameter["required"] else "")
    said = escape(parameter.get("description", ""))
    return f"<code>{escape(parameter['name'])}</code>", where, escape(kind), said


def _answer(status: str, told: dict[str, Any]) -> tuple[str, ...]:
    headers = ", ".join(escape(name) for name in told.get("headers", {}))
    return status, _marked(told["description"]), _contents(told), headers


def _contents(told: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{kind}</code> {_link(held['schema'])}" for kind, held in told.get("content", {}).items()
    )


def _link(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").removeprefix(_REF)
    return f"<a href='#{name}'>{name}</a>" if name else ""


def _table(title: str, rows: list[tuple[str, ...]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows)
    return f"<p>{title}:</p><table>{cells}</table>" if rows else ""


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    text = escape(json.dumps(schema, indent=2)).replace(_REF, "")
    yield f"<section id='{name}'><details><summary><code>{name}</code></summary><pre>{text}</pre></details></section>"


def _marked(text: str) -> str:
    """Text with `code`."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
