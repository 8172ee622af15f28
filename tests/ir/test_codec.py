"""Bytes of plans and slices: round trips, equal bytes everywhere, and refusal of all other bytes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import ConfigError, Plan, Slice
from apportion.ir import hashing
from apportion.ir.bytes import codec, table_bytes, wire
from apportion.ir.bytes.sections import Sections, sections_id
from apportion.ir.errors import ApportionError, CapacityError, DecodeError, UnknownNameError, VersionError
from apportion.ir.isa import TABLES, VERSION
from apportion.ir.plan.tables import Layout, ProgramSet, Table
from tests.support.random_plans import random_plan
from tests.support.stand_alone import read_plan

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of 5 ranks with two layouts and a move."""
    plans = (codec.seal(random_plan(seed, ranks=5)) for seed in range(100))
    return next(
        p for p in plans if p.moves and ("default", "backward") in p.programs and p.report and _has_rows(p)
    )


def _has_rows(plan: Plan) -> bool:
    """True if the program that tests change has rows on rank 1."""
    program = plan.programs["default", "forward"].rank(1)
    return len(program["operands"]) > 0 and len(program["instructions"]) > 0


# ---------------------------------------------------------------------------------------------- round trips


@settings(max_examples=60)
@given(SEEDS)
def test_decoded_plans_equal_encoded_ones(seed: int) -> None:
    plan = random_plan(seed)
    data = plan.encode()
    again = Plan.decode(data)
    assert again == plan
    assert dict(again.report) == dict(plan.report)
    assert again.encode() == data
    assert codec.seal(again).encode() == data


@settings(max_examples=40)
@given(SEEDS)
def test_slices_hold_their_rank_and_prove_it(seed: int) -> None:
    plan = codec.seal(random_plan(seed))
    rank, header = seed % plan.header.ranks, plan.header
    piece = Slice.decode(plan.for_rank(rank).encode())
    assert (piece.id, piece.rank, piece.ranks, piece.header) == (plan.id, rank, header.ranks, header)
    assert piece == plan.for_rank(rank)
    assert piece.wire.part == plan.sections.parts[rank]
    for key, program in piece.programs.items():
        expected = plan.program(rank, *key)
        assert all(program[name].equal(expected[name]) for name in TABLES)
    for name in plan.header.layouts:
        assert piece.layout(name).spans.equal(plan.layouts[name].spans.rank(rank))
    assert [(m.source, m.target) for m in piece.moves] == [(m.source, m.target) for m in plan.moves]


def test_decoded_columns_are_safe_to_add(plan: Plan) -> None:
    again = Plan.decode(plan.encode())
    tables = [table for program in again.programs.values() for table in program.tables.values()]
    for table in [*tables, *(layout.spans for layout in again.layouts.values())]:
        assert table.values.dtype == np.int64 or np.abs(table.values).max(initial=0) <= 2**30
    assert {table.values.dtype for table in tables} == {np.dtype(np.int32), np.dtype(np.int64)}


@settings(max_examples=30)
@given(SEEDS)
def test_the_reader_written_from_format_md_reads_the_same_tables(seed: int) -> None:
    plan = codec.seal(random_plan(seed))
    header = msgpack.unpackb(plan.sections.header)
    for rank, part in enumerate(plan.sections.parts):
        read = read_plan.read_part(part, rank, header, plan.moves)
        tables = dict(zip(plan.header.layouts, read["layouts"], strict=True))
        assert all(rows_of(plan.layouts[name].spans.rank(rank)) == tables[name] for name in tables)
        moves = zip(plan.moves, read["moves"], strict=True)
        assert all(rows_of(move.table.rank(rank)) == rows for move, rows in moves)
        for (kind, phase), program in plan.programs.items():
            for name, rows in read["programs"][kind][phase].items():
                assert rows_of(program[name].rank(rank)) == rows


def rows_of(table: Table) -> list[dict[str, int]]:
    names = list(table.columns)
    return [dict(zip(names, map(int, row), strict=True)) for row in zip(*table.columns.values(), strict=True)]


