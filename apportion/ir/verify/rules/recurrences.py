"""Rule 10: recurrent layers process every document once, in order, regardless of which ranks hold its tokens.

Runs are all home rows, cut at jumps of tokens and at starts of branches, each with its past; a fold has every head of
every run of a cut document, after its past; states match their slots; and halos are the tokens before runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Bools, Ints, changes
from apportion.ir.errors import ConfigError
from apportion.ir.masks.predecessors import Branches
from apportion.ir.orders import stable_order
from apportion.ir.plan.tables import Table
from apportion.ir.request.model import MAX_HEADS
from apportion.ir.request.recurrent import MAX_KINDS, widest_halo
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.report import Violation
from apportion.ir.verify.rules.layouts import carried, merged_pieces
from apportion.ir.verify.subject import Subject

RULE = "recurrences"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `recurrences`."""
    recurrence = subject.plan.recurrence
    if recurrence is None:
        return
    try:
        branches = subject.plan.request.batch.branches()
    except ConfigError as error:
        yield Violation(RULE, None, None, None, None, str(error))
        return
    runs = recurrence["runs"]
    token = _tokens(subject.homes, branches, runs)
    if isinstance(token, Violation):
        yield token
        return
    wrong = list(_check_runs(subject, branches, runs, token))
    yield from wrong
    if wrong:
        return
    heads = np.array([kind.heads for kind in subject.plan.header.recurrent.values()])
    yield from _folds(runs, recurrence["folds"], heads)
    yield from _check_states(runs, recurrence["folds"], recurrence["states"])
    yield from _halo(subject, branches, recurrence["halo"], token)


def _violation(name: str, table: Table, row: int, message: str) -> Violation:
    rank, own = table.rank_and_row(row)
    return Violation(RULE, rank, None, None, None, f"{name} row {own} {message}")


# ---- runs


def _tokens(homes: Homes, branches: Branches, runs: Table) -> Ints | Violation:
    """int64 [runs]: the first token of each; or a violation if runs do not partition the home rows at the required
    cuts."""
    by_token = np.argsort(homes.tokens)
    tokens, starts = homes.tokens[by_token], homes.starts[:-1][by_token]
    held = np.searchsorted(tokens, branches.starts, "right") - 1
    opens = starts[held] + branches.starts - tokens[held]
    due = np.unique(np.concatenate([homes.starts[:-1], homes.first[homes.rows > 0], opens]))
    have = homes.first[runs.rank_of_row()] + runs["row"]
    ends = np.zeros_like(homes.rows)
    np.maximum.at(ends, runs.rank_of_row(), runs.wide("row") + runs["rows"])
    for rank in np.flatnonzero(ends != homes.rows).tolist():
        message = f"its runs end at row {ends[rank]}, it has {homes.rows[rank]}"
        return Violation(RULE, rank, None, None, None, message)
    if not np.array_equal(due, have):
        differ = np.setxor1d(due, have)[0]
        where = int(np.searchsorted(homes.first, differ, "right")) - 1
        what = "no run begins" if differ in due else "a run begins"
        message = f"{what} at row {differ - homes.first[where]}"
        return Violation(RULE, where, None, None, None, message)
    at = np.searchsorted(homes.starts, have, "right") - 1
    found: Ints = homes.tokens[at] + have - homes.starts[at]
    return found


def _before(branches: Branches, token: Ints, total: int) -> Ints:
    """int64, shaped like `token`: the token before each, or -1."""
    branch = branches.of(token)
    parent, ends = branches.parent[branch], np.append(branches.starts[1:], total) - 1
    return np.where(token > branches.starts[branch], token - 1, np.where(parent < 0, -1, ends[parent]))


def _check_runs(subject: Subject, branches: Branches, runs: Table, token: Ints) -> Iterator[Violation]:
    """Checks sequence, position and past of each run, and its flag `leads`."""
    batch, count = subject.plan.request.batch, np.diff(runs.ptr)
    branch = branches.of(token)
    position = branches.position[branch] + token - branches.starts[branch]
    sequence = np.searchsorted(batch.starts, token, "right") - 1
    first, peer, past = runs["past"] < 0, runs["peer"], runs["past"]
    there = first | (past < count[peer])
    number = np.where(first | ~there, 0, runs.ptr[peer] + past)
    ends = np.where(first, -1, np.where(there, token[number] + runs["rows"][number] - 1, -2))
    leads = np.zeros(len(runs), np.bool_)
    leads[number[~first & there]] = True
    checks: list[tuple[Bools, str]] = [
        (runs["sequence"] != sequence, "does not belong to its stated sequence"),
        (runs["position"] != position, "has a position other than the number of tokens before it"),
        (ends != _before(branches, token, batch.tokens), "has a past other than the run before it"),
        (runs["leads"] != leads, "has a wrong flag for a run after it"),
    ]
    for wrong, message in checks:
        for row in np.flatnonzero(wrong).tolist():
            yield _violation("runs", runs, row, message)


# ---- folds and states


