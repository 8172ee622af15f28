"""The interface of stores. A lost pack can be planned again, so a store only guarantees correct bytes."""

from __future__ import annotations

from typing import Protocol

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ApportionError
from apportion.service.pack import Pack


class StoreError(ApportionError, RuntimeError):
    """A store cannot be read or written, for example because its disk is full or its server is down."""


class Store(Protocol):
    """Store of packs; thread-safe. A damaged pack counts as missing, and is replaced."""

    def get(self, key: bytes) -> Pack | None:
        """The pack of a key. Raises StoreError."""

    def slice(self, key: bytes, rank: int) -> IterationSlice | None:
        """One rank's slice, without reading the others. Raises StoreError, ConfigError for an unknown rank."""

    def put(self, pack: Pack) -> None:
        """Stores a pack until it is evicted. Raises StoreError."""

    def problem(self) -> str | None:
        """The reason why packs cannot be stored at present; None if they can."""

    def close(self) -> None: ...
