"""The OpenAPI schema that FastAPI cannot derive: bodies that are parsed by hand, and the routes of `delivery`."""

from __future__ import annotations

from typing import Any

_REQUEST = {
    "type": "object",
    "required": ["job", "batches"],
    "properties": {
        "job": {
            "type": "object",
            "required": ["cluster", "model", "policy", "tokens_per_rank"],
            "description": "cluster, model, policy (recipe by name or whole), tokens_per_rank, microbatches, hardware",
        },
        "batches": {
            "type": "array",
            "items": {"type": "object", "required": ["lengths"]},
            "description": "one per microbatch; a single batch of all sequences if the recipe packs",
        },
    },
}
EXAMPLE: dict[str, Any] = {
    "job": {
        "cluster": {"nodes": 1, "ranks_per_node": 4},
        "model": {"q_heads": 8, "kv_heads": 2, "head_dim": 64},
        "policy": {"recipe": "auto"},
        "tokens_per_rank": 4096,
    },
    "batches": [{"lengths": [9000, 3000, 700]}],
}
#: `openapi_extra` of routes that take a plan request
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _REQUEST, "example": EXAMPLE},
            "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def _parameter(name: str, location: str, schema: dict[str, Any], required: bool = True) -> dict[str, Any]:
    return {"name": name, "in": location, "required": required, "schema": schema}


_KEY = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_RANK = _parameter("rank", "path", {"type": "integer", "minimum": 0, "maximum": 999999})
_WAIT = _parameter("wait_s", "query", {"type": "number", "minimum": 0, "maximum": 60, "default": 0}, False)


def _binary(media: str, text: str) -> dict[str, Any]:
    return {"description": text, "content": {media: {"schema": {"type": "string", "format": "binary"}}}}


DELIVERY: dict[str, Any] = {
    "/v1/plans/{key}/ranks/{rank}": {
        "get": {
            "summary": "Slice",
            "description": "One rank's slice of a plan; waits for it up to wait_s seconds.",
            "parameters": [_parameter("key", "path", _KEY), _RANK, _WAIT],
            "responses": {
                "200": _binary("application/vnd.apportion.slice", "The slice, immutable; zstd if accepted"),
                "202": {"description": "It is still being planned"},
                "404": {"description": "unknown-plan: submit the request, then retry"},
                "422": {"description": "The request is refused, or a parameter is invalid"},
            },
        }
    },
    "/v1/ranks/{rank}/stream": {
        "get": {
            "summary": "Slices",
            "description": "Slices of the keys, each as soon as it is ready, in frames of kind u8, length u32 little "
            "endian, payload: 0 a slice (zstd), 1 problem+json of this key, 2 still being planned. Ends early if a "
            "slice is not ready after wait_s seconds.",
            "parameters": [
                _RANK,
                _parameter("key", "query", {"type": "array", "items": _KEY, "minItems": 1, "maxItems": 256}),
                _WAIT,
            ],
            "responses": {
                "200": _binary("application/vnd.apportion.stream", "Frames"),
                "422": {"description": "A parameter is invalid"},
            },
        }
    },
}
