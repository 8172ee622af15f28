"""Parses bodies of plan requests: hand-written JSON, or the canonical msgpack that trainers send."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec

from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.bytes.sequences import MAX_MICROBATCHES
from apportion.ir.errors import ApportionError, CapacityError, ConfigError
from apportion.ir.request.batch import Batch
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.engine.entry import PlanRequest
from apportion.service.problems import ServiceError

JSON, MSGPACK = "application/json", "application/msgpack"
_LARGE = 64 << 10
_parsing = asyncio.Lock()  # for one large body at a time: parsing makes it fifty times as large


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    job: dict[str, Any]
    batches: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MICROBATCHES)]


_decode = msgspec.json.Decoder(_Body).decode


async def parse(content_type: str, body: bytes) -> PlanRequest:
    """Parses a body. Raises ServiceError, which names the field."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in (JSON, MSGPACK):
        raise ServiceError("media-type", f"Content-Type is {media_type or 'missing'}")
    decode = _from_json if media_type == JSON else _from_msgpack
    is_large = len(body) > _LARGE
    async with _parsing if is_large else nullcontext():
        try:
            return await asyncio.to_thread(_without_gc(decode) if is_large else decode, body)
        except ConfigError as error:
            raise ServiceError("invalid", str(error), field=error.field) from None
        except CapacityError as error:
            raise ServiceError("refused", str(error)) from None
        except ApportionError as error:
            raise ServiceError("invalid", str(error), field="body") from None


def _without_gc(decode: Callable[[bytes], PlanRequest]) -> Callable[[bytes], PlanRequest]:
    """Disables garbage collection while parsing, since it would rescan a million new lists again and again."""

    def decode_without_gc(body: bytes) -> PlanRequest:
        gc.disable()
        try:
            return decode(body)
        finally:
            gc.enable()

    return decode_without_gc


def _request(job: Job, batches: tuple[Batch, ...]) -> PlanRequest:
    """Encodes a request. Raises ConfigError, CapacityError."""
    job.check(batches)
    return PlanRequest(job.request_key(batches), encode_request(job, batches), job.digest, job.ranks)


def _from_msgpack(body: bytes) -> PlanRequest:
    return _request(*decode_request(body))


def _from_json(body: bytes) -> PlanRequest:
    try:
        data = _decode(body)
    except msgspec.ValidationError as error:
        rule, _, position = str(error).partition(" - at `$")
        field = position.strip(".`") or "body"
        raise ConfigError(
            field, "...", rule, 'send {"job": {...}, "batches": [{"lengths": [...]}]}'
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        start = body[:64].decode(errors="replace")
        raise ConfigError("body", start, f"is not JSON: {error}", "send an object") from None
    job = Job.from_data(_with_recipe(data.job))
    return _request(job, tuple(Batch.from_data(batch) for batch in data.batches))


def _with_recipe(job: Any) -> Any:
    """The data of a job; a recipe that is given by name is resolved."""
    policy = job.get("policy") if isinstance(job, Mapping) else None
    if not isinstance(policy, Mapping) or not isinstance(policy.get("recipe"), str):
        return job
    return {**job, "policy": {**policy, "recipe": find_recipe(policy["recipe"]).to_data()}}
