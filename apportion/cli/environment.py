"""Machine and software versions of a measurement."""

from __future__ import annotations


def versions() -> dict[str, str | None]:
    """Name -> version of this package, the plan format, Python and dependencies; None if not installed."""
    import platform

    from apportion.ir import isa

    return {
        "apportion": _installed("apportion"),
        "format": f"{isa.FORMAT} {isa.VERSION[0]}.{isa.VERSION[1]}",
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("numpy", "msgspec", "torch", "triton")},
    }


def machine() -> dict[str, str | int | None]:
    """Processor and operating system of a measurement."""
    import os
    import platform
    import re

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            match = re.search(r"model name\s*: (.*)", file.read())
    except OSError:
        match = None
    processor = match[1] if match else platform.processor() or platform.machine()
    return {"system": platform.platform(), "processor": processor, "cores": os.cpu_count()}


def _installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
