"""Plans that `apportion precompute` made, in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.origin import difference
from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__
from apportion.service.precompute import made_for
from apportion.service.store import open_store
from apportion.trainer.loading.sources.source import Source


@dataclass(eq=False)
class FolderSource(Source):
    """Plans that are there already, found by what is asked, so the order of the samples is free. made: what is asked,
    as `ir.bytes.origin`, to say how it differs where a plan is not there. Raises ConfigError where there is no
    folder."""

    folder: str
    made: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            rule, remedy = "is no folder", "name one that apportion precompute made, or the URL of a server"
            raise ConfigError("source", self.folder, rule, remedy)
        self._store = open_store(self.folder)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Nothing to do: all was planned before."""

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Raises ConfigError where it is not there, by the field in which other plans were asked for; StoreError."""
        found = self._store.slice(key, rank)
        if found is None:
            raise self._missing(key)
        return found

    def close(self) -> None:
        self._store.close()

    def _missing(self, key: bytes) -> ConfigError:
        told = made_for(Path(self.folder))
        own = {name: value for name, value in self.made.items() if value is not None and name in told}
        releases = [entry.name for entry in Path(self.folder).iterdir() if entry.is_dir()]
        if releases and __version__ not in releases:
            name, held, asked = "release", ", ".join(releases), __version__
        elif found := difference({name: told[name] for name in own}, own):
            name, held, asked = found
        else:
            most = f", which are the first {told['iterations']} of their samples" if told else ""
            rule = f"it is not among the plans in {self.folder}{most}"
            remedy = "ask more of precompute, or give the samples that it had"
            return ConfigError("source", f"the plan {key.hex()[:16]}", rule, remedy)
        rule = f"the plans in {self.folder} were made with {held!r}"
        return ConfigError(name, asked, rule, "give the same, or precompute into another folder")
