"""Assembles a page: its HTML, style and script are files in `assets/`, its data is JSON that no bytes can escape.

A page may load nothing and run nothing but its own script and style, which its content-security policy names by their
digests.
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
    """A kind of page. html: name of its file; styles, scripts: file names without suffix, in order. asks: its
    script may ask the server that it came from. opens: pages that it opens from memory, which run under its policy."""

    html: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    asks: bool = False
    opens: tuple[Page, ...] = ()

    def assemble(self, title: str, data: Mapping[str, Any]) -> str:
        """The page as one HTML file. data: plain data; its texts may be arbitrary."""
        parts = {
            "policy": escape(self._policy()),
            "title": escape(title),
            "style": self.style,
            "script": self.script,
            "data": _inert(data),
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
            "connect-src": "'self'" if self.asks else "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        return "; ".join(f"{name} {value}" for name, value in directives.items())


def _inert(data: Mapping[str, Any]) -> str:
    """JSON without anything that could end its element or begin another; characters beyond ASCII are escaped."""
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
WATCH = Page("watch.html", ("report", "watch"), ("data", "colours", "watch"), asks=True, opens=(REPORT,))