# ---------------------------------------------------------------------------------------------- canonical form


def test_order_of_report_and_engines_does_not_matter(plan: Plan) -> None:
    reordered = replace(plan, report=dict(reversed(plan.report.items())))
    assert codec.seal(reordered) == plan
    more = {"more": np.int64(3), "half": np.float64(0.5)}
    assert codec.seal(replace(plan, report={**plan.report, **more})) != plan


NOT_FINITE = [float("nan"), float("-inf"), np.float64("nan"), np.float32("inf"), [{"deep": float("inf")}]]


@pytest.mark.parametrize("value", [*NOT_FINITE, b"raw", {1: 2}, {"object": object()}, 2**70])
def test_reports_that_cannot_be_encoded_are_refused(plan: Plan, value: object) -> None:
    with pytest.raises(ConfigError, match="report"):
        codec.seal(replace(plan, report={"value": value}))
    with pytest.raises(ConfigError, match="report"):
        assert replace(plan, report={"value": value}, sections=None).id


def test_parts_encoded_earlier_are_reused(plan: Plan) -> None:
    tables = table_bytes.tables_of(plan.layouts, plan.programs, plan.moves)
    parts = table_bytes.encode_parts(tables, plan.header.ranks)
    assert codec.seal(plan, parts) == plan


def test_the_order_of_layouts_and_kinds_is_checked(plan: Plan) -> None:
    reordered = dict(reversed(plan.layouts.items()))
    with pytest.raises(ConfigError, match=r"layouts = .*in its order: attention, linear -> 2"):
        codec.seal(replace(plan, layouts=reordered))
    two = next(p for p in map(random_plan, range(100)) if len(p.header.kinds) == 2)
    with pytest.raises(ConfigError, match=r"kinds = .*must match the header"):
        codec.seal(replace(two, programs=dict(reversed(two.programs.items()))))
    backwards = {key: plan.programs[key] for key in reversed(plan.programs)}
    assert codec.seal(replace(plan, programs=backwards)) == plan  # phases have an order of their own


def test_every_section_enters_the_id(plan: Plan) -> None:
    header = replace(plan.header, seed=plan.header.seed + 1)
    changes = [replace(plan, header=header), replace(plan, report={}), replace(plan, moves=())]
    changes.append(replace(plan, request=replace(plan.request, hardware="00")))
    assert len({plan.id, *(codec.seal(changed).id for changed in changes)}) == 5


@pytest.mark.parametrize("rank", [-1, 5, "a", True, 1.0, None])
def test_an_unknown_rank_is_named(plan: Plan, rank: object) -> None:
    layout, (kind, phase) = plan.layout("attention"), next(iter(plan.programs))
    methods = (layout.to_cu_seqlens, layout.tokens, layout.position_ids, plan.for_rank)
    for method in (*methods, lambda rank: plan.program(rank, kind, phase)):
        with pytest.raises(ConfigError, match=r"rank = .*must be (in \[0, 4\]|an integer)") as caught:
            method(rank)
        assert caught.value.value is rank


def test_an_unknown_program_is_named(plan: Plan) -> None:
    kind, phase = next(iter(plan.programs))
    with pytest.raises(UnknownNameError, match="kind = 'nonesuch'"):
        plan.program(0, "nonesuch", phase)
    with pytest.raises(UnknownNameError, match=r"phase = 'sideways'.*forward"):
        plan.program(0, kind, "sideways")
    with pytest.raises(UnknownNameError, match="loader"):
        plan.for_rank(0).layout("loader")
    assert plan.program(np.int64(0), kind, phase).ranks == 1


def test_cu_seqlens_follow_the_rows() -> None:
    columns = {"row": [5, 0], "token": [0, 9], "length": [2, 5], "sequence": [0, 1], "position": [0, 0]}
    spans = Table.of(np.array([0, 2]), {name: np.array(column) for name, column in columns.items()})
    layout = Layout("attention", spans)
    assert layout.to_cu_seqlens(0).tolist() == [0, 5, 7]
    assert layout.tokens(0).tolist() == [9, 10, 11, 12, 13, 0, 1]


