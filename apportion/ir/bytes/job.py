"""The request that all iterations of a training run share, and the request for one iteration's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from apportion.ir.bytes import wire
from apportion.ir.bytes.sequences import MAX_MICROBATCHES
from apportion.ir.errors import CapacityError, ConfigError, DecodeError
from apportion.ir.fields import integer, keep
from apportion.ir.hashing import digest
from apportion.ir.isa import VERSION
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.plan.plain import request_data
from apportion.ir.plan.tables import Request
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.structs import check, mapping_of, to_data, values

FORMAT = "apportion.request"


@dataclass(frozen=True)
class Job:
    """The planning request of a training run.

    tokens_per_rank: in a microbatch. microbatches: in an iteration; a recipe with a pack step distributes the samples
    of an iteration over them. hardware: for recipes that compare predicted times; None is the built-in H100. Raises
    ConfigError.
    """

    cluster: Cluster
    model: Model
    policy: Policy
    tokens_per_rank: int
    microbatches: Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)] = 1
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", Hardware.named(self.hardware))
        check(self, "job")
        self.cluster.check_ranks()
        keep(self, "job.tokens_per_rank", integer, 1, MAX_TOKENS // self.cluster.ranks)

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @property
    def tokens(self) -> int:
        """The capacity of a microbatch in tokens, over all ranks."""
        return self.ranks * self.tokens_per_rank

    @property
    def packs(self) -> bool:
        """True if the recipe distributes the samples of an iteration over its microbatches."""
        return self.policy.recipe.step("pack") is not None

    @staticmethod
    def from_data(data: Any) -> Job:
        """Builds a job from plain data: a mapping of the fields above, the first four required. Raises ConfigError."""
        fields = dict(mapping_of(Job, "job", data))
        hardware = fields.pop("hardware", None)
        return Job(**values(Job, "job", fields), hardware=None if hardware is None else _hardware(hardware))

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return to_data(self)

    @cached_property
    def digest(self) -> bytes:
        """32-byte digest of all fields that plans depend on."""
        return digest(wire.encode_section([FORMAT, self._plan_inputs()]))

    def _plan_inputs(self) -> dict[str, Any]:
        data = self.to_data() | {"hardware": None if self.hardware is None else self.hardware.digest()}
        if not self.packs:  # without a pack step, only the batches determine the work
            data |= {"tokens_per_rank": None, "microbatches": None}
        return data

    def policy_for(self, sequences: int) -> Policy:
        """The policy for an iteration of `sequences` sequences: parameters of a pack step come from the job."""
        step = self.policy.recipe.step("pack")
        if step is None:
            return self.policy
        count = min(self.microbatches, sequences)
        params = {**step.params, "microbatches": count, "tokens_per_rank": self.tokens_per_rank}
        steps = self.policy.recipe.to_data()["steps"] | {"pack": {step.name: params}}
        return replace(self.policy, recipe=Recipe(self.policy.recipe.name, steps))

    def request_digest(self, batch: Batch, sequences: int, token_cap: int | None) -> bytes:
        """32-byte digest of the request stored in a microbatch's plan. sequences: number of sequences in the iteration.
        token_cap: the cap that the plan records, used if the job sets none."""
        policy = self.policy_for(sequences)
        if policy.token_cap is None:
            policy = replace(policy, token_cap=token_cap)
        return digest(
            wire.encode_section(
                request_data(Request(batch, self.cluster, self.model, policy, self._hardware_digest))
            )
        )

    @cached_property
    def _hardware_digest(self) -> str:
        return "" if self.hardware is None else self.hardware.digest()

    def request_key(self, batches: Sequence[Batch]) -> bytes:
        """32 bytes, the content address of an iteration's request: equal requests have equal keys, in every release."""
        return digest(self.digest + wire.encode_section([batch.to_data() for batch in batches]))

    def check(self, batches: Sequence[Batch]) -> None:
        """Raises ConfigError for a wrong number of batches, CapacityError if one is too large."""
        limit = 1 if self.packs else self.microbatches
        if not 1 <= len(batches) <= limit:
            rule, remedy = "one per microbatch", f"give the job microbatches={len(batches)}"
            if self.packs:
                rule, remedy = "the recipe packs all sequences of the iteration itself", "pass them as one"
            raise ConfigError("batches", f"{len(batches)} batches", f"must be 1 to {limit}: {rule}", remedy)
        capacity = self.tokens * (self.microbatches if self.packs else 1)
        for i, batch in enumerate(batches):
            if batch.tokens > capacity:
                raise CapacityError(
                    f"batches[{i}] has {batch.tokens} tokens; the job's {self.ranks} ranks hold {capacity} "
                    f"({self.tokens_per_rank} each): raise tokens_per_rank or send fewer sequences"
                )


def _hardware(data: Any) -> Hardware:
    """Built-in hardware by name, other hardware from its data: a request from outside never names a file."""
    if isinstance(data, str) and data not in Hardware.builtin():
        rule = "is not built-in hardware"
        remedy = f"write one of {', '.join(Hardware.builtin())}, or the full hardware data"
        raise ConfigError("job.hardware", data, rule, remedy)
    return Hardware.load(data) if isinstance(data, str) else Hardware.from_data(data)


class _RequestWire(wire.Version):
    job: bytes
    batches: Annotated[list[bytes], Meta(max_length=MAX_MICROBATCHES)]


_decode_data = msgspec.msgpack.Decoder(dict[str, Any]).decode


def encode_request(job: Job, batches: Sequence[Batch]) -> bytes:
    """Encodes the request for an iteration's plan: equal requests give equal bytes."""
    sections = [wire.encode_section(batch.to_data()) for batch in batches]
    return wire.encode_struct(_RequestWire(FORMAT, VERSION, wire.encode_section(job.to_data()), sections))


def decode_request(data: bytes) -> tuple[Job, tuple[Batch, ...]]:
    """Decodes the job and the batches. Raises DecodeError, VersionError."""
    envelope = wire.read_envelope(data, _RequestWire, "iteration request", FORMAT)
    try:
        job = Job.from_data(_section(envelope.job, envelope.version))
        batches = tuple(Batch.from_data(_section(batch, envelope.version)) for batch in envelope.batches)
        job.check(batches)
    except (ConfigError, CapacityError) as error:
        raise DecodeError(f"iteration request: {error}") from None
    return job, batches


def _section(data: bytes, version: tuple[int, int]) -> Any:
    return wire.read_section(_decode_data, data, "request", version)
