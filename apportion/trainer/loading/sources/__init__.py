"""Where plans come from: planning servers, a folder made before training, or a process beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.trainer.loading.sources.folder import FolderSource
from apportion.trainer.loading.sources.local import LocalSource
from apportion.trainer.loading.sources.service import ServiceSource
from apportion.trainer.loading.sources.source import Source


def open_source(
    source: str | Path | Sequence[str] | Source,
    token: str | None,
    ca: str | Path | None,
    timeout_s: float,
    made: Mapping[str, Any],
    job: bytes,
) -> Source:
    """The source of that name: "local", a URL or several, or a folder. token, ca, timeout_s, job: as `ServiceSource`;
    made: as `FolderSource`. Raises ConfigError."""
    urls = (source,) if isinstance(source, str) else source
    if isinstance(urls, list | tuple) and urls and all(_is_url(one) for one in urls):
        return ServiceSource(tuple(urls), token, None if ca is None else str(ca), timeout_s, job)
    for name, value in (("token", token), ("ca", ca)):
        if value is not None:
            rule = "is for a planning service, and the source is none"
            raise ConfigError(name, "...", rule, "leave it out, or give the URL of a server as source")
    if source == "local":
        return LocalSource()
    if isinstance(source, str | Path):
        return FolderSource(str(source), made)
    if not isinstance(source, Source):
        remedy = 'write "local" to plan beside this process'
        raise ConfigError("source", source, "must be a URL, a folder or a source of plans", remedy)
    return source


def _is_url(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(("http://", "https://"))