# ---------------------------------------------------------------------------------------------- hostile bytes


packed = partial(msgspec.msgpack.encode, order="deterministic")


def rebuilt(plan: Plan, version: tuple[int, int] = VERSION, **sections: object) -> bytes:
    """The encoded plan with some sections replaced, and the matching id."""
    changed = replace(plan.sections, id=b"", **sections)
    return codec.encode_wire(replace(changed, id=sections_id(changed)), version)


def with_part(plan: Plan, part: bytes, rank: int = 1) -> bytes:
    """The encoded plan with one part replaced, and the matching id."""
    parts = list(plan.sections.parts)
    parts[rank] = part
    return rebuilt(plan, parts=parts)


def assert_refused(data: bytes, match: str) -> None:
    with pytest.raises(DecodeError, match=match):
        Plan.decode(data)


def test_a_changed_byte_is_detected(plan: Plan) -> None:
    data = bytearray(plan.encode())
    data[data.index(plan.sections.parts[2]) + 20] ^= 1
    with pytest.raises(DecodeError, match=f"{plan.id.hex()}.* differs from"):
        Plan.decode(bytes(data))


def test_a_plan_with_a_wrong_id_can_be_decoded_on_request(plan: Plan) -> None:
    data = codec.encode_wire(replace(plan.sections, id=bytes(32)))
    assert_refused(data, "stored id 0000")
    decoded = codec.decode(data, check_id=False)
    assert decoded.id == bytes(32)
    assert sections_id(decoded.sections) == plan.id


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"hello", b"\xc1", b"\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 10**6]
)
def test_bytes_that_are_not_a_plan_are_refused(data: bytes) -> None:
    assert_refused(data, "not an Apportion plan")
    with pytest.raises(DecodeError):
        Slice.decode(data)


def test_every_truncated_plan_is_refused(plan: Plan) -> None:
    data = plan.encode()
    for end in range(0, len(data), 7):
        with pytest.raises(DecodeError):
            Plan.decode(data[:end])


def test_other_formats_and_versions_are_refused(plan: Plan) -> None:
    with pytest.raises(DecodeError, match=r"format is 'apportion\.slice'"):
        Plan.decode(plan.for_rank(0).encode())
    with pytest.raises(DecodeError, match=r"format is 'apportion\.plan'"):
        Slice.decode(plan.encode())
    with pytest.raises(VersionError, match=r"2\.0.*reads 3\.x"):
        Plan.decode(msgpack.packb({"format": "apportion.plan", "version": [2, 0], "body": b""}))
    assert_refused(msgpack.packb({"format": "apportion.plan", "version": [3, -1]}), "version 3.-1")
    assert_refused(rebuilt(plan, (3, 3)), "differs from")


def test_unknown_header_fields_are_accepted_only_in_a_newer_version(plan: Plan) -> None:
    header = msgpack.unpackb(plan.sections.header) | {"version": [3, 9], "novel": 1}
    data = rebuilt(plan, (3, 9), header=packed(header))
    wider = msgpack.unpackb(data) | {"novel": b"more"}
    assert Plan.decode(msgpack.packb(wider)).header.version == (3, 9)
    again = Slice.decode(Plan.decode(data).for_rank(1).encode())
    assert again.header == replace(plan.header, version=(3, 9))
    header |= {"version": VERSION}
    assert_refused(rebuilt(plan, header=packed(header)), "header: unknown")


