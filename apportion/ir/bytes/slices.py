"""Slices: one rank's part of a plan as bytes, with the proof that it belongs to the plan's id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from apportion.ir.bytes import wire
from apportion.ir.bytes.sections import Sections, check_stored_id, read_header
from apportion.ir.bytes.table_bytes import Pair, read_tables
from apportion.ir.errors import ConfigError, DecodeError, UnknownNameError
from apportion.ir.hashing import SIZE, climb, digest, leaf, path, plan_id
from apportion.ir.isa import MAX_RANKS
from apportion.ir.plan.tables import Header, Layout, Move, PlanTables, ProgramSet, Recurrence

SLICE_FORMAT = "apportion.slice"
_CAP = 8  # bytes of a token cap, and of its checksum


@dataclass(frozen=True, eq=False)
class Slice:
    """One rank's part of a plan, with the proof that it belongs to the plan's id.

    Tables and layouts hold only this rank: address them with rank 0.
    """

    id: bytes
    rank: int
    header: Header
    layouts: Mapping[str, Layout]
    programs: Mapping[Pair, ProgramSet]
    moves: tuple[Move, ...]
    recurrence: Recurrence | None
    wire: wire.SliceWire

    def __repr__(self) -> str:
        return f"<Slice: rank {self.rank} of {self.ranks}, {self.header.recipe}, plan {self.id.hex()[:12]}>"

    @property
    def ranks(self) -> int:
        return self.header.ranks

    @property
    def token_cap(self) -> int | None:
        """The token cap of the request's policy."""
        return int.from_bytes(self.wire.token_cap[:_CAP]) or None

    @property
    def request_digest(self) -> bytes:
        """32-byte digest of the plan's request."""
        return self.wire.digests[0]

    def layout(self, name: str) -> Layout:
        """This rank's rows of the layout of that name. Raises UnknownNameError."""
        if name not in self.layouts:
            raise UnknownNameError(
                "layout", name, f"the plan has {', '.join(self.layouts)}", "use one of these"
            )
        return self.layouts[name]

    def encode(self) -> bytes:
        """Encodes the slice."""
        return wire.encode_struct(self.wire)

    @staticmethod
    def decode(data: bytes) -> Slice:
        """Decodes a slice and checks its id against its bytes. Raises DecodeError, VersionError."""
        envelope = wire.read_envelope(data, wire.SliceWire, "slice", SLICE_FORMAT)
        check_stored_id(envelope.id, _slice_id(envelope), f"slice of rank {envelope.rank}")
        if envelope.token_cap != _encode_cap(int.from_bytes(envelope.token_cap[:_CAP]), envelope.id):
            raise DecodeError(
                f"slice of rank {envelope.rank}: its token cap was changed or damaged after planning"
            )
        return _open_slice(envelope)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and (self.id, self.rank) == (other.id, other.rank)

    def __hash__(self) -> int:
        return hash((self.id, self.rank))


def _encode_cap(cap: int | None, id: bytes) -> bytes:
    """Encodes a token cap, 0 for none, with a checksum bound to this plan's id."""
    number = (cap or 0).to_bytes(_CAP)
    return number + digest(id + number)[:_CAP]


def _slice_id(envelope: wire.SliceWire) -> bytes:
    if not 0 <= envelope.rank < envelope.ranks <= MAX_RANKS:
        raise DecodeError(f"slice: rank {envelope.rank} of {envelope.ranks}")
    if len(envelope.digests) != 2:
        raise DecodeError(f"slice: {len(envelope.digests)} digests; expected two, of request and report")
    if any(len(node) != SIZE for node in [*envelope.digests, *envelope.path]):
        raise DecodeError(f"slice: a digest does not have {SIZE} bytes")
    request, report = envelope.digests
    digests = (digest(envelope.header), request, digest(envelope.layouts), digest(envelope.moves), report)
    return plan_id(digests, climb(leaf(envelope.part), envelope.rank, envelope.ranks, envelope.path))


def _open_slice(envelope: wire.SliceWire) -> Slice:
    header = read_header(envelope.header, envelope.version)
    if header.ranks != envelope.ranks:
        raise DecodeError(f"slice: ranks = {envelope.ranks}, but its plan has {header.ranks}")
    tables = read_tables(header, envelope.layouts, envelope.moves, [envelope.part], envelope.rank)
    return Slice(envelope.id, envelope.rank, header, *tables, envelope)


def slice_plan(plan: PlanTables, sections: Sections, rank: int) -> Slice:
    """The slice of one rank. sections: the encoded plan. Raises ConfigError if the plan has no such rank."""
    if not 0 <= rank < plan.header.ranks:
        raise ConfigError("rank", rank, f"the plan has {plan.header.ranks} ranks", "number ranks from 0")
    (envelope,) = _slice_wires(plan, sections, [rank])
    layouts = {name: Layout(name, layout.spans.rank(rank)) for name, layout in plan.layouts.items()}
    programs = {key: program.rank(rank) for key, program in plan.programs.items()}
    moves = tuple(Move(move.source, move.target, move.table.rank(rank)) for move in plan.moves)
    recurrence = plan.recurrence and plan.recurrence.rank(rank)
    return Slice(envelope.id, rank, plan.header, layouts, programs, moves, recurrence, envelope)


def encode_slices(plan: PlanTables, sections: Sections) -> list[bytes]:
    """Encodes every rank's slice without decoding any. sections: the encoded plan."""
    return [wire.encode_struct(piece) for piece in _slice_wires(plan, sections, range(plan.header.ranks))]


def _slice_wires(plan: PlanTables, s: Sections, ranks: Iterable[int]) -> Iterator[wire.SliceWire]:
    digests = [digest(s.request), digest(s.report)]
    for rank in ranks:
        yield wire.SliceWire(
            SLICE_FORMAT,
            plan.header.version,
            rank,
            plan.header.ranks,
            s.header,
            s.layouts,
            s.moves,
            s.parts[rank],
            digests,
            path(s.tree, rank),
            _encode_cap(plan.request.policy.token_cap, s.id),
            s.id,
        )
