"""Where plans come from: a service, a folder made before training, or a process beside this one.

    open_source(name) ──► LocalSource · FolderSource · ServiceSource

    Source ── job       what all iterations have in common
           ├─ shared    whether what one rank submits is planned for all
           └─ begin ──► Feed of one rank in one pass: submit, plan, close

A Source is plain data, and may be copied to other processes; a Feed holds connections and processes.
"""

from __future__ import annotations

from pathlib import Path

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
    if source == "local":
        return LocalSource(told.job())
    if not isinstance(source, str | Path):
        found: Source = source
    elif str(source).startswith(("http://", "https://")):
        found = ServiceSource.open(str(source), key, ca, cert)
    else:
        found = FolderSource.open(source)
    told.check(found.job)
    return found
