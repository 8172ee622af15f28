"""Stores of packs by release and key: a folder, which several servers may share, or Redis."""

from __future__ import annotations

from apportion.service.store.folder import Folder, open_store
from apportion.service.store.protocol import Store, StoreError

__all__ = ["Folder", "Store", "StoreError", "open_store"]
