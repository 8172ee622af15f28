"""Faults for the conformance suite: bytes that a reader must refuse, and plans that break a rule of the verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from apportion.ir.bytes import codec, table_bytes
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.sections import sections_id
from apportion.ir.isa import VERSION
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.verify import check
from tests.support import broken_plans
from tests.support.parse import parse
from tests.support.recurrences import changed, setting

PLANS = Path(__file__).resolve().parents[1] / "plans"

#: name -> (reason or rule, bytes)
Faults = dict[str, tuple[str, bytes]]


def rebuilt(plan: Plan, **sections: Any) -> bytes:
    """The plan with some sections replaced, and a new id."""
    changed = replace(plan.sealed(), id=b"", **sections)
    return codec.encode_wire(replace(changed, id=sections_id(changed)))


def newer(plan: Plan) -> bytes:
    """The plan as a later minor version might write it, with more keys."""
    version = [VERSION[0], VERSION[1] + 7]
    header = msgpack.unpackb(plan.sealed().header) | {"version": version, "novel": 1}
    data = rebuilt(plan, header=msgspec.msgpack.encode(header, order="deterministic"))
    return bytes(msgpack.packb(msgpack.unpackb(data) | {"version": version, "novel": b"more"}))


def _with_part(plan: Plan, edit: Callable[[bytes], bytes]) -> bytes:
    """The plan with the part of rank 1 changed."""
    first, second, *others = plan.sealed().parts
    return rebuilt(plan, parts=[first, edit(second), *others])


def _with_section(plan: Plan, name: str, **fields: Any) -> bytes:
    data = msgpack.unpackb(getattr(plan.sealed(), name))
    changed = {key: value for key, value in (data | fields).items() if value is not None}
    return rebuilt(plan, **{name: msgspec.msgpack.encode(changed, order="deterministic")})


def _with_value(plan: Plan, table: str, column: str, value: int, row: int) -> bytes:
    """The plan with a value in a table of its program, or in the spans."""
    if table == "spans":
        return _with_tables(plan, _respanned(plan, column, value, row))
    program = plan.programs["default", "forward"]
    programs = {**program.tables, table: _edited(program[table], column, value, row)}
    changed = {**plan.programs, ("default", "forward"): replace(program, tables=programs)}
    return _with_tables(plan, replace(plan, programs=changed))


def _respanned(plan: Plan, column: str, value: int, row: int) -> Plan:
    spans = _edited(plan.layouts["attention"].spans, column, value, row)
    return replace(plan, layouts={"attention": Layout("attention", spans)})


def _edited(table: Table, column: str, value: int, row: int) -> Table:
    columns = {name: np.array(values, np.int64) for name, values in table.columns.items()}
    columns[column][row] = value
    return Table.of(table.ptr, columns)


def _with_tables(plan: Plan, changed: Plan) -> bytes:
    tables = table_bytes.tables_of(changed.layouts, changed.programs, changed.moves, changed.recurrence)
    return rebuilt(plan, parts=table_bytes.encode_parts(tables, plan.header.ranks))


def malformed(recurrent: Plan) -> Faults:
    """name -> (reason of the refusal, as in FORMAT.md; bytes). recurrent: a plan with recurrent layers."""
    plan = parse(broken_plans.GOOD)
    found = _envelopes(plan) | _sections(plan) | _tables(plan) | _values(plan) | _slices(plan)
    return found | _recurrent(recurrent)


def _recurrent(plan: Plan) -> Faults:
    """Invalid kinds and tables of recurrent layers."""
    kinds = {name: held.to_data() for name, held in plan.header.recurrent.items()}
    first = next(iter(kinds))
    of_kind = {
        "recurrent_heads": {first: kinds[first] | {"key_heads": 3}},
        "recurrent_gate": {first: kinds[first] | {"gate": "none"}},
        "recurrent_conv": {first: kinds[first] | {"conv": 1025}},
        "recurrent_attention": {"default": kinds[first]},
        "recurrent_none": {},
    }
    values = {
        "run_behind_a_gap": ("values", "runs", "row", 1),
        "run_without_rows": ("values", "runs", "rows", 0),
        "run_of_a_past_that_cannot_be": ("values", "runs", "past", -2),
        "fold_of_no_head": ("values", "folds", "heads", 0),
        "fold_of_heads_that_are_not_there": ("indexes", "folds", "head", 9),
        "fold_of_a_kind_that_is_not_there": ("indexes", "folds", "kind", len(kinds)),
        "fold_before_its_parent": ("indexes", "folds", "parent", 0),
        "state_of_a_run_that_is_not_there": ("indexes", "states", "run", 99),
        "state_for_a_rank_that_is_not_there": ("indexes", "states", "peer", plan.header.ranks),
        "halo_sent_twice": ("values", "halo", "send", 2),
    }
    sections = {
        name: ("sections", _with_section(plan, "header", recurrent=held)) for name, held in of_kind.items()
    }
    tables = {
        name: (rule, _with_tables(plan, changed(plan, table, setting(column, 0, value))))
        for name, (rule, table, column, value) in values.items()
    }
    arrives = setting("row", -1, 2**20)
    halo = {"halo_of_no_run": ("indexes", _with_tables(plan, changed(plan, "halo", arrives)))}
    return sections | tables | halo


def _envelopes(plan: Plan) -> Faults:
    """Bytes that are not a plan, have another version, or have a wrong id."""
    data, sealed = plan.encode(), plan.sealed()
    outer, exchanged = msgpack.unpackb(data), [*sealed.parts[1::-1], sealed.parts[2]]
    return {
        "empty": ("envelope", b""),
        "no_map": ("envelope", b"\x93\x01\x02\x03"),
        "nested_arrays": ("envelope", b"\x91" * 4096),
        "length_beyond_the_end": ("envelope", b"\xdf\xff\xff\xff\xff"),
        "cut_in_the_middle": ("envelope", data[: len(data) // 2]),
        "cut_by_one": ("envelope", data[:-1]),
        "bytes_behind": ("envelope", data + b"\0"),
        "another_format": ("envelope", msgpack.packb(outer | {"format": "apportion.plane"})),
        "a_key_missing": ("envelope", msgpack.packb({key: outer[key] for key in outer if key != "moves"})),
        "parts_as_text": ("envelope", msgpack.packb(outer | {"parts": ["a", "b", "c"]})),
        "another_version": ("version", msgpack.packb(outer | {"version": [4, 0]})),
        "a_negative_version": ("version", msgpack.packb(outer | {"version": [3, -1]})),
        "id_of_zeros": ("id", codec.encode_wire(sealed.with_id(bytes(32)))),
        "id_too_short": ("id", codec.encode_wire(sealed.with_id(sealed.id[:31]))),
        "report_changed": ("id", codec.encode_wire(replace(sealed, report=b"\x81\xa1a\x01"))),
        "parts_exchanged": ("id", codec.encode_wire(replace(sealed, parts=exchanged))),
    }


def _slices(plan: Plan) -> Faults:
    """Slices with an invalid proof."""
    held, other = (msgpack.unpackb(plan.for_rank(rank).encode()) for rank in (0, 1))
    changes = {
        "slice_with_the_path_of_another": ("id", {"path": other["path"]}),
        "slice_with_the_part_of_another": ("id", {"part": other["part"]}),
        "slice_with_a_short_path": ("id", {"path": held["path"][:1]}),
        "slice_with_a_long_path": ("id", {"path": [*held["path"], bytes(32)]}),
        "slice_with_a_short_digest": ("id", {"path": [held["path"][0][:31], held["path"][1]]}),
        "slice_of_another_rank": ("id", {"rank": 1}),
        "slice_of_no_rank": ("parts", {"rank": 3}),
        "slice_of_more_ranks": ("id", {"ranks": 5}),
        "slice_with_another_token_cap": ("id", {"token_cap": b"\1" * 8 + held["token_cap"][8:]}),
        "slice_without_a_digest": ("parts", {"digests": held["digests"][:1]}),
    }
    return {name: (rule, msgpack.packb(held | change)) for name, (rule, change) in changes.items()}


def _sections(plan: Plan) -> Faults:
    """Invalid headers, layouts and moves."""
    headers: dict[str, dict[str, Any]] = {
        "version": {"version": [3, 1]},
        "without_kinds": {"kinds": None},
        "no_ranks": {"ranks": 0},
        "heads": {"q_heads": 5},
        "head_set": {"head_sets": [[0, 4], [0], [2, 3], [1]]},
        "head_twice": {"head_sets": [[0, 0], [0], [2, 3], [1]]},
        "dtype": {"dtype": "int8"},
        "kind_twice": {"kinds": ["default", "default"]},
        "without_a_name": {"layouts": [""], "home_layout": ""},
        "diagonals": {"diagonals": {"default": [[1, 0]]}},
        "diagonals_fall": {"diagonals": {"default": [[0, 9], [0, 3]]}},
        "diagonals_of_others": {"diagonals": {"local": [[0, 9]]}},
        "without_phases": {"phases": []},
        "phases_swapped": {"phases": ["backward", "forward"]},
        "home": {"home_layout": "linear"},
        "narrow_fp64": {"sent_gradients": "model"},
    }
    faults = {f"header_{name}": _with_section(plan, "header", **own) for name, own in headers.items()}
    faults["layouts_of_others"] = rebuilt(plan, layouts=msgpack.packb({"linear": {"tokens": 24}}))
    faults["moves_of_others"] = rebuilt(plan, moves=msgpack.packb([["attention", "linear"]]))
    return {name: ("sections", data) for name, data in faults.items()}


def _tables(plan: Plan) -> Faults:
    """Parts with malformed tables. A part begins with its spans: rows, width, differences."""
    edit = partial(_with_part, plan)
    wide = plan.layouts["attention"].spans.rank(1)
    assert 0 < len(wide) < 128
    return {
        "a_part_less": ("parts", rebuilt(plan, parts=plan.sealed().parts[:2])),
        "table_without_a_count": ("tables", edit(lambda old: old[:3])),
        "table_cut": ("tables", edit(lambda old: old[:-1])),
        "table_missing": ("tables", edit(lambda old: old[:-4])),
        "table_byte_left_over": ("tables", edit(lambda old: old + b"\0")),
        "table_too_many_rows": ("tables", edit(lambda old: b"\xff" * 4 + old[4:])),
        "table_rows_of_no_byte": ("tables", edit(lambda old: b"\2\0\0\0" + bytes(len(old)))),
        "column_width_3": ("tables", edit(lambda old: old[:4] + b"\3" + old[5:])),
        "column_width_16": ("tables", edit(lambda old: old[:4] + b"\x10" + old[5:])),
        "column_too_wide": ("tables", edit(lambda old: b"\1\0\0\0\1\0" + old[6:])),
    }


def _values(plan: Plan) -> Faults:
    """Invalid numbers."""
    program = plan.programs["default", "forward"]
    keys = int(np.flatnonzero(program["operands"]["tensor"] == 3)[0])
    second_arena = int(program["arenas"]["tensor"][1])
    values = {
        "unknown_tensor": ("values", "operands", "tensor", 10, -1),
        "unknown_space": ("values", "operands", "space", 2, -1),
        "unknown_op": ("values", "instructions", "op", 14, -1),
        "negative_row": ("values", "operands", "row", -1, -1),
        "send_2": ("values", "transfers", "send", 2, -1),
        "first_2": ("values", "tasks", "first", 2, -1),
        "span_beyond_the_tokens": ("values", "spans", "length", 9, -1),
        "span_without_rows": ("values", "spans", "length", 0, -1),
        "operand_0_is_not_none": ("values", "operands", "rows", 1, 0),
        "an_operand_without_rows": ("values", "operands", "rows", 0, -1),
        "wait_with_a_count": ("values", "instructions", "count", 1, 2),
        "finish_in_a_round": ("values", "instructions", "round", 1, -1),
        "operand_that_is_not_there": ("indexes", "tasks", "kv", 99, -1),
        "peer_that_is_not_there": ("indexes", "transfers", "peer", 3, -1),
        "head_set_that_is_not_there": ("indexes", "operands", "heads", 5, -1),
        "kv_head_that_is_not_there": ("indexes", "operands", "heads", 3, keys),
        "count_too_large": ("counts", "instructions", "count", 2, -1),
        "count_too_small": ("counts", "instructions", "count", 0, -1),
        "an_arena_twice": ("values", "arenas", "tensor", second_arena, 0),  # of rank 1
    }
    return {name: (rule, _with_value(plan, *place)) for name, (rule, *place) in values.items()}


# ---------------------------------------------------------------------------------------------- broken plans


def broken(recurrent: Plan) -> Faults:
    """name -> (the verifier's rule that the plan breaks first, bytes). recurrent: a plan with recurrent layers."""
    found = {
        name.replace(" ", "_"): broken_plans.broken(edit, rank=rank, phase=phase)
        for name, (_, rank, phase, _, edit, _) in broken_plans.CASES.items()
    }
    good = parse(broken_plans.GOOD)
    spans = {f"layout_{column}": _respanned(good, column, value, 1) for column, value in _SPANS.items()}
    found |= {name: codec.seal(plan) for name, plan in spans.items()}
    found |= {f"policy_{field}": _with_policy(good, field, value) for field, value in _LIMITS.items()}
    forward = {key: program for key, program in good.programs.items() if key[1] == "forward"}
    header = replace(good.header, phases=("forward",))
    found |= {
        "no_backward": codec.seal(replace(good, header=header, programs=forward)),
        "report_of_other_ranks": codec.seal(replace(good, report={"ranks": 4})),
        "id_of_zeros": replace(good, sections=good.sealed().with_id(bytes(32))),
        "results_added_to": _results("wait 1\n  finish", f"wait 1\n  merge {_OUTPUTS}\n  finish"),
        "results_at_home_twice": _results(f"deliver {_OUTPUTS}", f"copy {_OUTPUTS}"),
    }
    found |= {
        f"recurrent_{name}": codec.seal(changed(recurrent, table, edit))
        for name, (table, edit) in _RECURRENCES.items()
    }
    return {name: (check(plan)[0].rule, codec.encode_wire(plan.sealed())) for name, plan in found.items()}


_RECURRENCES = {
    "run_of_another_sequence": ("runs", setting("sequence", 0, 3)),
    "run_that_leads_nobody": ("runs", lambda columns: columns["leads"].fill(0)),
    "run_too_short": ("runs", setting("rows", -1, 1)),
    "heads_folded_twice": ("folds", lambda columns: columns["head"].fill(0)),
    "slot_without_its_parent": ("folds", lambda columns: columns["parent"].fill(-1)),
    "states_for_another_rank": ("states", lambda columns: columns["peer"].fill(0)),
    "halo_of_other_rows": ("halo", lambda columns: columns["row"].fill(0)),
    "halo_from_another_rank": ("halo", lambda columns: columns["peer"].fill(0)),
}
_SPANS = {"token": 9, "row": 1, "position": 3, "sequence": 1, "length": 7}
_LIMITS = {"token_cap": 7, "memory_cap_gib": 1e-7, "tolerance": 0.2}


def _with_policy(plan: Plan, field: str, value: float) -> Plan:
    policy = replace(plan.request.policy, **{field: value})
    return codec.seal(replace(plan, request=replace(plan.request, policy=policy)))


_OUTPUTS = "O.work[0:8).h1 -> O.home[0:8).h1"


def _results(old: str, new: str) -> Plan:
    """The hand-written plan `results.txt` with a replacement in its text."""
    written = (PLANS / "results.txt").read_text()
    assert old in written
    return parse(written.replace(old, new, 1))
