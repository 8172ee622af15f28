"""Assembles pages: HTML, style and script are files in `assets/`; data is JSON, escaped: it cannot end its element.

A page loads nothing, and runs nothing but its own script and style: its content-security policy lists their digests.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Page:
    """A kind of page. html: name of its file; styles, scripts: file names without suffix, in order; connects: True if
    its script may send requests to its server; opens: pages that it opens from memory, which run under its policy."""

    html: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    connects: bool = False
    opens: tuple[Page, ...] = ()

    def assemble(self, title: str, data: Mapping[str, Any]) -> str:
        """The page as one HTML file. data: plain data, which may contain any text."""
        parts = {
            "policy": escape(self._policy()),
            "title": escape(title),
            "style": self.style,
            "script": self.script,
            "data": _escaped_json(data),
        }
        return re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], _read(self.html))

    @cached_property
    def style(self) -> str:
        return "".join(_read(f"{name}.css") for name in self.styles)

    @cached_property
    def script(self) -> str:
        return '"use strict";\n' + "\n".join(_read(f"{name}.js") for name in self.scripts)

    def _policy(self) -> str:
        """The content-security policy."""
        pages = (self, *self.opens)
        directives = {
            "default-src": "'none'",
            "script-src": " ".join(_digest(page.script) for page in pages),
            "style-src": " ".join(_digest(page.style) for page in pages),
            "connect-src": "'self'" if self.connects else "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        return "; ".join(f"{name} {value}" for name, value in directives.items())


def _escaped_json(data: Mapping[str, Any]) -> str:
    """JSON in ASCII; every character that could end its element or begin another is escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files("apportion.web") / "assets" / name).read_text(encoding="utf-8")


#: pages of plans
REPORT = Page(
    "report.html",
    ("report",),
    (*("data", "colours", "viewport", "tables", "timeline", "mask", "traffic"), *("plan", "compare", "main")),
)
#: the page of a server
WATCH = Page("watch.html", ("report", "watch"), ("data", "colours", "watch"), connects=True, opens=(REPORT,))
