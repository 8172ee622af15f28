"""Which code plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import apportion.ir
import apportion.planner
from apportion.ir.hashing import digest
from apportion.ir.version import __version__

_SHOWN = 6  # bytes of the digest


@cache
def build() -> str:
    """The release and a digest of the sources that decide what a plan is, as "0.2.0+0123456789ab": two builds under one
    version may plan otherwise."""
    parts: list[bytes] = []
    for package in (apportion.ir, apportion.planner):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            data = path.read_bytes()
            parts.append(b"%b\0%d\0%b" % (str(path.relative_to(root)).encode(), len(data), data))
    return f"{__version__}+{digest(b''.join(parts))[:_SHOWN].hex()}"
