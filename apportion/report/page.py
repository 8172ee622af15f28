"""Puts a page together: its HTML, style and script are files in `web/`, its data JSON that no bytes can leave.

A page may load nothing and run nothing but this script and style, which its content-security policy names by their
digests.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    *("data", "colours", "viewport", "tables", "timeline", "mask", "traffic"),
    *("plan", "compare", "main"),
)
_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
    "base-uri 'none'; form-action 'none'"
)


def assemble(title: str, data: Mapping[str, Any]) -> str:
    """The page as one HTML file. data: plain; texts in it may be anything."""
    script = '"use strict";\n' + "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    style = _read("report.css")
    parts = {
        "policy": escape(_POLICY.format(script=_digest(script), style=_digest(style))),
        "title": escape(title),
        "style": style,
        "script": script,
        "data": _inert(data),
    }
    return re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], _read("report.html"))


def _inert(data: Mapping[str, Any]) -> str:
    """JSON without what could end its element or begin another; characters beyond ASCII are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (files("apportion.report") / "web" / name).read_text(encoding="utf-8")
