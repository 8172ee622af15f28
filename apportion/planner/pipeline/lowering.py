"""Lowers schedules to programs, kind by kind and phase by phase, and joins separately planned parts of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion._core import lower as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import TABLES, Op
from apportion.ir.plan.tables import ProgramSet, Table, join_tables
from apportion.ir.threads import spread
from apportion.planner.congestion import Network
from apportion.planner.lower.inputs import Lowered, Lowering


def lower_parts(
    first: Sequence[int], parts: Sequence[Lowered], threads: int, network: Network | None = None
) -> dict[tuple[str, str], ProgramSet]:
    """Lowers all kinds and phases. first: the first rank of each part. network: for splitting rounds if fewer
    concurrent senders are faster on it; None: no splitting."""
    keys, count = list(parts[0]), len(parts)
    networks = [network and network._replace(first=rank) for rank in first]
    items = [(part[key], key[1], net) for key in keys for part, net in zip(parts, networks, strict=True)]
    programs = spread(lambda item: _lower_phase(*item), items, threads)
    return {key: _join_parts(first, programs[i * count : (i + 1) * count]) for i, key in enumerate(keys)}


def _lower_phase(low: Lowering, phase: str, network: Network | None) -> ProgramSet:
    """The programs of all ranks. Raises CapacityError."""
    rows, steps, tables = core.tables(low, phase, network)
    if rows:
        raise CapacityError(f"{rows} rows on one rank: at most {2**31 - 1} are supported")
    if steps:
        raise CapacityError(f"the plan has too many steps ({steps}): use larger blocks or a larger coalesce")
    return ProgramSet(
        {name: Table(ptr, TABLES[name], values) for name, (ptr, values) in zip(TABLES, tables, strict=True)}
    )


def _join_parts(first: Sequence[int], parts: Sequence[ProgramSet]) -> ProgramSet:
    """The programs of all ranks. first: the first rank of each part, which is added to its peer numbers."""
    if len(parts) == 1:
        return parts[0]
    tables = {name: join_tables([part[name] for part in parts]) for name in TABLES}
    tables["transfers"]["peer"][:] += np.repeat(first, [len(part["transfers"]) for part in parts])
    tables["instructions"]["round"][:] = _renumber_rounds([part["instructions"] for part in parts])
    return ProgramSet(tables)


def _renumber_rounds(parts: Sequence[Table]) -> Ints:
    """int64 [instructions]: rounds renumbered, in order, so that launches of one round share channel and mode."""
    modes = [part.wide("channel") << 8 | part.wide("mode") for part in parts]
    stride, keys = max(int(mode.max(initial=0)) for mode in modes) + 1, []
    for part, mode in zip(parts, modes, strict=True):
        round_, launch = part.wide("round"), np.flatnonzero(part["op"] == Op.LAUNCH)
        round_mode = np.zeros(int(round_.max(initial=0)) + 1, np.int64)
        round_mode[round_[launch]] = mode[launch]
        keys.append(round_ * stride + round_mode[round_])
    number, op = np.concatenate(keys), np.concatenate([part["op"] for part in parts])
    index = np.flatnonzero((op == Op.LAUNCH) | (op == Op.WAIT))
    rounds, is_used = np.zeros(len(op), np.int64), np.zeros(int(number.max(initial=0)) + 1, bool)
    is_used[number[index]] = True
    rounds[index] = (np.cumsum(is_used) - 1)[number[index]]
    return rounds
