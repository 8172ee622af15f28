"""What a store of packs does. Whatever it loses can be planned again, so it promises nothing but right bytes."""

from __future__ import annotations

from typing import Protocol

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ApportionError
from apportion.service.pack import Pack


class StoreError(ApportionError, RuntimeError):
    """A store cannot be read or written: its disk is full or its server is gone."""


class Store(Protocol):
    """Any thread may call it. A damaged pack is as one that is not there, and is replaced."""

    def get(self, key: bytes) -> Pack | None:
        """The pack of a key. Raises StoreError."""

    def slice(self, key: bytes, rank: int) -> IterationSlice | None:
        """One rank's slice, without reading the others. Raises StoreError, ConfigError where there is no such rank."""

    def put(self, pack: Pack) -> None:
        """Keeps a pack, until it is evicted. Raises StoreError."""

    def problem(self) -> str | None:
        """Why packs cannot be kept at present, None where they can."""

    def close(self) -> None: ...
