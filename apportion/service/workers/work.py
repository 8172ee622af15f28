"""Functions that workers run, from an encoded request to bytes. A refusal is a value, not an exception."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

from apportion.ir.bytes.iteration import encode_slices
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import ApportionError, CapacityError, ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.pack import Pack


class Completion(NamedTuple):
    """The result of a task. seconds: worker time."""

    data: bytes
    seconds: float


class Refusal(NamedTuple):
    """A request that cannot be planned. type: a key of `problems.KINDS`; field: the wrong field."""

    type: str
    detail: str
    field: str | None = None


Work = Callable[[bytes], Completion | Refusal]


def _refuse_errors(make: Callable[[bytes], bytes]) -> Work:
    @wraps(make)
    def work(request: bytes) -> Completion | Refusal:
        start = time.perf_counter()
        try:
            return Completion(make(request), time.perf_counter() - start)
        except MemoryError:
            return Refusal("memory", "planning this request takes more memory than a worker has")
        except ApportionError as error:
            return Refusal("refused", str(error), error.field if isinstance(error, ConfigError) else None)

    return work


@_refuse_errors
def plan_pack(request: bytes) -> bytes:
    """The pack of a request's plan, verified."""
    job, batches = decode_request(request)
    plan = plan_job(job, batches, verify=True)
    return Pack.encode(job.request_key(batches), plan.id, plan.report, request, encode_slices(plan)).data


@_refuse_errors
def plan_file(request: bytes) -> bytes:
    """The verified plan of all ranks: a plan file for a request of one microbatch, else an iteration plan."""
    plan = plan_job(*decode_request(request), verify=True)
    return plan.plans[0].encode() if len(plan.plans) == 1 else plan.encode()


@_refuse_errors
def plan_page(request: bytes) -> bytes:
    """The report page of a request's plan, HTML; rendered in a process that imports only the code for pages."""
    plan = plan_job(*decode_request(request), verify=False)
    command = [sys.executable, "-P", "-m", "apportion.report", plan.id.hex()]
    process = subprocess.run(command, input=request, capture_output=True, check=False)
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines() or [
            "the process printed no error"
        ]
        raise CapacityError(f"no report: {lines[-1]}")
    return process.stdout


def load(request: bytes = b"") -> Completion | Refusal:
    """Imports the modules that most requests need, in a worker that has no request yet."""
    job = Job(Cluster(1, 2), Model(2, 1, 16), Policy(find_recipe("fcp")), 512)
    return plan_pack(encode_request(job, [Batch.from_lengths([700, 300])]))
