"""The JSON of the control plane. What a struct says here is what /openapi.json says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from apportion.ir.bytes.sequences import MAX_MICROBATCHES
from apportion.service.http.auth import KEY
from apportion.service.protocol import TRAIN, JobSummary

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$"
KEY_ID = r"^[0-9a-f]{16}$"
RUN = r"^[A-Za-z0-9_.-]{1,64}$"
#: the largest numbers in paths and queries
MAX_ITERATION, MAX_EPOCH, MAX_RANK, MAX_WINDOW = 10**15 - 1, 10**8 - 1, 10**5 - 1, 1 << 16


def _reference(name: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"$ref": f"#/components/schemas/{name}"})


Spec = Annotated[dict[str, Any], _reference("Job")]
BatchData = Annotated[dict[str, Any], _reference("Batch")]
State = Annotated[
    str, msgspec.Meta(extra_json_schema={"enum": ["queued", "planning", "ready", "refused", "quarantined"]})
]
Lookahead = Annotated[
    int, msgspec.Meta(ge=1, le=4096, description="iterations that are planned before ranks ask for them")
]


class NewJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job to create. Who gives a key may ask again: the same name, job and key are the same job."""

    name: Annotated[
        str, msgspec.Meta(pattern=NAME, description="letters, digits, `_`, `-`, `.`; no dot first")
    ]
    job: Spec
    lookahead: Lookahead = 8
    key: (
        Annotated[str, msgspec.Meta(pattern=KEY, description="of the job; a random one by default")] | None
    ) = None


class CreatedJob(msgspec.Struct, frozen=True):
    """A job and its key, which is not told again."""

    name: str
    key: str
    url: Annotated[str, msgspec.Meta(description="what `PlannedLoader(source=...)` takes")]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A further key of a job. role: `submit` opens what the job's first key opens, `read` fetches plans alone."""

    role: Literal["submit", "read"] = "submit"
    key: Annotated[str, msgspec.Meta(pattern=KEY, description="a random one by default")] | None = None


class KeyReply(msgspec.Struct, frozen=True):
    """A key of a job. `key` is told where it was made, and not again."""

    id: Annotated[str, msgspec.Meta(pattern=KEY_ID)]
    role: Literal["submit", "read"]
    key: str | None = None


class KeysReply(msgspec.Struct, frozen=True):
    """All keys of a job."""

    keys: list[KeyReply]


class JobReply(JobSummary, frozen=True):
    """A job. `epoch` is the newest, of any stream, 0 before the first; `streams` has of each the one that goes on."""

    job: Spec


class JobsReply(msgspec.Struct, frozen=True):
    """All jobs, by name."""

    jobs: list[JobReply]


class NewEpoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An epoch to begin: equal runs of a stream are one epoch, so every rank may begin it."""

    run: Annotated[str, msgspec.Meta(pattern=RUN, description="names one pass of one incarnation of the run")]
    stream: Annotated[
        str,
        msgspec.Meta(
            pattern=RUN, description="of the job's passes; an epoch ends the one before of its stream"
        ),
    ] = TRAIN


class BegunEpoch(msgspec.Struct, frozen=True):
    """The epoch of a stream's run."""

    epoch: int
    stream: str
    run: str


class NewIteration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an iteration trains on: one batch a microbatch, or one with all sequences where the recipe packs."""

    batches: Annotated[list[BatchData], msgspec.Meta(min_length=1, max_length=MAX_MICROBATCHES)]


class IterationReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """An iteration. `id` of the plan in hex, once it is ready; `detail` says why there will be none. planned_ms: at the
    worker; ready_at: when ranks could have it, seconds since 1970; neither is known of an earlier server's plans."""

    iteration: int
    state: State
    id: str | None = None
    detail: str | None = None
    field: str | None = None
    planned_ms: float | None = None
    ready_at: float | None = None


class Waiting(msgspec.Struct, frozen=True):
    """The plan is not there yet: ask again."""

    iteration: int
    state: Literal["waiting"] = "waiting"


class Health(msgspec.Struct, frozen=True):
    """Whether the server is alive, and ready; `reason` why not."""

    status: Literal["ok", "not ready"]
    reason: str = ""