def test_repeated_keys_and_non_minimal_forms_are_refused(plan: Plan) -> None:
    assert_refused(with_part(plan, plan.sections.parts[1] + b"\0"), "rank 1, .* is followed by further bytes")
    header = plan.sections.header
    repeated = b"\xde\x00\x11" + header[3:] + b"\xa5ranks\x05"
    assert_refused(rebuilt(plan, header=repeated), "repeated or unsorted")
    data = plan.encode()
    assert_refused(bytes([data[0] + 1]) + data[1:] + b"\xa6report\xc4\x01\x80", "plan: repeated")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("ranks", 0, "ranks = 0"),
        ("ranks", 70_000, "ranks = 70000"),
        ("ranks", 4, "4, but the plan has 5 parts"),
        ("ranks", "5", "Expected `int`"),
        ("q_heads", 3, "not a multiple"),
        ("q_heads", 2**63, "outside"),
        ("kv_heads", -1, "outside"),
        ("head_dim", 16, "the requested model"),
        ("dtype", "object", "known are bf16"),
        ("kinds", [], "distinct names"),
        ("kinds", ["default", "default"], "distinct names"),
        ("kinds", ["other"], "diagonals must name each kind"),
        ("phases", [], "phases must be one or more of forward, backward"),
        ("phases", ["backward", "forward"], "phases must be one or more of"),
        ("layouts", ["attention"], "different layouts"),
        ("home_layout", "loader", "not among"),
        ("head_sets", [[0, 0]], "distinct heads"),
        ("head_sets", [[4]], "below 4"),
        ("head_sets", [[]], "head set 1"),
        ("engines", {"x": 1}, "Expected `str`"),
        ("version", [3, 2], "differs"),
        ("diagonals", {"default": [[-(2**62), 2**62]]}, "the requested masks have"),
        ("diagonals", {}, "diagonals must name each kind"),
        ("diagonals", {"default": [[0, 1], [0, 1]]}, "distinct, sorted"),
        ("diagonals", {"default": [[0, n] for n in range(9)]}, "at most 8"),
        ("diagonals", {"default": [[1, 0]]}, r"\[dmin, dmax\]"),
        ("diagonals", {"default": [[0, 2**63]]}, "header"),
        ("diagonals", {"default": [[0, 2**62 + 1]]}, r"\[dmin, dmax\]"),
        ("diagonals", {"default": [[0, 1, 2]]}, "length 2"),
        ("diagonals", None, "Expected `object`"),
    ],
)
def test_malformed_headers_are_refused(plan: Plan, field: str, value: object, match: str) -> None:
    header = msgpack.unpackb(plan.sections.header) | {field: value}
    assert_refused(rebuilt(plan, header=packed(header)), match)


@pytest.mark.parametrize(
    ("section", "value", "match"),
    [
        ("request", {}, "'batch' is missing"),
        ("request", [1], "request"),
        ("report", {"gap": float("nan")}, "finite"),
        ("report", {"gap": [{"x": float("inf")}]}, "finite"),
        ("report", {"blob": b"x"}, "cannot hold a bytes"),
        ("report", {"a": [b"\x01", {"b": b""}]}, "cannot hold a bytes"),
        ("layouts", {"attention": {"tokens": 1}}, "different layouts"),
        ("layouts", {"attention": {"tokens": -1}, "linear -> 2": {"tokens": 1}}, "tokens"),
        ("moves", [["attention", "nowhere"]], "unknown layout"),
        ("moves", [["attention", "linear -> 2"]] * 2, "two moves"),
        ("moves", [], "is followed by further bytes"),
        ("moves", [["attention"]], "moves"),
    ],
)
def test_malformed_sections_are_refused(plan: Plan, section: str, value: object, match: str) -> None:
    assert_refused(rebuilt(plan, **{section: packed(value)}), match)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("batch", "lengths"), [0]),
        (("batch", "lengths"), [2**62] * 8),
        (("batch", "mask"), {"nonsense": {}}),
        (("cluster", "nodes"), -1),
        (("model", "dtype"), 7),
        (("policy", "recipe"), None),
        (("hardware",), 3),
        (("more",), 3),
    ],
)
def test_malformed_requests_are_refused(plan: Plan, path: tuple[str, ...], value: object) -> None:
    request = msgpack.unpackb(plan.sections.request)
    inner = request
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ApportionError, match="request"):
        Plan.decode(rebuilt(plan, request=packed(request)))


