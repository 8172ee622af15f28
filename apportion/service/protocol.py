"""What server and client of protocol v1 agree on: media types, headers, paths, and what both say of jobs and epochs."""

from __future__ import annotations

import msgspec

from apportion.ir.isa import VERSION

JSON = "application/json"
HTML = "text/html"
TAR = "application/x-tar"
PROBLEM = "application/problem+json"
PLAN = "application/vnd.apportion.iteration"
FRAMES = "application/vnd.apportion.frames"
#: what a client that reads this major version of the format accepts, and what a server sends
PLAN_VERSION = f"{PLAN}; version={VERSION[0]}"
FRAMES_VERSION = f"{FRAMES}; version={VERSION[0]}"
#: of a stream's answer: seconds between heartbeats; a stream silent for three of them is dead
HEARTBEAT = "Apportion-Heartbeat"
HEARTBEAT_S = 5.0
SILENT_HEARTBEATS = 3
#: plan frames after which a stream ends, where the client does not say
WINDOW = 64

#: the stream of a job that is meant where none is named
TRAIN = "train"

JOBS = "/v1/jobs"
EXPORT = "/v1/export"
EPOCHS = "/epochs"


class EpochState(msgspec.Struct, frozen=True):
    """An epoch that goes on. front: 1 + the highest iteration that any rank was given, or the lowest submitted;
    iterations below `floor` are no longer kept; of the `held` ones, `queued` wait for a worker."""

    epoch: int
    stream: str
    run: str
    front: int
    floor: int
    held: int
    queued: int


class JobSummary(msgspec.Struct, frozen=True):
    """A job of a server. epoch: the newest, of any stream, 0 before the first; streams: of each the epoch that goes
    on."""

    name: str
    url: str
    ranks: int
    lookahead: int
    epoch: int
    streams: dict[str, int]


class JobKey(msgspec.Struct, frozen=True):
    """A key of a job. id: for revoking it; role: `submit`, or `read`; key: told where it was made."""

    id: str
    role: str
    key: str | None = None


def job_path(name: str) -> str:
    """Of a job; the paths below follow it."""
    return f"{JOBS}/{name}"


def epoch_path(epoch: int) -> str:
    return f"/epochs/{epoch}"


def iteration_path(epoch: int, iteration: int) -> str:
    return f"/epochs/{epoch}/iterations/{iteration}"


def report_path(epoch: int, iteration: int) -> str:
    return f"/epochs/{epoch}/iterations/{iteration}/report"


def plan_path(epoch: int, iteration: int, rank: int) -> str:
    return f"/epochs/{epoch}/iterations/{iteration}/ranks/{rank}/plan"


def stream_path(epoch: int, rank: int) -> str:
    return f"/epochs/{epoch}/ranks/{rank}/stream"


def etag(body_digest: bytes) -> str:
    """The strong ETag of a body, of its BLAKE2b-256."""
    return f'"{body_digest.hex()}"'
