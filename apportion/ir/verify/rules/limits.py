"""Rule 6: the limits of the request hold: token caps, home ranks, memory cap, tolerance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import gib
from apportion.ir.plan.ops import IS_HEADLESS
from apportion.ir.plan.totals import loads
from apportion.ir.tensors import PHASES, Tensor
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program

RULE = "limits"
_GIB = 2**30
#: default of `Policy.token_cap`, as a factor of a rank's share by speed
_DEFAULT_CAP = 1.02


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `limits`."""
    yield from _check_token_caps(subject)
    yield from _check_home_ranks(subject)
    model = subject.plan.request.model
    per_head = np.array([model.row_bytes(tensor, 1) for tensor in Tensor], np.int64)
    for program in subject.programs:
        yield from _check_memory(subject, program, per_head)
    yield from _check_tolerance(subject)


def _check_home_ranks(subject: Subject) -> Iterator[Violation]:
    """Checks that sequences are on their allowed home ranks."""
    homes = subject.plan.request.batch.home_ranks
    if not homes:
        return
    layout = subject.attention
    sequence, rank = layout.spans["sequence"], layout.spans.rank_of_row()
    order = np.argsort(sequence, kind="stable")
    for number, allowed in homes.items():
        first, last = np.searchsorted(sequence[order], (number, number + 1))
        for other_rank in sorted(set(rank[order[first:last]].tolist()) - set(allowed)):
            message = f"holds tokens of sequence {number}, whose home_ranks are {tuple(allowed)}"
            yield Violation(RULE, other_rank, None, None, None, message)


def _check_token_caps(subject: Subject) -> Iterator[Violation]:
    """Checks token caps in the attention layout: the loader's own layout may be as uneven as its batches."""
    rows, limit = subject.attention.rows_per_rank, subject.plan.request.policy.token_cap
    caps = np.ceil(_DEFAULT_CAP * subject.token_shares) if limit is None else np.full(len(rows), limit)
    for rank in np.flatnonzero(rows > caps).tolist():
        cap = int(caps[rank])
        message = f"holds {rows[rank]} tokens in layout {subject.attention.name}; the token cap is {cap}"
        yield Violation(RULE, rank, None, None, None, message)


def _check_memory(subject: Subject, program: Program, per_head: Ints) -> Iterator[Violation]:
    """Checks the memory of a program's work arenas. per_head: int64 [tensors], bytes of a row of one head."""
    request = subject.plan.request
    cap = request.policy.memory_cap_gib or request.cluster.memory_gib
    arenas = program["arenas"]
    heads = np.where(IS_HEADLESS[arenas["tensor"]], 1, arenas["heads"])
    # float64: a hostile arena of 2**48 rows must not overflow
    size = arenas["rows"].astype(np.float64) * heads * per_head[arenas["tensor"]]
    total = np.bincount(arenas.rank_of_row(), size, program.ranks)
    for rank in np.flatnonzero(total > cap * _GIB).tolist():
        message = f"needs {gib(total[rank])} of work rows; the memory cap is {cap} GiB"
        yield Violation(RULE, rank, program.kind, program.phase, None, message)


def _check_tolerance(subject: Subject) -> Iterator[Violation]:
    """Checks the busiest rank's compute against the mean, relative to speed: all kinds, weighted by their layers."""
    request = subject.plan.request
    if request.policy.tolerance is None:
        return
    speeds = np.asarray(request.cluster.speeds or np.ones(request.cluster.ranks), np.float64)
    for phase in PHASES:
        load = loads(subject.plan, phase)
        if load.sum() > 0:
            yield from _check_imbalance(
                request.policy.tolerance, phase, load / speeds, load.sum() / speeds.sum()
            )


def _check_imbalance(tolerance: float, phase: str, time: Floats, mean: float) -> Iterator[Violation]:
    rank = int(time.argmax())
    excess = float(time[rank] / mean - 1)
    if excess > tolerance + 1e-9:
        message = (
            f"computes {100 * excess:.2f} % more than the mean rank; the tolerance is {100 * tolerance:g} %"
        )
        yield Violation(RULE, rank, None, phase, None, message)
