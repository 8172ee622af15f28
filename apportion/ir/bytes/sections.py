"""The sections of a plan and their id; codecs of the plain-data sections: header, request, layouts, moves, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from apportion.ir.bytes import wire
from apportion.ir.errors import DecodeError
from apportion.ir.hashing import SIZE, digest, leaf, plan_id, tree
from apportion.ir.isa import LIMIT
from apportion.ir.plan import wellformed
from apportion.ir.plan.plain import check_pairs, header_data, request_from_data
from apportion.ir.plan.tables import Header, Request


@dataclass(frozen=True)
class Sections:
    """An encoded plan, section by section. `id` is the stored id; `sections_id` computes it from the bytes."""

    header: bytes
    request: bytes
    layouts: bytes
    moves: bytes
    report: bytes
    parts: list[bytes]
    id: bytes = b""

    @cached_property
    def tree(self) -> list[list[bytes]]:
        """The hash tree over the parts: levels from the leaves up."""
        return tree([leaf(part) for part in self.parts])

    def with_id(self, id: bytes) -> Sections:
        """Returns the same sections under another stored id."""
        result = replace(self, id=id)
        result.__dict__["tree"] = self.tree  # hashing dominates: reuse the tree
        return result


def sections_id(sections: Sections) -> bytes:
    """Computes the id of the sections' bytes; the stored id of a damaged plan differs."""
    shared = (sections.header, sections.request, sections.layouts, sections.moves, sections.report)
    return plan_id(map(digest, shared), sections.tree[-1][0])


def check_stored_id(stored: bytes, expected: bytes, label: str) -> None:
    if stored != expected:
        raise DecodeError(
            f"{label}: stored id {stored[:SIZE].hex()} differs from {expected.hex()}, the id of its bytes: "
            "it was changed or damaged after planning"
        )


class _Layout(msgspec.Struct):
    tokens: int


_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_layouts = msgspec.msgpack.Decoder(dict[str, _Layout]).decode
_decode_moves = msgspec.msgpack.Decoder(list[tuple[str, str]]).decode
_decode_map = msgspec.msgpack.Decoder(dict[str, Any]).decode


def read_header(data: bytes, version: tuple[int, int]) -> Header:
    """Decodes the header section. Raises DecodeError."""
    header: Header = wire.read_section(_decode_header, data, "header", version, header_data)
    if header.version != tuple(version):
        raise DecodeError(f"header: version {header.version} differs from the envelope's {tuple(version)}")
    wellformed.check_header(header)
    return header


def read_request(data: bytes, version: tuple[int, int]) -> Request:
    """Decodes the request section. Raises DecodeError."""
    section = wire.read_section(_decode_map, data, "request", version)
    return request_from_data(section, strict=not wire.is_newer(version))


def read_tokens(
    data: bytes, header: Header, tokens: int | None, version: tuple[int, int]
) -> Mapping[str, int]:
    """Decodes the layouts section: name -> number of tokens, in the header's order. tokens: of the batch, if known."""
    layouts: dict[str, _Layout] = wire.read_section(_decode_layouts, data, "layouts", version)
    if sorted(layouts) != sorted(header.layouts):
        raise DecodeError("layouts: the section and the header name different layouts")
    for name, layout in layouts.items():
        if not 0 <= layout.tokens <= LIMIT or (tokens is not None and layout.tokens != tokens):
            raise DecodeError(f"layouts: {name} has {layout.tokens} tokens, but the batch has {tokens}")
    return {name: layouts[name].tokens for name in header.layouts}


def read_moves(data: bytes, header: Header, version: tuple[int, int]) -> list[tuple[str, str]]:
    """Decodes the moves section: (source, target) pairs. Raises DecodeError."""
    pairs: list[tuple[str, str]] = wire.read_section(_decode_moves, data, "moves", version)
    check_pairs(pairs, header)
    return pairs


def read_report(data: bytes, version: tuple[int, int]) -> dict[str, Any]:
    """Decodes the report section: plain data without NaN. Raises DecodeError."""
    report: dict[str, Any] = wire.read_section(_decode_map, data, "report", version)
    wire.check_plain(report, "report")
    return report