def _folds(runs: Table, folds: Table, heads: Ints) -> Iterator[Violation]:
    """Checks that each head of each kind of the runs of cut documents occurs once, after its past. heads: int64
    [kinds]."""
    there = folds["run"] < np.diff(runs.ptr)[folds["peer"]]
    for row in np.flatnonzero(~there).tolist():
        yield _violation("folds", folds, row, "refers to a missing run")
    if not there.all():
        return
    run, own = runs.ptr[folds["peer"]] + folds["run"], _share(folds)
    past = np.where(runs["past"] < 0, -1, runs.ptr[runs["peer"]] + runs["past"])
    first = folds["parent"] < 0
    parent = folds.ptr[folds.rank_of_row()] + folds["parent"]
    parent[first] = 0
    for row in np.flatnonzero(np.where(first, -1, run[parent]) != past[run]).tolist():
        yield _violation("folds", folds, row, "does not come after the past of its run")
    for row in np.flatnonzero(~first & (own != own[parent])).tolist():
        yield _violation("folds", folds, row, "has other heads than the slot of its past")

    cut = np.flatnonzero((past >= 0) | (runs["leads"] == 1))
    ends = folds["head"] + folds["heads"]
    order = stable_order((folds["kind"] * len(runs) + run) * int(heads.max()) + folds["head"])
    kind, run, head, ends = np.stack([folds["kind"], run, folds["head"], ends]).take(order, 1)
    opens = changes(kind, run)
    due = np.where(opens, 0, np.roll(ends, 1))
    for at in np.flatnonzero(head != due).tolist():
        yield _violation(
            "folds", folds, int(order[at]), f"begins at another head than {due[at]}, which is due"
        )
    full = np.roll(opens, -1) & (ends == heads[kind])
    have = (kind * len(runs) + run)[full]
    wanted = np.add.outer(np.arange(len(heads)) * len(runs), cut).ravel()
    if np.array_equal(have, wanted):
        return
    for number in np.setxor1d(have, wanted).tolist():
        of_kind, at = divmod(number, len(runs))
        what = "are not all in a slot" if number in wanted else "are in slots, but its document is not cut"
        yield _violation("runs", runs, at, f"has heads that {what}, of recurrent kind {of_kind}")


def _check_states(runs: Table, folds: Table, states: Table) -> Iterator[Violation]:
    """Checks that the k-th row of a kind from i to j has the k-th slot of that kind on j whose run is of i."""
    sent = states.rank_of_row() * runs.ranks + states["peer"]
    due = folds["peer"] * runs.ranks + folds.rank_of_row()
    sides = []
    for way, table in ((sent, states), (due, folds)):
        order = stable_order(way * MAX_KINDS + table["kind"])
        sides.append(np.stack([way, _share(table), table["run"]]).take(order, 1))
    sent, due = sides
    if np.array_equal(sent, due):
        return
    shared = min(sent.shape[1], due.shape[1])
    differ = np.flatnonzero((sent[:, :shared] != due[:, :shared]).any(axis=0))
    side = sent if sent.shape[1] > shared or len(differ) else due
    source, target = divmod(int(side[0, int(differ[0]) if len(differ) else shared]), runs.ranks)
    message = f"its states for rank {target} are not those of the slots there"
    yield Violation(RULE, source, None, None, None, message)


def _share(table: Table) -> Ints:
    """int64 [rows]: kind, first head and number of heads as one number."""
    found: Ints = (table["kind"] * (MAX_HEADS + 1) + table["head"]) * (MAX_HEADS + 1) + table["heads"]
    return found


# ---- halo


def _halo(subject: Subject, branches: Branches, halo: Table, token: Ints) -> Iterator[Violation]:
    """Checks that the halo has the tokens before each run, up to the width of the widest convolution."""
    plan = subject.plan
    made = carried(halo, subject.home)
    if isinstance(made, str):
        yield Violation(RULE, None, None, None, None, f"halo: {made}")
        return
    assert plan.recurrence is not None
    runs, width = plan.recurrence["runs"], widest_halo(plan.header.recurrent)
    pieces = [np.zeros((4, 0), np.int64)]
    rank, end = runs.rank_of_row(), (np.arange(len(runs)) - runs.ptr[runs.rank_of_row()] + 1) * width
    last, left = _before(branches, token, plan.request.batch.tokens), np.full(len(runs), width)
    while (more := (last >= 0) & (left > 0)).any():
        rank, end, last, left = rank[more], end[more], last[more], left[more]
        rows = np.minimum(last - branches.starts[branches.of(last)] + 1, left)
        end, left, first = end - rows, left - rows, last - rows + 1
        pieces.append(np.stack([rank, end, first, rows]))
        last = _before(branches, first, plan.request.batch.tokens)
    wanted = merged_pieces(*np.concatenate(pieces, axis=1))
    if np.array_equal(made, wanted):
        return
    shared = min(len(made), len(wanted))
    differ = np.flatnonzero((made[:shared] != wanted[:shared]).any(axis=1))
    at = int(differ[0]) if len(differ) else shared
    where, row = (wanted if at < len(wanted) else made)[at, :2].tolist()
    message = f"halo rows from {row} on are not the tokens before the runs"
    yield Violation(RULE, where, None, None, None, message)
