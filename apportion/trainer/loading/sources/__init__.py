"""Where plans come from: a service, a folder made before training, or a process beside this one.

    open_source(name) ──► LocalSource · FolderSource · ServiceSource

    Source ── job       what all iterations have in common
           ├─ shared    whether what one rank submits is planned for all
           └─ begin ──► Feed of one rank in one pass: submit, plan, close

A Source is plain data, and may be copied to other processes; a Feed holds connections and processes.
"""

from __future__ import annotations

from pathlib import Path

from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.trainer.loading.sources.folder import FolderSource
from apportion.trainer.loading.sources.local import LocalSource
from apportion.trainer.loading.sources.service import ServiceSource
from apportion.trainer.loading.sources.source import Source
from apportion.trainer.loading.sources.told import Told


def open_source(
    source: str | Path | Source,
    key: str | None,
    ca: str | Path | None,
    told: Told,
    cert: str | Path | None = None,
) -> Source:
    """The source of that name: "local", a URL, or a folder. key, ca, cert: as `ServiceSource`; told: what the trainer
    says of the job, for a local source all of it. Raises ConfigError where it is another job's, and what connecting or
    reading raises."""
    url = isinstance(source, str) and source.startswith(("http://", "https://"))
    for name, value in () if url else (("key", key), ("ca", ca), ("cert", cert)):
        if value is not None:
            rule = "is for a planning service, and the source is none"
            raise ConfigError(name, "...", rule, "leave it out, or give the URL of a job as source")
    if source == "local":
        return LocalSource(told.job())
    if url:
        found: Source = ServiceSource.open(str(source), key, ca, cert)
    elif isinstance(source, str | Path):
        found = FolderSource.open(source)
    else:
        found = source
    if not isinstance(getattr(found, "job", None), Job):
        remedy = 'write "local" to plan beside this process'
        raise ConfigError("source", source, "must be a URL, a folder or a source of plans", remedy)
    told.check(found.job)
    return found
