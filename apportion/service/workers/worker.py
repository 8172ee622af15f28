"""What a worker does: from a request to the bodies of all ranks."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Callable

from apportion.ir.bytes.iteration import encode_slices
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import ApportionError, CapacityError, ConfigError
from apportion.ir.loops.jit import compiling
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.jobs import Planned, lower_job, plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.workers.pipes import dies_with, receive, send
from apportion.service.workers.tasks import MAX_REPLY, Done, Refused, Reply, Task, encode, read_task

_NO_MEMORY = (
    "planning this batch takes more memory than a worker of the server has (--worker-gb): take larger blocks, fewer "
    "ranks or fewer tokens, or raise --worker-gb"
)


def run(task: Task) -> Done:
    """The task's result. Raises ApportionError."""
    began = time.perf_counter()
    planned = _planned(task)
    bodies = encode_slices(planned.plan)
    ms = (time.perf_counter() - began) * 1e3
    return Done(bodies, planned.assignment, planned.plan.id, ms, compiling.seconds)


def _planned(task: Task) -> Planned:
    if task.kind == "lower":
        return Planned(lower_job(task.payload), None)
    return plan_job(*decode_request(task.payload), verify=task.verify)


def warm() -> None:
    """Does one small task, so that everything is imported and compiled that most tasks need."""
    job = Job(Cluster(1, 2), Model(2, 1, 16), Policy(find_recipe("fcp")), 512)
    run(Task("plan", encode_request(job, [Batch.from_lengths([700, 300])])))


def answer(data: bytes, work: Callable[[Task], Done]) -> bytes:
    """The reply to an encoded task; an error that is nobody's intention goes to stderr as well."""
    try:
        reply = encode(work(read_task(data)))
        return reply if len(reply) <= MAX_REPLY else encode(_too_large(len(reply)))
    except ApportionError as error:
        return encode(refusal(error))
    except MemoryError:
        return encode(refusal(CapacityError(_NO_MEMORY)))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return encode(refusal(error))


def refusal(error: Exception) -> Reply:
    field = error.field if isinstance(error, ConfigError) else None
    return Refused(type(error).__name__, str(error) or repr(error), field)


def _too_large(size: int) -> Reply:
    return refusal(CapacityError(f"the bodies of all ranks take {size} bytes, at most {MAX_REPLY}"))


def serve(line: socket.socket, work: Callable[[Task], Done]) -> None:
    """Answers task after task until the server hangs up; while one is being worked on, that ends the process."""
    while (data := receive(line)) is not None:
        with dies_with(line):
            reply = answer(data, work)
        send(line, reply)
