"""The demo: four processes train under plans that a service streams to them, one process trains without, and the losses
agree.

    document lengths ──sample──► steps ──┬► 4 gloo processes, each with a PlannedLoader ──► losses ┐
                                         │        │ batches        ▲ plans, step by step           │
                                         │        ▼                │                               │
                                         │      the planning service                               │
                                         └► the same model in one process, plain attention ──► losses ┴─► compare

Every process is told where the service is, and reads its own rows of tokens and labels. Afterwards all is planned
again here: the plans must be the ones that the processes ran, and pass the verifier.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from apportion.ir.errors import ConfigError
from apportion.trainer.demo.results import Outcome, broken, costs_of, plan_here, record, show
from apportion.trainer.demo.training import train_plain, train_planned, watched
from apportion.trainer.demo.workload import steps as training_steps


def run(lengths: Path | None = None, steps: int = 20, as_json: bool = False) -> int:
    """Runs the demo and prints what it found; 0 if losses agree and all checks hold.

    lengths: a workload file of real document lengths; those in the repository's examples by default."""
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1", "give a positive number")
    begin = time.perf_counter()
    data = training_steps(steps, lengths)
    with Progress(console=Console(stderr=as_json)) as progress:
        ran, service = train_planned(data, progress)
        plain = watched(progress, "train in one process, plain", steps, train_plain(data))
        planned = watched(progress, "plan again here, and verify", steps, plan_here(data))
    failures = [text for i, own in enumerate(planned) for text in broken(i, own.plan, ran[i].plans)]
    losses = [own.loss for own in ran]
    outcome = Outcome(losses, plain, costs_of(data, planned), service, failures, time.perf_counter() - begin)
    print(json.dumps(record(outcome))) if as_json else show(outcome)
    return 0 if outcome.ok else 1
