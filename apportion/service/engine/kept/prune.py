"""Plans that a store no longer needs, dropped while no server works on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from apportion.ir.errors import ConfigError
from apportion.service.engine.kept.library import Library
from apportion.service.engine.kept.restore import restore
from apportion.service.limits import Limits
from apportion.service.offline import FACTS
from apportion.service.store import Store

_DAY_S = 86400.0
_ANY = 1 << 40


@dataclass(frozen=True)
class Pruned:
    """dropped, dropped_bytes: packs that went; kept, kept_bytes: that are left; records: dropped, which belonged to
    nothing."""

    dropped: int
    dropped_bytes: int
    kept: int
    kept_bytes: int
    records: int


def prune(
    store: Store,
    days: float | None = None,
    most_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pruned:
    """Drops packs that no iteration needs: those made more than `days` ago, and, the oldest first, as many as it takes
    for packs and records to have `most_bytes` at most. progress: called with (dropped, to drop). Raises StoreError,
    ConfigError for a folder of precompute, which needs all of its plans."""
    if next(store.records(FACTS), None) is not None:
        remedy = "remove the folder when it is of no use"
        raise ConfigError("store", "of precompute", "needs all its plans", remedy)
    most = sum(size for _, size in store.packs()) if most_bytes is None else most_bytes
    library = Library(Limits(store_bytes=max(most, 1), store_packs=_ANY))
    stale = restore(store, library, 0.0).stale
    library.record_bytes = store.record_bytes() if most_bytes is not None else 0
    packs, size = library.packs, library.pack_bytes
    old = [] if days is None else library.discard(store.packs_before(time.time() - days * _DAY_S))
    drop = [*old, *library.excess()]
    for done, key in enumerate(drop, 1):
        store.drop_pack(key)
        progress(done, len(drop))
    if stale:
        store.commit({}, stale)
    return Pruned(
        packs - library.packs, size - library.pack_bytes, library.packs, library.pack_bytes, len(stale)
    )
