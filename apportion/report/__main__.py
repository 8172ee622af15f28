"""`python -m apportion.report plan|lower ID`: the report of an iteration, as a server has it made.

Reads from stdin what its plans are made from, an encoded request ("plan") or a compact form ("lower"), and writes the
page to stdout. ID: 64 hex digits, of the plan that ranks were given. Status 3: the last line of stderr says why not.
"""

from __future__ import annotations

import sys

from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.job import decode_request
from apportion.ir.errors import ApportionError, ConfigError
from apportion.ir.request.hardware import Hardware
from apportion.planner.iteration.assignment import decode_assignment
from apportion.planner.iteration.jobs import lower_job, plan_job
from apportion.report.pages import report_html


def main(kind: str, id: str) -> int:
    """The status that the process ends with."""
    try:
        plan, hardware = _plan(kind, sys.stdin.buffer.read())
        if plan.id.hex() != id:
            rule = f"makes {plan.id.hex()[:16]} of the same request: another release planned it"
            raise ConfigError("id", id[:16], rule, "start a server of that release")
        names = [f"microbatch {number}" for number in range(len(plan.plans))]
        page = report_html(list(zip(names, plan.plans, strict=True)), hardware)
    except ApportionError as error:
        print(error, file=sys.stderr)
        return 3
    sys.stdout.buffer.write(page.encode())
    return 0


def _plan(kind: str, payload: bytes) -> tuple[IterationPlan, Hardware | None]:
    """The plans, and what their job runs on."""
    if kind == "lower":
        return lower_job(payload), decode_assignment(payload).job.hardware
    job, batches = decode_request(payload)
    return plan_job(job, batches, verify=False).plan, job.hardware


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
