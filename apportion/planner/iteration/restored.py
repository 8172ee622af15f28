"""Placements of an iteration from its compact form: each choice is checked against the problem that it is for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.bytes import wire
from apportion.ir.bytes.cells.columns import Cell, Cells
from apportion.ir.bytes.cells.predictions import no_operands, rules_of
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.request.policy import Recipe
from apportion.ir.tensors import PHASES
from apportion.planner.iteration.assignment import Choice, EndedWire, ExecutionWire
from apportion.planner.iteration.cell_counts import cells_of, check_cells, counted_cells
from apportion.planner.pipeline.feasibility import check_request
from apportion.planner.pipeline.placing import Placed, grouped, unequal_groups
from apportion.planner.problem import Execution, Placement, Problem, Shards
from apportion.planner.recipe.recipes import passes_of
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.status import Termination
from apportion.planner.tasks.cells import cut_cells

#: what the report says of a search
Search = Mapping[str, Any] | None
_LARGEST, _DIVISIONS = 2**62, 2**31
_BLOCKS, _EXECUTED, _DIVIDED = ("length", "home", "weight"), ("rank",), ("rank", "division")
_decode_search = msgspec.msgpack.Decoder(dict[str, Any]).decode


def restored(problems: Sequence[Problem], choices: Sequence[Choice]) -> list[tuple[Placed, Search]]:
    """The placement of each microbatch as it was when it was planned, and what the report said of the search that
    found it. Raises DecodeError where a choice is not one for its problem; ConfigError, CapacityError as placing
    does."""
    found = [_restored(*pair) for pair in zip(problems, choices, strict=True)]
    check_cells(sum(cells_of(placed) for placed, _ in found))
    return found


def _restored(problem: Problem, choice: Choice) -> tuple[Placed, Search]:
    check_request(problem)
    search = _search(problem, choice.search)
    passes = passes_of(problem.policy.recipe if search is None else _recipe(search))
    groups, inner, lone = grouped(problem, passes)
    if lone is not None and lone.is_all:
        lone = None
    first = _first_ranks(choice.groups, problem.ranks)
    if first is not None:
        groups = unequal_groups(passes, first)
    placement = _placement(inner, choice, len(groups), first)
    _check(0 <= choice.block_tokens < _LARGEST and 0 <= choice.heaviest < _LARGEST, "sizes of blocks")
    # all that is asked of shards behind placement is the report's heaviest piece
    every, one = np.array([0, inner.batch.tokens]), np.zeros(1, np.int64)
    shards = Shards(every, one, one + choice.heaviest, choice.block_tokens)
    return Placed(problem, passes, groups, inner, shards, placement, lone), search


def _check(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise DecodeError(f"assignment: {what} that the request does not allow")


def _check_within(column: Ints, low: int, high: int, what: str) -> None:
    """Whether values are in [low, high)."""
    _check(not len(column) or (low <= int(column.min()) and int(column.max()) < high), what)


def _columns(cell: Cell, names: tuple[str, ...]) -> list[Ints]:
    """int64 columns. Raises DecodeError."""
    cells = Cells([cell], f"assignment: columns {', '.join(names)}", 0)
    table = cells.table(rules_of(names), 1, no_operands(1), lenient=False)
    return [table[name] for name in names]


def _search(problem: Problem, data: bytes) -> Search:
    """The record of a search, where the recipe searches."""
    searches = problem.policy.recipe.step("search") is not None
    _check(searches == bool(data), "the record of a search, or none,")
    if not searches:
        return None
    record: dict[str, Any] = wire.unpack(_decode_search, data, "assignment: search")
    wire.check_plain(record, "assignment: search")
    _check({"recipe", "stopped"} <= record.keys(), "a record of a search")
    return record


def _recipe(search: Mapping[str, Any]) -> Recipe:
    """What the search found."""
    try:
        recipe = Recipe.from_data(search["recipe"])
    except ConfigError as error:
        raise DecodeError(f"assignment: {error}") from None
    _check(recipe.step("search") is None, "a search found by a search")
    return recipe


def _first_ranks(cell: Cell, ranks: int) -> Ints | None:
    """int64 [groups + 1]; None without groups."""
    if not cell:
        return None
    (sizes,) = _columns(cell, ("size",))
    _check(0 < len(sizes) <= ranks, "groups of ranks")
    _check_within(sizes, 1, ranks + 1, "groups of ranks")
    first = offsets(sizes)
    _check(first[-1] == ranks, "groups of ranks")
    return first


def _placement(problem: Problem, choice: Choice, ranks: int, first: Ints | None) -> Placement:
    """ranks: as many homes as there are; first: the first ranks of groups that the placement made."""
    tokens = problem.batch.tokens
    length, home, weight = _columns(choice.blocks, _BLOCKS)
    _check(0 < len(length) <= tokens, "blocks")
    _check_within(length, 1, tokens + 1, "lengths of blocks")
    _check_within(home, -ranks, ranks, "homes")
    starts, home = offsets(length), np.cumsum(home)
    _check(starts[-1] == tokens, "lengths of blocks")
    _check_within(home, 0, ranks, "homes")
    _check(1 <= choice.head_groups <= problem.model.q_heads, "head groups")
    _check(math.isfinite(choice.bound), "a bound")
    check_cells(counted_cells(problem, starts, choice.head_groups if choice.executions else None))
    execution = _execution(problem, choice, starts, home, ranks)
    _check(execution is not None or choice.head_groups == 1, "head groups")
    weight = weight + row_weights(problem, starts)
    ended = None if choice.ended is None else _termination(choice.ended)
    return Placement(starts, home, weight, choice.bound, first, ended, execution, choice.head_groups)


def _termination(found: EndedWire) -> Termination:
    _check(math.isfinite(found.bound) and math.isfinite(found.value or 0.0), "a solver's bounds")
    return Termination(found.status, found.bound, found.value, found.limit)


def _execution(
    problem: Problem, choice: Choice, starts: Ints, home: Ints, ranks: int
) -> dict[tuple[str, str], Execution] | None:
    """Who computes each cell, where the placement says."""
    if not choice.executions:
        return None
    _check(len(choice.executions) == len(PHASES) * len(problem.bands), "executions")
    _check(not choice.groups, "executions by groups")
    told, found = iter(choice.executions), {}
    for kind, bands in problem.bands.items():
        at_home = home[cut_cells(bands, starts).q]
        before: Execution | None = None
        for phase in PHASES:
            before = _executed(next(told), at_home, choice.head_groups, ranks, before)
            found[kind, phase] = before
    return found


def _executed(
    told: ExecutionWire, at_home: Ints, groups: int, ranks: int, before: Execution | None
) -> Execution:
    """at_home: int64 [cells], the home of their queries; before: of the phase before."""
    if not told.columns and before is not None:
        return before
    if not told.columns:
        _check(not len(at_home), "no ranks for cells")
        return Execution(np.zeros((groups, 0), np.int32))
    rank, *division = _columns(told.columns, _DIVIDED if told.divided else _EXECUTED)
    _check(len(rank) == groups * len(at_home), "cells")
    _check_within(rank, -ranks, ranks, "ranks of cells")
    rank = rank.reshape(groups, -1) + at_home
    _check_within(rank, 0, ranks, "ranks of cells")
    for part in division:
        _check_within(part, 0, _DIVISIONS, "divisions")
    parts = [part.reshape(groups, -1).astype(np.int32) for part in division]
    return Execution(rank.astype(np.int32), *parts)
