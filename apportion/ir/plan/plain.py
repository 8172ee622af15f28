"""Plain data of a plan's header and request, and the check that the header matches the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.plan.tables import Header, Request
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.structs import to_data

REQUEST_FIELDS = ("batch", "cluster", "model", "policy", "hardware")
#: header fields copied from the model, for ranks that see only their slice
MODEL_FACTS = (
    "q_heads",
    "kv_heads",
    "head_dim",
    "v_head_dim",
    "dtype",
    "sent_gradients",
    "recurrent",
    "latent",
)


def header_data(header: Header) -> dict[str, Any]:
    """The header as plain data."""
    values = {item.name: getattr(header, item.name) for item in fields(Header)}
    if header.sent_gradients == "wide":  # the default is omitted, so that equal headers have equal bytes
        del values["sent_gradients"]
    del values["recurrent"]
    if header.recurrent:
        values["recurrent"] = {kind: recurrence.to_data() for kind, recurrence in header.recurrent.items()}
    del values["latent"]
    if header.latent is not None:
        values["latent"] = to_data(header.latent)
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


def diagonals_of(batch: Batch, kinds: Sequence[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The diagonals of the masks, as the header records them; none for a kind missing from the batch."""
    return {kind: batch.diagonals(kind) if kind in batch.masks else () for kind in kinds}


def request_from_data(data: Any, strict: bool = True) -> Request:
    """Builds the request from plain data; `strict` refuses unknown fields. Raises DecodeError."""
    if not isinstance(data, dict) or not isinstance(data.get("hardware", ""), str):
        raise DecodeError("request: expected a map whose hardware is a string")
    unknown = [name for name in data if name not in REQUEST_FIELDS]
    if unknown and strict:
        raise DecodeError(
            f"request: unknown field {str(unknown[0])[:40]!r}; known are {', '.join(REQUEST_FIELDS)}"
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


def facts_of(header: Header, request: Request) -> list[tuple[str, Any, Any, str]]:
    """Header fields that repeat the request: (name, value in the header, value in the request, phrase for the
    latter)."""
    model, diagonals = request.model, diagonals_of(request.batch, header.kinds)
    return [
        ("ranks", header.ranks, request.cluster.ranks, "the requested cluster has"),
        *[
            (name, getattr(header, name), getattr(model, name), "the requested model has")
            for name in MODEL_FACTS
        ],
        ("diagonals", dict(header.diagonals), diagonals, "the requested masks have"),
    ]


def check_facts(header: Header, request: Request) -> None:
    """Checks that the header matches the request. Raises DecodeError."""
    for name, value, expected, phrase in facts_of(header, request):
        if value != expected:
            raise DecodeError(f"header: {name} = {value!r}, but {phrase} {expected!r}")


def check_pairs(pairs: Sequence[tuple[str, str]], header: Header) -> None:
    """Checks that moves connect layouts of the header, each pair once. Raises DecodeError."""
    for pair in pairs:
        if not set(pair) <= set(header.layouts):
            raise DecodeError(f"moves: {pair[0][:40]!r} -> {pair[1][:40]!r} names an unknown layout")
    if len(set(pairs)) < len(pairs):
        raise DecodeError("moves: two moves between the same layouts")
