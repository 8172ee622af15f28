"""Rule 10: recurrent layers process every document once, in order, regardless of which ranks hold its tokens.

Runs cover all home rows, end where tokens jump or a branch starts, and name their pasts; every head of every run
of a cut document is folded once, after its past; states match their slots; and halos hold the tokens before runs.
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
from apportion.ir.verify.rules.layouts import apply_moves, merged_pieces
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
    faults = list(_check_runs(subject, branches, runs, token))
    yield from faults
    if faults:
        return
    heads = np.array([kind.heads for kind in subject.plan.header.recurrent.values()])
    yield from _check_folds(runs, recurrence["folds"], heads)
    yield from _check_states(runs, recurrence["folds"], recurrence["states"])
    yield from _check_halo(subject, branches, recurrence["halo"], token)


def _violation(name: str, table: Table, row: int, message: str) -> Violation:
    rank, own_row = table.rank_and_row(row)
    return Violation(RULE, rank, None, None, None, f"{name} row {own_row} {message}")


# ---- runs


def _tokens(homes: Homes, branches: Branches, runs: Table) -> Ints | Violation:
    """int64 [runs]: the first token of each run; or a violation if runs do not partition the home rows at the required
    cuts."""
    by_token = np.argsort(homes.tokens)
    tokens, starts = homes.tokens[by_token], homes.starts[:-1][by_token]
    first_span = np.searchsorted(tokens, branches.starts, "right") - 1
    branch_rows = starts[first_span] + branches.starts - tokens[first_span]
    expected = np.unique(np.concatenate([homes.starts[:-1], homes.first[homes.rows > 0], branch_rows]))
    actual = homes.first[runs.rank_of_row()] + runs["row"]
    ends = np.zeros_like(homes.rows)
    np.maximum.at(ends, runs.rank_of_row(), runs.wide("row") + runs["rows"])
    for rank in np.flatnonzero(ends != homes.rows).tolist():
        message = f"its runs end at row {ends[rank]}, but it has {homes.rows[rank]} rows"
        return Violation(RULE, rank, None, None, None, message)
    if not np.array_equal(expected, actual):
        row = np.setxor1d(expected, actual)[0]
        holder = int(np.searchsorted(homes.first, row, "right")) - 1
        clause = "no run begins" if row in expected else "a run begins"
        message = f"{clause} at row {row - homes.first[holder]}"
        return Violation(RULE, holder, None, None, None, message)
    index = np.searchsorted(homes.starts, actual, "right") - 1
    result: Ints = homes.tokens[index] + actual - homes.starts[index]
    return result


def _previous_tokens(branches: Branches, token: Ints, total: int) -> Ints:
    """int64, shaped like `token`: the token before each, or -1."""
    branch = branches.of(token)
    parent, last_tokens = branches.parent[branch], np.append(branches.starts[1:], total) - 1
    return np.where(token > branches.starts[branch], token - 1, np.where(parent < 0, -1, last_tokens[parent]))


def _check_runs(subject: Subject, branches: Branches, runs: Table, token: Ints) -> Iterator[Violation]:
    """Checks sequence, position and past of each run, and its flag `leads`."""
    batch, count = subject.plan.request.batch, np.diff(runs.ptr)
    branch = branches.of(token)
    position = branches.position[branch] + token - branches.starts[branch]
    sequence = np.searchsorted(batch.starts, token, "right") - 1
    first, peer, past = runs["past"] < 0, runs["peer"], runs["past"]
    exists = first | (past < count[peer])
    number = np.where(first | ~exists, 0, runs.ptr[peer] + past)
    ends = np.where(first, -1, np.where(exists, token[number] + runs["rows"][number] - 1, -2))
    leads = np.zeros(len(runs), np.bool_)
    leads[number[~first & exists]] = True
    checks: list[tuple[Bools, str]] = [
        (runs["sequence"] != sequence, "does not belong to its stated sequence"),
        (runs["position"] != position, "has a position other than the number of tokens before it"),
        (ends != _previous_tokens(branches, token, batch.tokens), "has a past other than the run before it"),
        (runs["leads"] != leads, "has a wrong `leads` flag"),
    ]
    for is_wrong, message in checks:
        for row in np.flatnonzero(is_wrong).tolist():
            yield _violation("runs", runs, row, message)


# ---- folds and states


def _check_folds(runs: Table, folds: Table, heads: Ints) -> Iterator[Violation]:
    """Checks that, for each kind, every head of every run of cut documents occurs once, after its past. heads: int64
    [kinds]."""
    exists = folds["run"] < np.diff(runs.ptr)[folds["peer"]]
    for row in np.flatnonzero(~exists).tolist():
        yield _violation("folds", folds, row, "refers to a missing run")
    if not exists.all():
        return
    run, share = runs.ptr[folds["peer"]] + folds["run"], _share_key(folds)
    past = np.where(runs["past"] < 0, -1, runs.ptr[runs["peer"]] + runs["past"])
    first = folds["parent"] < 0
    parent = folds.ptr[folds.rank_of_row()] + folds["parent"]
    parent[first] = 0
    for row in np.flatnonzero(np.where(first, -1, run[parent]) != past[run]).tolist():
        yield _violation("folds", folds, row, "does not come after the past of its run")
    for row in np.flatnonzero(~first & (share != share[parent])).tolist():
        yield _violation("folds", folds, row, "has different heads from the slot of its past")

    cut = np.flatnonzero((past >= 0) | (runs["leads"] == 1))
    ends = folds["head"] + folds["heads"]
    order = stable_order((folds["kind"] * len(runs) + run) * int(heads.max()) + folds["head"])
    kind, run, head, ends = np.stack([folds["kind"], run, folds["head"], ends]).take(order, 1)
    opens = changes(kind, run)
    next_head = np.where(opens, 0, np.roll(ends, 1))
    for index in np.flatnonzero(head != next_head).tolist():
        yield _violation(
            "folds", folds, int(order[index]), f"does not begin at the next head, {next_head[index]}"
        )
    is_full = np.roll(opens, -1) & (ends == heads[kind])
    actual = (kind * len(runs) + run)[is_full]
    expected = np.add.outer(np.arange(len(heads)) * len(runs), cut).ravel()
    if np.array_equal(actual, expected):
        return
    for number in np.setxor1d(actual, expected).tolist():
        number_of_kind, index = divmod(number, len(runs))
        text = "are not all in a slot" if number in expected else "are in slots, but its document is not cut"
        yield _violation("runs", runs, index, f"has heads that {text}, of recurrent kind {number_of_kind}")


def _check_states(runs: Table, folds: Table, states: Table) -> Iterator[Violation]:
    """Checks that the k-th row of a kind from i to j matches the k-th slot of that kind on j whose run is on i."""
    sent = states.rank_of_row() * runs.ranks + states["peer"]
    expected = folds["peer"] * runs.ranks + folds.rank_of_row()
    sides = []
    for rank_pairs, table in ((sent, states), (expected, folds)):
        order = stable_order(rank_pairs * MAX_KINDS + table["kind"])
        sides.append(np.stack([rank_pairs, _share_key(table), table["run"]]).take(order, 1))
    sent, expected = sides
    if np.array_equal(sent, expected):
        return
    shared = min(sent.shape[1], expected.shape[1])
    mismatches = np.flatnonzero((sent[:, :shared] != expected[:, :shared]).any(axis=0))
    side = sent if sent.shape[1] > shared or len(mismatches) else expected
    source, target = divmod(int(side[0, int(mismatches[0]) if len(mismatches) else shared]), runs.ranks)
    message = f"its states for rank {target} do not match the slots there"
    yield Violation(RULE, source, None, None, None, message)


def _share_key(table: Table) -> Ints:
    """int64 [rows]: kind, first head and number of heads as one number."""
    result: Ints = (table["kind"] * (MAX_HEADS + 1) + table["head"]) * (MAX_HEADS + 1) + table["heads"]
    return result


# ---- halo


def _check_halo(subject: Subject, branches: Branches, halo: Table, token: Ints) -> Iterator[Violation]:
    """Checks that the halo has the tokens before each run, up to the width of the widest convolution."""
    plan = subject.plan
    actual = apply_moves(halo, subject.home)
    if isinstance(actual, str):
        yield Violation(RULE, None, None, None, None, f"halo: {actual}")
        return
    assert plan.recurrence is not None
    runs, width = plan.recurrence["runs"], widest_halo(plan.header.recurrent)
    pieces = [np.zeros((4, 0), np.int64)]
    rank, end = runs.rank_of_row(), (np.arange(len(runs)) - runs.ptr[runs.rank_of_row()] + 1) * width
    last, missing = _previous_tokens(branches, token, plan.request.batch.tokens), np.full(len(runs), width)
    while (more := (last >= 0) & (missing > 0)).any():
        rank, end, last, missing = rank[more], end[more], last[more], missing[more]
        rows = np.minimum(last - branches.starts[branches.of(last)] + 1, missing)
        end, missing, first = end - rows, missing - rows, last - rows + 1
        pieces.append(np.stack([rank, end, first, rows]))
        last = _previous_tokens(branches, first, plan.request.batch.tokens)
    expected = merged_pieces(*np.concatenate(pieces, axis=1))
    if np.array_equal(actual, expected):
        return
    shared = min(len(actual), len(expected))
    mismatches = np.flatnonzero((actual[:shared] != expected[:shared]).any(axis=1))
    index = int(mismatches[0]) if len(mismatches) else shared
    holder, row = (expected if index < len(expected) else actual)[index, :2].tolist()
    message = f"halo rows from {row} on are not the tokens before the runs"
    yield Violation(RULE, holder, None, None, None, message)
