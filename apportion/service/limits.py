"""How much a server takes, keeps and waits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from apportion.ir.fields import integer, number


@dataclass(frozen=True)
class Limits:
    """Names ending in `_bytes` are bytes, in `_s` seconds; the others are counts. Raises ConfigError."""

    # what one request may ask for
    body_bytes: int = 16 << 20
    sequences: int = 1 << 20  # of an iteration
    tokens: int = 1 << 30  # of an iteration
    ranks: int = 16384
    lookahead: int = 256
    # what may be under way
    jobs: int = 256
    job_streams: int = 64  # of a job
    pending: int = 256  # iterations of a job that no rank has been given yet, its streams have equal shares
    queue_total: int = 4096  # iterations of all jobs that are not planned yet
    queue_bytes: int = 1 << 30  # of the requests of these
    bodies_bytes: int = 256 << 20  # of requests that are being received, of all clients
    streams: int = 4096  # of frames, to ranks of all jobs
    # what is kept
    keep: int = 1024  # iterations of a stream behind its front
    epochs: int = 1024  # of a job, whose run is still known
    store_bytes: int = 16 << 30  # of all packs and records; what an iteration needs is kept in any case
    store_packs: int = 1 << 18
    store_s: float = (
        30 * 86400.0
    )  # that a pack is kept after it was made, where no iteration needs it; 0 for ever
    job_s: float = 0.0  # that a job is kept which nobody asks anything of, 0 for ever
    cache_bytes: int = 256 << 20
    # how long
    wait_s: float = 60.0  # of a reader, before it is told "not yet"
    deadline_s: float = 60.0  # of a worker over one iteration
    drain_s: float = 10.0
    heartbeat_s: float = 5.0
    stall_s: float = 120.0  # a stream whose client takes nothing

    def __post_init__(self) -> None:
        for item in fields(self):
            check = number if item.name.endswith("_s") else integer
            object.__setattr__(self, item.name, check(f"limits.{item.name}", getattr(self, item.name)))
