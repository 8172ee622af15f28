"""Bodies of requests for plans: JSON that people write, or the canonical msgpack that trainers send."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import ApportionError, CapacityError, ConfigError
from apportion.ir.fields import known
from apportion.ir.request.batch import Batch
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.problems import ServiceError

JSON, MSGPACK = "application/json", "application/msgpack"
_LARGE = 64 << 10
_parsing = asyncio.Lock()  # of large bodies, which become fifty times as large in memory


@dataclass(frozen=True)
class PlanRequest:
    """A request as the engine takes it. key: 32 bytes; data: canonical bytes; job: digest of the job."""

    key: bytes
    data: bytes
    job: bytes
    ranks: int

    @staticmethod
    def of(job: Job, batches: tuple[Batch, ...]) -> PlanRequest:
        """Raises ConfigError, CapacityError."""
        job.check(batches)
        return PlanRequest(job.request_key(batches), encode_request(job, batches), job.digest, job.ranks)


async def parse(content_type: str, body: bytes) -> PlanRequest:
    """Raises ServiceError, which names the field."""
    named = content_type.partition(";")[0].strip().lower()
    if named not in (JSON, MSGPACK):
        raise ServiceError("media-type", f"Content-Type is {named or 'missing'}")
    read = _from_json if named == JSON else _from_msgpack
    async with _parsing if len(body) > _LARGE else nullcontext():
        try:
            return await asyncio.to_thread(read, body)
        except ConfigError as error:
            raise ServiceError("invalid", str(error), field=error.field) from None
        except CapacityError as error:
            raise ServiceError("refused", str(error)) from None
        except ApportionError as error:
            raise ServiceError("invalid", str(error), field="body") from None


def _from_msgpack(body: bytes) -> PlanRequest:
    return PlanRequest.of(*decode_request(body))


def _from_json(body: bytes) -> PlanRequest:
    try:
        data = known("request", msgspec.json.decode(body), ("job", "batches"), ("job", "batches"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            "body", body[:64].decode(errors="replace"), f"is no JSON: {error}", "send an object"
        ) from None
    if not isinstance(data["batches"], list):
        raise ConfigError(
            "batches", data["batches"], "must be a list of batches", 'write [{"lengths": [...]}]'
        )
    job = Job.from_data(_with_recipe(data["job"]))
    return PlanRequest.of(job, tuple(Batch.from_data(batch) for batch in data["batches"]))


def _with_recipe(job: Any) -> Any:
    """The data of a job, whose recipe may be a name."""
    policy = job.get("policy") if isinstance(job, Mapping) else None
    if not isinstance(policy, Mapping) or not isinstance(policy.get("recipe"), str):
        return job
    return {**job, "policy": {**policy, "recipe": find_recipe(policy["recipe"]).to_data()}}
