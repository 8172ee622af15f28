"""Requests that are planned in milliseconds, identified by a number."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from apportion import Batch, Cluster, Model, Policy
from apportion.ir.bytes.iteration import encode_slices
from apportion.ir.bytes.job import Job, encode_request
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.pack import Pack
from apportion.service.workers import Completion, plan_pack

TOKEN = "token-of-the-tests-0123456789"
RANKS = 4
JOB = Job(Cluster(1, RANKS), Model(4, 2, 16), Policy(find_recipe("fcp")), 512)
MSGPACK = {"content-type": "application/msgpack"}


@dataclass(frozen=True)
class Request:
    """A numbered request of `JOB`."""

    number: int
    job: Job = JOB

    @property
    def batches(self) -> tuple[Batch, ...]:
        return (Batch.from_lengths([700, 100 + self.number]),)

    @property
    def key(self) -> bytes:
        return self.job.request_key(self.batches)

    @property
    def hex(self) -> str:
        return self.key.hex()

    @property
    def data(self) -> bytes:
        return encode_request(self.job, self.batches)

    def slices(self) -> list[bytes]:
        """The slices that ranks must get, planned in this process."""
        return list(encode_slices(plan_job(self.job, self.batches)))

    def pack(self) -> Pack:
        done = plan_pack(self.data)
        assert isinstance(done, Completion)
        return Pack.decode(done.data, self.key)

    def put(self, client: httpx.Client, ahead: int = 0) -> httpx.Response:
        return client.put(f"/v1/plans/{self.hex}?ahead={ahead}", content=self.data, headers=MSGPACK)


def client_of(url: str, token: str | None = TOKEN) -> httpx.Client:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.Client(base_url=url, headers=headers, timeout=60.0)
