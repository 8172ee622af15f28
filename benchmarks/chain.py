"""The whole chain on gloo: profiles this machine, forecasts steps of the demo's model, trains it, and compares.

    python -m benchmarks.chain [--recipes fcp,ring] [--batches 3] [--rounds 12] [--hardware mine.json] [--json]

`apportion profile` runs under torchrun, one process per rank, with the sizes of the demo's model; each recipe's step of
each batch is forecast from that profile; then the same number of processes train the model under the same plans: all
steps in turn, round after round, so that other load affects all equally; the best round counts, as in the profile.
Three clocks per step, each read on the slowest rank:

    wall_s      wall time
    measured_s  wall time less the rank's own wait for a processor (run-queue delay, which Linux counts per thread);
                still contains the waits of its peers, once per round of messages
    cpu_s       processor time of the rank, without any waiting, even for messages

On an idle machine the first two are equal, and the third is lower by the exposed communication. On a busy machine, the
time on an idle one lies between `cpu_s` and `measured_s`. Each rank needs a core. For each of these
two clocks the verdict counts the forecasts within `WITHIN` of it; the exit code is 1 unless all are within `WITHIN` of
`measured_s`. The output includes the load average, to which this benchmark's two ranks contribute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import apportion as ap
from apportion.cli.environment import machine, versions
from apportion.demo import workload
from apportion.demo.train import VOCABULARY, Trainer
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.hardware import Hardware
from apportion.planner.forecast.result import ForecastRow
from apportion.trainer.step.attention import Communicator, PlanHandle
from apportion.trainer.step.loss import IGNORED

Floats = NDArray[np.float64]

RANKS = 2
BATCHES = 3
ROUNDS = 12
WITHIN = 0.25
RECIPES = ("fcp", "ring", "allgather", "ulysses", "hybrid_dp", "wlb")
#: the demo's training: gradients are summed once per step, without overlap; no recomputation
TRAINING = ap.Training(
    vocab=VOCABULARY, sharding="ddp", recompute="none", overlap=False, loss_tokens=workload.TOKENS
)


@dataclass(frozen=True)
class Case:
    """A recipe's step on one batch: its plan, and the forecast seconds of each part."""

    recipe: str
    batch: int
    plan: Plan
    parts_s: dict[str, float]


class Rows(NamedTuple):
    """One rank's rows of a step."""

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    valid_tokens: int
    handle: PlanHandle


# --- profile


