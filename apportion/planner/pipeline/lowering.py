"""Lowers schedules to programs, kind by kind and phase by phase, and joins separately planned parts of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion._core import lower as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import TABLES, Op
from apportion.ir.plan.tables import ProgramSet, Table, joined
from apportion.ir.threads import spread
from apportion.planner.congestion import Network
from apportion.planner.lower.inputs import Lowered, Lowering


def lower_parts(
    first: Sequence[int], parts: Sequence[Lowered], threads: int, network: Network | None = None
) -> dict[tuple[str, str], ProgramSet]:
    """Lowers all kinds and phases. first: the first rank of each part. network: for splitting rounds if fewer
    concurrent senders are faster on it; None: no splitting."""
    keys, each = list(parts[0]), len(parts)
    behind = [network and network._replace(first=rank) for rank in first]
    items = [(part[key], key[1], own) for key in keys for part, own in zip(parts, behind, strict=True)]
    made = spread(lambda item: _lower_phase(*item), items, threads)
    return {key: _side_by_side(first, made[at * each : (at + 1) * each]) for at, key in enumerate(keys)}


def _lower_phase(low: Lowering, phase: str, network: Network | None) -> ProgramSet:
    """The programs of all ranks. Raises CapacityError."""
    rows, steps, tables = core.tables(low, phase, network)
    if rows:
        raise CapacityError(f"{rows} rows on one rank: at most {2**31 - 1}")
    if steps:
        raise CapacityError(f"{steps} steps of all ranks: use larger blocks or a larger coalesce")
    return ProgramSet(
        {name: Table(ptr, TABLES[name], made) for name, (ptr, made) in zip(TABLES, tables, strict=True)}
    )


def _side_by_side(first: Sequence[int], parts: Sequence[ProgramSet]) -> ProgramSet:
    """The programs of all ranks. first: the first rank of each part, an offset of its peer numbers."""
    if len(parts) == 1:
        return parts[0]
    tables = {name: joined([part[name] for part in parts]) for name in TABLES}
    tables["transfers"]["peer"][:] += np.repeat(first, [len(part["transfers"]) for part in parts])
    tables["instructions"]["round"][:] = _same_rounds([part["instructions"] for part in parts])
    return ProgramSet(tables)


def _same_rounds(parts: Sequence[Table]) -> Ints:
    """int64 [instructions]: rounds renumbered, in order, so that launches of one round share channel and mode."""
    ways = [part.wide("channel") << 8 | part.wide("mode") for part in parts]
    stride, found = max(int(way.max(initial=0)) for way in ways) + 1, []
    for part, way in zip(parts, ways, strict=True):
        round_, launch = part.wide("round"), np.flatnonzero(part["op"] == Op.LAUNCH)
        of_round = np.zeros(int(round_.max(initial=0)) + 1, np.int64)
        of_round[round_[launch]] = way[launch]
        found.append(round_ * stride + of_round[round_])
    number, op = np.concatenate(found), np.concatenate([part["op"] for part in parts])
    some = np.flatnonzero((op == Op.LAUNCH) | (op == Op.WAIT))
    rounds, used = np.zeros(len(op), np.int64), np.zeros(int(number.max(initial=0)) + 1, bool)
    used[number[some]] = True
    rounds[some] = (np.cumsum(used) - 1)[number[some]]
    return rounds
