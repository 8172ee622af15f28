"""Whether all that a store's folder holds is what was put there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from apportion.ir.errors import ApportionError, DecodeError
from apportion.service.errors import StoreError
from apportion.service.packs import Pack
from apportion.service.store.index import INDEX
from apportion.service.store.sqlite import SqliteStore, pack_keys, pack_path


@dataclass(frozen=True)
class BadPack:
    """A file that is not what it should be, and why; for a record, the index that has it."""

    path: Path
    why: str


@dataclass(frozen=True)
class StoreReport:
    """What `check_store` found. bytes: of all packs; bad: damaged records, then packs in the order of their keys."""

    records: int
    packs: int
    bytes: int
    bad: tuple[BadPack, ...]


def check_store(
    folder: Path, *, verify: bool = False, progress: Callable[[int, int], None] = lambda done, all: None
) -> StoreReport:
    """Reads all of a store that nobody writes: every pack decodes and is of its key, bodies are of their rank and of
    the pack's id, and the index knows what is there.

    verify: lower compact packs too, and verify their plans (slices prove that they are of a plan that was verified).
    progress: called with (packs checked, packs in all). Raises what `open_store` raises, StoreError for a damaged
    index.
    """
    with closing(SqliteStore(folder, read_only=True)) as store:
        if (damage := store.damage()) is not None:
            raise StoreError(
                f"{folder / INDEX} is damaged ({damage}): move it away, and the packs are found again"
            )
        known, there = dict(store.packs()), set(pack_keys(folder))
        damaged: list[str] = []
        records = sum(1 for _ in store.records("", damaged))
        bad = [BadPack(folder / INDEX, f"the record of {key!r} is not what was written") for key in damaged]
        progress(0, len(keys := sorted(known.keys() | there)))
        for done, key in enumerate(keys, 1):
            path = pack_path(folder, key)
            why = _mismatch(path, known.get(key), key in there) or _fault(key, path, verify)
            bad += [BadPack(path, why)] if why else []
            progress(done, len(keys))
        return StoreReport(records, len(known), sum(known.values()), tuple(bad))


def _mismatch(path: Path, told: int | None, there: bool) -> str | None:
    """How the index, which told the size, and the file differ."""
    if not there:
        return "is in the index, but there is no such file: plan it again"
    if told is None:
        return "is not in the index: opening the store for writing adds it"
    if (size := path.stat().st_size) != told:
        return f"has {size} bytes, the index says {told}: remove it and plan it again"
    return None


def _fault(key: bytes, path: Path, verify: bool) -> str | None:
    """What is wrong with a pack."""
    try:
        pack = Pack.decode(path.read_bytes())
        if pack.key != key:
            raise DecodeError(f"pack: it is the pack of {pack.key.hex()}, not that of its name")
        for told in _claims(pack, verify):
            if told != (expected := (pack.id, pack.ranks)):
                raise DecodeError(f"pack: a body is of {_shown(told)}, the pack of {_shown(expected)}")
    except (ApportionError, OSError) as error:
        return f"{error}: remove it and plan it again"
    return None


def _claims(pack: Pack, verify: bool) -> Iterator[tuple[bytes, int]]:
    """(id, ranks) that each body says. Raises ApportionError."""
    if pack.form == "slices":
        from apportion.ir.bytes.iteration_slice import IterationSlice

        for rank, body in enumerate(pack.bodies):
            piece = IterationSlice.decode(body)
            if piece.rank != rank:
                raise DecodeError(f"pack: body {rank} is that of rank {piece.rank}")
            yield piece.id, piece.ranks
    elif verify:
        from apportion.ir.verify import verify as verify_plan
        from apportion.planner.iteration.jobs import lower_job

        plan = lower_job(pack.bodies[0])
        for microbatch in plan.plans:
            verify_plan(microbatch)
        yield plan.id, plan.ranks


def _shown(claim: tuple[bytes, int]) -> str:
    return f"plan {claim[0].hex()[:16]} of {claim[1]} ranks"