def profile(folder: Path) -> Hardware:
    """Profiles this machine with `apportion profile`, one process per rank."""
    model, output = folder / "model.json", folder / "hardware.json"
    model.write_text(json.dumps(workload.MODEL.to_data()))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("-m", "apportion", "profile", "--quick", "--model", str(model)),
        *("--tokens", str(workload.TOKENS // RANKS), "--output", str(output)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return Hardware.load(output)


# --- forecast


def cases(recipes: Sequence[str], batches: int, hardware: Hardware) -> list[Case]:
    cluster, model = hardware.cluster(1, RANKS), workload.MODEL
    result = []
    for number, batch in enumerate(map(workload.batch_of, workload.documents(batches))):
        forms = ap.recipe_parallelisms(recipes)
        rows = ap.forecast([batch], cluster, model, forms, TRAINING, hardware=hardware).rows
        result += [_case(row, number, batch, hardware) for row in rows]
    return result


def _case(row: ForecastRow, number: int, batch: ap.Batch, hardware: Hardware) -> Case:
    if row.reason is not None:
        raise SystemExit(f"{row.parallelism}, batch {number}: {row.reason}")
    recipe = row.parallelism.recipe
    policy = ap.Policy(recipe)
    plan = ap.plan(batch, hardware.cluster(1, RANKS), workload.MODEL, policy=policy, hardware=hardware)
    return Case(recipe.name, number, plan, row.parts())


# --- train


def train(measured_cases: Sequence[Case], rounds: int) -> Floats:
    """Trains; returns float64 [rounds, cases, ranks, 3], the times of `_step`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save([case.plan.encode() for case in measured_cases], Path(folder) / "plans")
        spawn(_work, (folder, rounds), RANKS)
        times = [np.load(Path(folder) / f"{rank}.npy") for rank in range(RANKS)]
    return np.stack(times, axis=2)


def _work(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", (Path(folder) / "store").as_uri(), rank=rank, world_size=RANKS)
    communicator = Communicator()
    plans = [Plan.decode(encoded) for encoded in torch.load(Path(folder) / "plans")]
    data = workload.documents(BATCHES)
    texts = {workload.batch_of(step).lengths.tobytes(): np.concatenate(step) for step in data}
    batches = [_rows(plan, texts[plan.request.batch.lengths.tobytes()], communicator) for plan in plans]
    trainer = Trainer()
    times = [[_step(trainer, rows) for rows in batches] for _ in range(rounds + 1)]
    np.save(Path(folder) / f"{rank}.npy", np.array(times[1:]))
    dist.barrier()
    dist.destroy_process_group()


def _rows(plan: Plan, text: NDArray[np.uint8], communicator: Communicator) -> Rows:
    piece, batch = plan.for_rank(communicator.rank), plan.request.batch
    home = torch.from_numpy(piece.layout(piece.header.home_layout).tokens(0))
    ids, target = torch.from_numpy(text.astype(np.int64)), torch.from_numpy(batch.labels())
    labels = torch.where(target >= 0, ids[target.clamp(min=0)], IGNORED)
    positions = torch.from_numpy(batch.positions())
    return Rows(
        ids[home], positions[home], labels[home], batch.labelled_tokens, PlanHandle(piece, communicator)
    )


def _step(trainer: Trainer, rows: Rows) -> tuple[float, ...]:
    """Runs a step, started by all ranks together; returns its wall seconds, and the seconds for which the thread waited
    for a processor and for which it ran."""
    dist.barrier()
    start = time.perf_counter(), _delay_s(), time.thread_time()
    trainer.optimizer.zero_grad()
    attention = partial(ap.planned_attention, handle=rows.handle)
    logits = trainer.model(rows.tokens, rows.position_ids, attention)
    ap.normalised_loss(logits, rows.labels, rows.valid_tokens).backward()
    _sum_gradients(trainer.model)
    trainer.optimizer.step()
    end = time.perf_counter(), _delay_s(), time.thread_time()
    return tuple(after - before for before, after in zip(start, end, strict=True))


def _sum_gradients(model: torch.nn.Module) -> None:
    """Sums gradients in one message, as forecasts assume."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _delay_s() -> float:
    """The seconds for which this thread was ready but had no processor; 0 if the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


# --- compare


def compare_times(measured_cases: Sequence[Case], times: Floats) -> list[dict[str, Any]]:
    """One row per case."""
    seconds = (times[..., 0] - times[..., 1]).max(axis=-1)  # [rounds, cases]
    wall, cpu = (times[..., clock].max(axis=-1) for clock in (0, 2))
    rows = []
    for index, case in enumerate(measured_cases):
        measured, forecast = float(seconds[:, index].min()), sum(case.parts_s.values())
        computed = min(float(cpu[:, index].min()), measured)
        rows.append(
            {
                "recipe": case.recipe,
                "batch": case.batch,
                "forecast_s": round(forecast, 5),
                "measured_s": round(measured, 5),
                "median_s": round(float(np.median(seconds[:, index])), 5),
                "wall_s": round(float(wall[:, index].min()), 5),
                "cpu_s": round(computed, 5),
                "ratio": round(forecast / measured, 3),
                "ratio_cpu": round(forecast / computed, 3),
                "parts_s": {name: round(part, 6) for name, part in case.parts_s.items() if part},
            }
        )
    return rows


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of forecasts within `WITHIN` of the measured and of the processor time. `ok` if all are close to the
    measured time; `busy` if all are close only to the processor time (machine too busy to decide); else `missed`."""
    measured, computed = (
        sum(abs(row[ratio] - 1) <= WITHIN for row in rows) for ratio in ("ratio", "ratio_cpu")
    )
    status = "ok" if measured == len(rows) else "busy" if computed == len(rows) else "missed"
    return {"verdict": status, "within_of_measured": measured, "within_of_cpu": computed, "of": len(rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Profile, forecast, train, compare.")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--batches", type=int, default=BATCHES, choices=range(1, BATCHES + 1))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hardware", type=Path, help="a profile; default: measure one first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        hardware = Hardware.load(options.hardware) if options.hardware else profile(Path(folder))
    measured_cases = cases(options.recipes.split(","), options.batches, hardware)
    load = [os.getloadavg()]
    rows = compare_times(measured_cases, train(measured_cases, options.rounds))
    load.append(os.getloadavg())
    record = {
        "machine": machine(),
        "versions": versions(),
        "date": date.today().isoformat(),
        "ranks": RANKS,
        "tokens": workload.TOKENS,
        "rounds": options.rounds,
        "within": WITHIN,
        **verdict(rows),
        "load_average": [round(minute, 2) for minute, *_ in load],  # over a minute, before and after training
        "figures": {name: figure.value for name, figure in hardware.figures().items()},
        "window_us": {"forward": hardware.forward.window_us, "backward": hardware.backward.window_us},
        "rows": rows,
    }
    print(json.dumps(record, indent=1)) if options.json else _show(record)
    return 0 if record["verdict"] == "ok" else 1


def _show(record: dict[str, Any]) -> None:
    table = Table(title="seconds of a step", title_justify="left")
    for name in ("recipe", "batch", "forecast", "measured", "computed", "over measured", "over computed"):
        table.add_column(name, justify="right")
    for row in record["rows"]:
        figures = [f"{row[name]:.4f}" for name in ("forecast_s", "measured_s", "cpu_s")]
        figures += [f"{row[name]:.2f}" for name in ("ratio", "ratio_cpu")]
        table.add_row(row["recipe"], str(row["batch"]), *figures)
    Console().print(table)
    counts = f"{record['within_of_measured']} of {record['of']} within {WITHIN:.0%} of the measured time"
    note = f"{record['within_of_cpu']} of the computed time; load {' to '.join(map(str, record['load_average']))}"
    Console().print(f"{record['verdict']}: {counts}, {note}")


if __name__ == "__main__":
    sys.exit(main())
