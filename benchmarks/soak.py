"""The hard cases of the service's tests, at full length.

    python benchmarks/soak.py list
    python benchmarks/soak.py all | CASE ... [--seeds N] [--json]

A case is a function of tests/service that takes a seed and returns its figures; it raises where a promise does not
hold. `make test` runs the same functions with few seeds. Prints one JSON object a case, or a line for people; the exit
status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """function: `module:name` of the tests, seed -> figures. seeds: how many of them in full."""

    function: str
    seeds: int
    summary: str

    def run(self, seed: int) -> Figures:
        module, name = self.function.split(":")
        found: Callable[..., Figures | None] = getattr(import_module(f"tests.{module}"), name)
        if "folder" not in signature(found).parameters:
            return found(seed) or {}
        with tempfile.TemporaryDirectory() as folder:
            return found(seed, folder=Path(folder)) or {}


CASES = {
    "streams": Case("service.load:streams", 1, "256 clients x 200 iterations: in order, and how late"),
    "crowd": Case("service.load:crowd", 1, "16 jobs x 64 ranks, 1,024 streams at once"),
    "hot-plan": Case("service.load:hot", 1, "GET of one plan by 64 keep-alive connections of wrk"),
    "never-reading": Case(
        "service.load:never_reading", 1, "50 clients that never read: the server's memory, the others"
    ),
    "overload": Case("service.load:overload", 1, "many more submits than workers can plan"),
    "long-run": Case("service.load:long_run", 1, "10,000 iterations: the server's memory and descriptors"),
    "server-kills": Case(
        "service.load:server_kills", 20, "SIGKILL of the whole server, clients go on by themselves"
    ),
    "drain": Case("service.load:drain", 3, "SIGTERM while much is queued"),
    "commit-points": Case(
        "service.engine_kills:case", 100, "SIGKILL of the server before or after each commit"
    ),
    "engine-chaos": Case(
        "service.engine_chaos:case", 20, "random requests, faults and epochs against the engine"
    ),
    "engine-long": Case(
        "service.engine_soak:case", 1, "10,000 iterations through the engine: memory and descriptors"
    ),
    "worker-kills": Case("service.worker_cases:killed_workers", 1, "SIGKILL of a worker every 2 s for 60 s"),
    "zygote-kills": Case("service.worker_cases:killed_zygotes", 3, "SIGKILL of what workers are forked from"),
    "orphans": Case(
        "service.worker_cases:killed_server", 3, "SIGKILL of the server leaves no process behind"
    ),
    "worker-long": Case("service.worker_cases:long_run", 1, "1,000 tasks: descriptors and memory of workers"),
    "ray-nodes": Case("service.ray_cases:joined", 3, "a machine joins Ray during a run and leaves it"),
    "ray-kills": Case("service.ray_cases:killed_ray", 3, "a part of Ray is killed during a run"),
    "network": Case("service.faulty_proxy:case", 100, "latency, slices, cuts within frames, resets"),
    "network-server": Case("service.faulty_proxy:server_case", 20, "the same in front of the real server"),
    "frame-fuzz": Case("service.test_frames:case", 1, "100,000 mutated streams of frames: typed errors only"),
    "attacks": Case("service.attacks:case", 1, "users who are not kind: what others notice, memory, SIGTERM"),
    "request-fuzz": Case(
        "service.request_fuzz:case", 1, "100,000 requests that break the schema: no 5xx but 503, no pause"
    ),
    "month": Case(
        "service.month:case",
        1,
        "300,000 iterations of jobs made, run and deleted: nothing grows, quick restart",
    ),
    "standby": Case(
        "service.standby:case",
        3,
        "two servers over one Redis: 10 leaders killed, stopped, ended; 5 s at most",
    ),
    "file-flips": Case(
        "service.file_flips:case", 100, "10,000 bits of a server's folder: plans as before, or typed errors"
    ),
    "pack-fuzz": Case("service.pack_fuzz:case", 340, "102,000 changed packs: typed errors only"),
    "assignment-fuzz": Case(
        "planner.iteration.test_assignment:hostile_assignment",
        10_000,
        "changed assignments: typed errors only",
    ),
    "full-disk": Case(
        "service.full_disk:case", 1, "a disk without a free byte: served, told, deleted from (root)"
    ),
    "store-kills": Case("service.store_kills:case", 100, "SIGKILL within every step of a write to a folder"),
    "redis-kills": Case("service.store_redis_kills:case", 12, "Redis is killed and started again"),
    "schemathesis": Case(
        "service.test_schemathesis:soak", 1, "the OpenAPI document against the server, all checks"
    ),
    "precompute-kills": Case(
        "service.test_precompute_kills:case",
        1,
        "precompute of 1,000 iterations x 64 ranks, killed 20 times and resumed: the same bytes as undisturbed",
    ),
    "precompute-flat": Case(
        "service.test_precompute_flat:case",
        1,
        "precompute of 20,000 iterations: memory is that of the first 2,000",
    ),
}


def results(names: Sequence[str], seeds: int | None) -> Iterator[dict[str, Any]]:
    """One record a case, as each is done; it stops at the first seed that fails."""
    for name in names:
        case, began = CASES[name], time.monotonic()
        figures, error = [], None
        for seed in range(case.seeds if seeds is None else seeds):
            try:
                found = case.run(seed)
                figures.append({"seed": seed, **(found if isinstance(found, Mapping) else {"result": found})})
            except Exception:
                error = traceback.format_exc()
                break
        seconds = round(time.monotonic() - began, 1)
        yield {"case": name, "ok": error is None, "seconds": seconds, "error": error, "figures": figures}


def line(record: Mapping[str, Any]) -> str:
    verdict = "ok" if record["ok"] else f"FAILED\n{record['error']}"
    figures = record["figures"]
    few = figures if len(figures) <= 8 else [*figures[:3], figures[-1]]
    shown = "".join(f"\n    {json.dumps(each)}" for each in few)
    return f"{record['case']:<24}{record['seconds']:>8.1f} s  {verdict}{shown}"


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=["list", "all", *CASES], metavar="list|all|CASE")
    parser.add_argument("--seeds", type=int, help="default: what each case says")
    parser.add_argument("--json", action="store_true", help="one JSON object a case on stdout")
    given = parser.parse_args(args)
    if "list" in given.cases:
        for name, case in CASES.items():
            print(f"{name:<24}{case.seeds:>4} seeds  {case.summary}")
        return 0
    failed = False
    for record in results(list(CASES) if "all" in given.cases else given.cases, given.seeds):
        print(json.dumps(record) if given.json else line(record), flush=True)
        failed |= not record["ok"]
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are not installed
    sys.exit(main())