def test_keys_that_are_not_strings_are_refused(plan: Plan) -> None:
    assert_refused(rebuilt(plan, report=msgpack.packb({"a": {1: 2}})), "report")
    assert_refused(rebuilt(plan, report=msgpack.packb({1: 2})), "report")
    request = msgpack.unpackb(plan.sections.request) | {"cluster": {None: 1}}
    assert_refused(rebuilt(plan, request=msgpack.packb(request)), "request")


def test_deep_nesting_and_oversized_sections_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(rebuilt(plan, report=b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"), "recursion")
    monkeypatch.setattr(wire, "MAX_BYTES", dict(wire.MAX_BYTES) | {"part": 40, "report": 1 << 20})
    assert_refused(plan.encode(), "the limit is 40")
    assert_refused(rebuilt(plan, report=bytes(1 << 21)), "the limit is 1048576")


@pytest.mark.parametrize("section", sorted({*wire.MAX_BYTES} - {"report"}))
def test_plans_above_the_size_limits_are_not_encoded(plan: Plan, section: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", dict(wire.MAX_BYTES) | {section: 0})
    with pytest.raises(CapacityError, match=rf"bytes of {section}; the limit is 0: use more ranks"):
        codec.seal(plan)


def test_too_many_parts_are_refused(plan: Plan) -> None:
    assert_refused(rebuilt(plan, parts=[b""] * 65_536), "65536 parts")
    assert_refused(codec.encode_wire(replace(plan.sections, parts=[])), "0 parts")


# ---------------------------------------------------------------------------------------------- structure


def encode_with_value(plan: Plan, table: str, column: str, row: int, value: int) -> bytes:
    """The encoded plan with one number of rank 0's forward program changed."""
    program = plan.programs["default", "forward"]
    old = program[table]
    values = old[column].copy()
    values[row] = value
    changed = ProgramSet({**program.tables, table: Table.of(old.ptr, {**old.columns, column: values})})
    return codec.seal(replace(plan, programs={**plan.programs, ("default", "forward"): changed})).encode()


@pytest.fixture(scope="module")
def full_plan() -> Plan:
    """A plan whose rank 0 has rows in every forward table."""
    plan = random_plan(2274, ranks=2)
    assert plan.header.kinds == ("default",)
    assert all(table.ptr[1] > 1 for table in plan.programs["default", "forward"].tables.values())
    return plan


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "match"),
    [
        ("instructions", "op", 0, 0, "op is outside"),
        ("instructions", "op", 0, 14, "op is outside"),
        ("instructions", "mode", 0, 4, "mode is outside"),
        ("instructions", "count", 0, 2**40, "count exceeds its list"),
        ("instructions", "count", 0, -1, "count is outside"),
        ("operands", "tensor", 0, 1, "operand 0 must be none"),
        ("operands", "tensor", 1, 10, "tensor is outside"),
        ("operands", "tensor", 1, 0, "only operand 0"),
        ("operands", "space", 1, 2, "space is outside"),
        ("operands", "rows", 1, 0, "only operand 0"),
        ("operands", "rows", 1, -1, "rows is outside"),
        ("operands", "row", 1, -1, "row is outside"),
        ("operands", "col", 1, 2**20, "col is outside"),
        ("operands", "heads", 1, 4, "heads is outside"),
        ("arenas", "tensor", 0, 0, "tensor is outside"),
        ("arenas", "rows", 0, 0, "rows is outside"),
        ("transfers", "send", 0, 2, "send is outside"),
        ("transfers", "peer", 0, 2, r"peer is outside \[0, 1\]"),
        ("transfers", "operand", 0, 99, "operand is not among"),
        ("tasks", "q", 0, 99, "q is not among"),
        ("tasks", "first", 0, 2, "first is outside"),
        ("tasks", "first", 0, -1, "first is outside"),
        ("grads", "dkv", 0, 2**31, "dkv is not among"),
        ("grads", "first", 0, 4, "first is outside"),
        ("rowops", "d", 0, -1, "d is outside"),
    ],
)
def test_numbers_out_of_range_are_refused(
    full_plan: Plan, table: str, column: str, row: int, value: int, match: str
) -> None:
    data = encode_with_value(full_plan, table, column, row, value)
    assert_refused(data, f"rank 0, default forward, {table} row {row}: .*{match}")


def test_counts_waits_and_rounds_are_those_of_their_ops(full_plan: Plan) -> None:
    table = full_plan.programs["default", "forward"]["instructions"].rank(0)
    counted, other = int(np.argmax(table["count"] > 0)), int(np.argmax(table["op"] > 2))
    for column, row, value, match in (
        ("count", counted, 0, "rank 0, default forward: its instructions consume"),
        ("round", other, 1, "round, channel and mode belong"),
        ("channel", other, 1, "round, channel and mode belong"),
        ("op", counted, 2, "wait consumes no rows|belong"),
    ):
        assert_refused(encode_with_value(full_plan, "instructions", column, row, value), match)


def test_a_tensor_has_at_most_one_arena(full_plan: Plan) -> None:
    first = int(full_plan.programs["default", "forward"]["arenas"]["tensor"][0])
    assert_refused(encode_with_value(full_plan, "arenas", "tensor", 1, first), "a second arena")


def test_head_sets_of_kv_contain_only_kv_heads(full_plan: Plan) -> None:
    plan = codec.decode(encode_with_value(full_plan, "operands", "heads", 1, 2))
    plan = codec.decode(encode_with_value(plan, "operands", "tensor", 1, 3))
    assert_refused(encode_with_value(plan, "operands", "heads", 1, 3), "exceeds the 2 KV heads")


def peak_of(data: bytes) -> int:
    """The peak memory of decoding in bytes, whether it succeeds or fails."""
    tracemalloc.start()
    try:
        codec.decode(data)
    except DecodeError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_decoding_spans_of_many_tokens_takes_little_memory() -> None:
    plan = next(p for p in map(random_plan, range(100)) if p.request.batch.tokens > 2**27)
    data = plan.encode()
    codec.decode(data)
    assert peak_of(data) < 64 * len(data) + 200_000


def test_small_inputs_never_decode_to_large_memory(plan: Plan) -> None:
    blank = msgpack.packb([{}] * 100_000)
    for data in (
        rebuilt(plan, request=b"\x81\xa5batch" + blank),
        rebuilt(plan, report=b"\x81\xa1x" + blank),
        rebuilt(plan, header=blank),
        rebuilt(plan, moves=blank),
        rebuilt(plan, parts=[b""] * 50_000),
        with_part(plan, bytes(1 << 20)),
        with_part(plan, (2**24).to_bytes(4, "little") + bytes(1 << 20)),
    ):
        assert peak_of(data) < 100 * len(data)


# ---------------------------------------------------------------------------------------------- hostile slices


def test_slices_with_a_wrong_proof_are_refused(plan: Plan) -> None:
    held, other = msgpack.unpackb(plan.for_rank(1).encode()), codec.seal(random_plan(99, ranks=5))
    first, *path = held["path"]
    paths = [first, *path[:-1]], [first, *path, bytes(32)], [first[:31], *path], [bytes(32), *path]
    wrong: dict[str, list[Any]] = {
        "part": [plan.sections.parts[2], other.sections.parts[1]],
        "rank": [0, 5, -1],
        "ranks": [6, 1, 2**40],
        "id": [bytes(32), b""],
        "path": [*paths, [bytes(32)] * 300],
        "digests": [[], held["digests"][::-1]],
        "header": [other.sections.header],
        "version": [[1, 0], [1, 2]],
        "more": [1],
        "moves": [b"\x90"],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(DecodeError):
            Slice.decode(msgpack.packb(held | {name: value}))
    assert Slice.decode(msgpack.packb(held)) == plan.for_rank(1)


def test_sections_id_needs_no_cache(plan: Plan) -> None:
    sections = Sections(*(getattr(plan.sections, name) for name in Sections.__dataclass_fields__))
    assert sections_id(sections) == plan.id
    assert hashing.tree([b"a"]) == [[b"a"]]
