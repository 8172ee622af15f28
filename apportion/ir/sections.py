"""The sections of a plan that are plain data: header, request, names of layouts and moves, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from apportion.ir import structure, wire
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import LIMIT
from apportion.ir.model import Model
from apportion.ir.plan import Header, Request
from apportion.ir.policy import Policy

REQUEST_FIELDS = ("batch", "cluster", "model", "policy", "hardware")
#: header fields that repeat the model, for ranks that see only their slice
MODEL_FACTS = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "sent_gradients")


class _Layout(msgspec.Struct):
    tokens: int


_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_layouts = msgspec.msgpack.Decoder(dict[str, _Layout]).decode
_decode_moves = msgspec.msgpack.Decoder(list[tuple[str, str]]).decode
_decode_map = msgspec.msgpack.Decoder(dict[str, Any]).decode


def header_data(header: Header) -> dict[str, Any]:
    """The header as plain data."""
    values = {item.name: getattr(header, item.name) for item in fields(Header)}
    if header.sent_gradients == "wide":  # equal data has equal bytes: a default is not written
        del values["sent_gradients"]
    return values | {"engines": dict(header.engines)}


def request_data(request: Request) -> dict[str, Any]:
    """The request as plain data."""
    return {
        "batch": request.batch.to_data(),
        "cluster": request.cluster.to_data(),
        "model": request.model.to_data(),
        "policy": request.policy.to_data(),
        "hardware": request.hardware,
    }


def model_facts(model: Model) -> dict[str, Any]:
    """What the header repeats of the model."""
    facts = {name: getattr(model, name) for name in MODEL_FACTS}
    return facts | {"v_head_dim": model.head_dim if model.v_head_dim is None else model.v_head_dim}


def diagonals_of(batch: Batch, kinds: Sequence[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """What the header repeats of the masks; nothing of a kind that the batch does not have."""
    return {kind: batch.diagonals(kind) if kind in batch.masks else () for kind in kinds}


def read_header(data: bytes, version: tuple[int, int]) -> Header:
    """The header section. Raises DecodeError."""
    header: Header = wire.read_section(_decode_header, data, "header", version, header_data)
    if header.version != tuple(version):
        raise DecodeError(f"header: version {header.version} differs from {tuple(version)} outside it")
    structure.check_header(header)
    return header


def read_request(data: bytes, version: tuple[int, int]) -> Request:
    """The request section. Raises DecodeError."""
    found = wire.read_section(_decode_map, data, "request", version)
    return request_from_data(found, strict=not wire.newer(version))


def request_from_data(data: Any, strict: bool = True) -> Request:
    """The request in plain data; unknown fields are refused where `strict`. Raises DecodeError."""
    if not isinstance(data, dict) or not isinstance(data.get("hardware", ""), str):
        raise DecodeError("request: expected a map whose hardware is a text")
    unknown = [name for name in data if name not in REQUEST_FIELDS]
    if unknown and strict:
        raise DecodeError(
            f"request: unknown field {str(unknown[0])[:40]!r}, known are {', '.join(REQUEST_FIELDS)}"
        )
    missing = [name for name in REQUEST_FIELDS[:4] if name not in data]
    if missing:
        raise DecodeError(f"request: field {missing[0]!r} is missing")
    try:
        return Request(
            Batch.from_data(data["batch"]),
            Cluster.from_data(data["cluster"]),
            Model.from_data(data["model"]),
            Policy.from_data(data["policy"]),
            data.get("hardware", ""),
        )
    except ConfigError as error:
        raise DecodeError(f"request: {error}") from None


def check_facts(header: Header, request: Request) -> None:
    """The header repeats what was asked: it is all that a rank sees. Raises DecodeError."""
    if header.ranks != request.cluster.ranks:
        raise DecodeError(
            f"header: ranks = {header.ranks}, the cluster asked for has {request.cluster.ranks}"
        )
    for name, asked in model_facts(request.model).items():
        if getattr(header, name) != asked:
            raise DecodeError(
                f"header: {name} = {getattr(header, name)!r}, the model asked for has {asked!r}"
            )
    if header.diagonals != diagonals_of(request.batch, header.kinds):
        raise DecodeError(
            f"header: diagonals = {header.diagonals!r}, the masks asked for have "
            f"{diagonals_of(request.batch, header.kinds)!r}"
        )


def read_tokens(
    data: bytes, header: Header, tokens: int | None, version: tuple[int, int]
) -> Mapping[str, int]:
    """The layouts section: name -> tokens, in the header's order. `tokens`: those of the batch, where known."""
    found: dict[str, _Layout] = wire.read_section(_decode_layouts, data, "layouts", version)
    if sorted(found) != sorted(header.layouts):
        raise DecodeError("layouts: the section and the header do not name the same layouts")
    for name, layout in found.items():
        if not 0 <= layout.tokens <= LIMIT or (tokens is not None and layout.tokens != tokens):
            raise DecodeError(f"layouts: {name} has {layout.tokens} tokens, the batch {tokens}")
    return {name: found[name].tokens for name in header.layouts}


def read_moves(data: bytes, header: Header, version: tuple[int, int]) -> list[tuple[str, str]]:
    """The moves section: (source, target) pairs. Raises DecodeError."""
    pairs: list[tuple[str, str]] = wire.read_section(_decode_moves, data, "moves", version)
    check_pairs(pairs, header)
    return pairs


def check_pairs(pairs: Sequence[tuple[str, str]], header: Header) -> None:
    """Moves are between the header's layouts, each pair once. Raises DecodeError."""
    for pair in pairs:
        if not set(pair) <= set(header.layouts):
            raise DecodeError(f"moves: {pair[0][:40]!r} -> {pair[1][:40]!r} names an unknown layout")
    if len(set(pairs)) < len(pairs):
        raise DecodeError("moves: two moves between the same layouts")


def read_report(data: bytes, version: tuple[int, int]) -> dict[str, Any]:
    """The report section: plain data without NaN. Raises DecodeError."""
    report: dict[str, Any] = wire.read_section(_decode_map, data, "report", version)
    wire.check_plain(report, "report")
    return report
