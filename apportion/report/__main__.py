"""Renders the report page of a request: `python -m apportion.report ID < request > page.html`.

Reads an encoded request (`ir.bytes.job.encode_request`) from stdin and plans it. ID: 64 hex digits, the id of the plan
that ranks received. Exit status 3: failed, for the reason in the last line of stderr.
"""

from __future__ import annotations

import sys

from apportion.ir.bytes.job import decode_request
from apportion.ir.errors import ApportionError, ConfigError
from apportion.planner.iteration.jobs import plan_job
from apportion.report.pages import report_html


def main(id: str) -> int:
    """Returns the exit status."""
    try:
        job, batches = decode_request(sys.stdin.buffer.read())
        plan = plan_job(job, batches, verify=False)
        if plan.id.hex() != id:
            rule = f"is another release's plan; this release makes {plan.id.hex()[:16]} from the same request"
            raise ConfigError("id", id[:16], rule, "start a server of that release")
        names = [f"microbatch {number}" for number in range(len(plan.plans))]
        page = report_html(list(zip(names, plan.plans, strict=True)), job.hardware)
    except ApportionError as error:
        print(error, file=sys.stderr)
        return 3
    sys.stdout.buffer.write(page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
