"""Encodes and decodes plans: msgpack maps around integer columns, with a hash tree over the ranks' parts.

    plan ── header, request, layouts, moves, report    plain data, see `sections`
         ├─ parts[rank]                                its spans, programs and moves, see `table_bytes`
         └─ id = H(magic · H(header) · H(request) · H(layouts) · H(moves) · H(report) · root of parts)

Encoding and decoding take a small multiple of the time needed to hash the bytes. `schemas/FORMAT.md` describes the
format for readers in other languages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from apportion.ir.bytes import wire
from apportion.ir.bytes.sections import (
    Sections,
    check_stored_id,
    read_header,
    read_report,
    read_request,
    sections_id,
)
from apportion.ir.bytes.slices import Slice, slice_plan
from apportion.ir.bytes.table_bytes import encode_parts, read_tables, tables_of
from apportion.ir.bytes.transport import decompress
from apportion.ir.errors import CapacityError, ConfigError, DecodeError
from apportion.ir.isa import FORMAT, MAX_RANKS, VERSION
from apportion.ir.plan import plain
from apportion.ir.plan.tables import PlanTables, checked_rank
from apportion.ir.text.listing import format_plan


@dataclass(frozen=True, eq=False)
class Plan(PlanTables):
    """A plan of one microbatch for all ranks. Equal plans have equal ids. Build with `seal`."""

    sections: Sections | None = None  # as encoded, set by `seal` and `decode`

    @property
    def id(self) -> bytes:
        """The plan's id: 32 bytes, BLAKE2b over the digests of the encoded sections."""
        return self.sealed().id

    def sealed(self) -> Sections:
        """The encoded sections, computed once."""
        sections = encode_sections(self) if self.sections is None else self.sections
        object.__setattr__(self, "sections", sections)
        return sections

    def __repr__(self) -> str:
        return f"<Plan: {self.header.recipe} on {self.header.ranks} ranks, {self.id.hex()[:12]}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: the figures of the report and the load of each rank."""
        from apportion.ir import cards
        from apportion.ir.plan.summary import loads, plan_rows

        title = f"{self.header.recipe} on {self.header.ranks} ranks, plan {self.id.hex()[:12]}"
        rows = plan_rows(self.report) if self.report else [("report", "none: only the first rank keeps it")]
        return cards.card(title, rows, cards.bars("attention load of each rank, and the mean", loads(self)))

    def encode(self) -> bytes:
        """Encodes the plan: the bytes depend only on request, recipe, seed and version."""
        return encode(self)

    @staticmethod
    def decode(data: bytes) -> Plan:
        """Decodes a plan, also from a zstd frame as stored in files. Raises DecodeError (VersionError for an unknown
        major version)."""
        return decode(decompress(data) if isinstance(data, bytes) else data)

    def for_rank(self, rank: int) -> Slice:
        """The rank's slice: its part, the header and the hash path to this plan's id. Raises ConfigError if the plan
        has no such rank."""
        return slice_plan(self, self.sealed(), checked_rank(rank, self.header.ranks))

    def text(self, rank: int | None = None) -> str:
        """Formats the plan, or one rank of it, as text (`ir.text`)."""
        sections = self.sealed()
        request, report = map(msgspec.msgpack.decode, (sections.request, sections.report))
        return format_plan(self, sections.id, request, report, rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


def encode_sections(
    plan: Plan, parts: list[bytes] | None = None, request: Mapping[str, object] | None = None
) -> Sections:
    """Encodes the plan's sections and computes their id.

    parts: the result of `encode_parts`, if the caller has it; request: the original form of the request, if it is to be
    kept. Raises ConfigError for reports and numbers that cannot be encoded, for a header whose layouts, kinds or phases
    differ from the plan's, and for recurrent kinds without tables. Raises CapacityError if a section exceeds the
    readers' limit.
    """
    _check_order("layouts", tuple(plan.layouts), plan.header.layouts)
    _check_order("kinds", tuple(dict.fromkeys(kind for kind, _ in plan.programs)), plan.header.kinds)
    if plan.programs.keys() != {*product(plan.header.kinds, plan.header.phases)}:
        rule = f"each kind must have the phases of the header: {', '.join(plan.header.phases)}"
        raise ConfigError("programs", [*plan.programs], rule, "make the header match the plan")
    if bool(plan.header.recurrent) != (plan.recurrence is not None):
        rule = "must be set if the header has recurrent kinds, and only then"
        raise ConfigError("recurrence", plan.recurrence, rule, "make the header match the plan")
    report = _encode_report(plan)
    tokens = plan.request.batch.tokens
    if parts is None:
        parts = encode_parts(
            tables_of(plan.layouts, plan.programs, plan.moves, plan.recurrence), plan.header.ranks
        )
    sections = Sections(
        header=wire.encode_section(plain.header_data(plan.header)),
        request=_encode_request(plan) if request is None else wire.encode_section(request),
        layouts=wire.encode_section({name: {"tokens": tokens} for name in plan.layouts}),
        moves=wire.encode_section([[move.source, move.target] for move in plan.moves]),
        report=report,
        parts=parts,
    )
    _check_sizes(sections)
    return sections.with_id(sections_id(sections))


def _check_sizes(sections: Sections) -> None:
    """Raises CapacityError for sections beyond `wire.MAX_BYTES`, which readers refuse."""
    sizes = {name: len(getattr(sections, name)) for name in wire.MAX_BYTES if name != "part"}
    for name, size in {**sizes, "part": max(map(len, sections.parts), default=0)}.items():
        if size > wire.MAX_BYTES[name]:
            raise CapacityError(
                f"the plan has {size} bytes of {name}; the limit is {wire.MAX_BYTES[name]}: use more ranks, larger "
                "blocks, or several batches"
            )


def _check_order(field: str, names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if names != expected:
        rule = f"must match the header, in its order: {', '.join(expected)}"
        raise ConfigError(field, names, rule, "make the header match the plan")


def _encode_request(plan: Plan) -> bytes:
    """Encodes the request; keeps the original bytes if they decode to an equal request."""
    data, sections = plain.request_data(plan.request), plan.sections
    encoded: bytes = wire.encode_section(data)
    if sections is None or sections.request == encoded:
        return encoded
    is_equal = plain.request_data(read_request(sections.request, plan.header.version)) == data
    return sections.request if is_equal else encoded


def _encode_report(plan: Plan) -> bytes:
    try:
        report: bytes = wire.encode_section(plan.report)
        read_report(report, VERSION)
    except (DecodeError, TypeError, OverflowError) as error:
        rule, remedy = str(error), "use finite numbers, strings, lists and maps with string keys"
        raise ConfigError("report", plan.report, rule, remedy) from None
    return report


def seal(plan: Plan, parts: list[bytes] | None = None) -> Plan:
    """Returns the plan with freshly encoded sections and the id of its present contents. `parts` and errors: as in
    `encode_sections`."""
    return replace(plan, sections=encode_sections(plan, parts))


def encode(plan: Plan) -> bytes:
    """Encodes a plan."""
    return encode_wire(plan.sealed(), plan.header.version)


def encode_wire(sections: Sections, version: Sequence[int] = VERSION) -> bytes:
    """Encodes a plan from its sections, with their stored id."""
    s, (major, minor) = sections, version
    return wire.encode_struct(
        wire.PlanWire(
            FORMAT, (major, minor), s.header, s.request, s.layouts, s.moves, s.report, s.parts, s.id
        )
    )


# ---------------------------------------------------------------------------------------------- decode


def decode(data: bytes, check_id: bool = True) -> Plan:
    """Decodes a plan. Checks structure and id; `verify` checks the meaning.

    check_id: refuse a plan whose stored id does not match its bytes; False keeps the stored id in `plan.sections.id`
    for the verifier to report.

    Raises DecodeError; VersionError for an unknown major version. Allocates at most 240 times `len(data)`.
    """
    body = wire.read_envelope(data, wire.PlanWire, "plan", FORMAT, wire.check_canonical_plan)
    if not 1 <= len(body.parts) <= MAX_RANKS:
        raise DecodeError(f"plan: {len(body.parts)} parts; must be 1 to {MAX_RANKS}")
    sections = Sections(body.header, body.request, body.layouts, body.moves, body.report, body.parts, body.id)
    if check_id:
        check_stored_id(body.id, sections_id(sections), "plan")
    return _decode_sections(sections, body.version)


def _decode_sections(sections: Sections, version: tuple[int, int]) -> Plan:
    header = read_header(sections.header, version)
    if header.ranks != len(sections.parts):
        raise DecodeError(f"header: ranks = {header.ranks}, but the plan has {len(sections.parts)} parts")
    request = read_request(sections.request, version)
    plain.check_facts(header, request)
    report = read_report(sections.report, version)
    layouts, programs, moves, recurrence = read_tables(
        header, sections.layouts, sections.moves, sections.parts, 0, request.batch.tokens
    )
    return Plan(header, request, layouts, programs, moves, report, recurrence, sections)
