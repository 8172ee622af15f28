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
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import urllib3
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError, ExecutionError, VerifyError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.request.workload import Workload, read_workload, sample
from apportion.ir.verify import verify
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.client import create_job
from apportion.service.http.child import serving
from apportion.service.tied import tied
from apportion.trainer import demo_rank
from apportion.trainer.baselines import Costs, contiguous, zigzag_ring
from apportion.trainer.decoder import DecoderConfig
from apportion.trainer.demo_rank import KINDS, Documents
from apportion.trainer.loss import IGNORED, normalised_loss
from apportion.trainer.plain import plain_attention

RANKS = 4
TOKENS = 6144
LONG = TOKENS // 2  # of the document that spans all ranks
TOLERANCE = 1e-4
SEED = 0
STALLED_S = 120
STOPPING_S = 5
WIDTH = 110  # of the tables where there is no terminal

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.yaml")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Step:
    """One step's documents, one after another: their lengths and masks, and the text of all."""

    batch: Batch
    text: Bytes

    @property
    def valid_tokens(self) -> int:
        return self.batch.labelled


@dataclass(frozen=True)
class Ran:
    """What the processes did in one step. plans: the id of each one's plan; waited_ms: of each, for plans, in all."""

    loss: float
    plans: tuple[bytes, ...]
    waited_ms: tuple[float, ...]


@dataclass(frozen=True)
class Planned:
    """A step's plan, made here."""

    plan: Plan
    planning_ms: float


@dataclass(frozen=True)
class Service:
    """What the service did. delivered: slices of plans that processes got; planning_ms: mean of an iteration, verifying
    included; waited_ms: the longest that a process waited for all of its plans."""

    delivered: int
    planning_ms: float
    waited_ms: float


@dataclass(frozen=True)
class Outcome:
    """What the demo found; `ok` decides the exit code."""

    planned: list[float]
    plain: list[float]
    costs: dict[str, dict[str, float]]
    service: Service
    broken: list[str]
    seconds: float

    @property
    def difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.planned, self.plain, strict=True))

    @property
    def failures(self) -> list[str]:
        differ = f"losses differ by {self.difference:.1e}, allowed is {TOLERANCE:.0e}"
        return [*self.broken, *([] if self.difference <= TOLERANCE else [differ])]

    @property
    def ok(self) -> bool:
        return not self.failures


def run(lengths: Path | None = None, steps: int = 20, as_json: bool = False) -> int:
    """Runs the demo and prints what it found; 0 if losses agree and all checks hold.

    lengths: a workload file of real document lengths; those in the repository's examples by default."""
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1", "give a positive number")
    begin = time.perf_counter()
    data = _steps(_workload(lengths), _corpus(), steps)
    with Progress(console=Console(stderr=as_json)) as progress:
        ran, service = _train_planned(data, progress)
        plain = _watched(progress, "train in one process, plain", steps, _train_plain(data))
        planned = _watched(progress, "plan again here, and verify", steps, _plan(data))
    failures = [text for i, own in enumerate(planned) for text in _broken(i, own.plan, ran[i].plans)]
    losses = [own.loss for own in ran]
    outcome = Outcome(losses, plain, _costs(data, planned), service, failures, time.perf_counter() - begin)
    print(json.dumps(_record(outcome))) if as_json else _show(outcome)
    return 0 if outcome.ok else 1


def _watched(progress: Progress, title: str, total: int, work: Iterator[Any]) -> list[Any]:
    return list(progress.track(work, total, description=f"{title:<34}"))


# --- input


def _workload(path: Path | None) -> Workload:
    """Document lengths of a file, of the examples, or of the package's own files where there are no examples."""
    default = REPOSITORY / "examples" / "code_lengths.json"
    if path is not None or default.exists():
        return read_workload(path or default)
    sizes = np.array([file.stat().st_size for file in _text_files(PACKAGE)], np.int64)
    sizes = sizes[sizes > 0]
    return Workload(sizes, (None,) * len(sizes))


def _corpus() -> Bytes:
    """The repository's own text, byte by byte; an installed package's where there is no repository."""
    root = REPOSITORY if (REPOSITORY / "pyproject.toml").exists() else PACKAGE
    data = b"\n".join(file.read_bytes() for file in _text_files(root))
    return np.frombuffer(data, np.uint8)


def _text_files(root: Path) -> list[Path]:
    """Sorted; nothing from hidden folders and environments."""
    found = (path for pattern in TEXT_FILES for path in root.rglob(pattern))
    inside = [path for path in found if not _is_foreign(path.relative_to(root))]
    return sorted(path for path in inside if path.is_file())


def _is_foreign(path: Path) -> bool:
    return any(part.startswith(".") or part in ("build", "dist", "site-packages") for part in path.parts)


def _steps(workload: Workload, corpus: Bytes, steps: int) -> list[Step]:
    return [Step(_batch(workload, index), _text(corpus, index)) for index in range(steps)]


def _batch(workload: Workload, index: int) -> Batch:
    """One long document and others drawn from the workload, under two attention kinds."""
    drawn, _ = sample(workload, TOKENS - LONG, TOKENS, SEED + index)
    return Batch.from_lengths([LONG, *drawn.lengths.tolist()], KINDS)


def _text(corpus: Bytes, index: int) -> Bytes:
    at = index * TOKENS % max(1, len(corpus) - TOKENS)
    return np.resize(corpus[at : at + TOKENS], TOKENS)


def _documents(steps: Sequence[Step]) -> Documents:
    lengths = [step.batch.lengths for step in steps]
    counts = np.array([len(own) for own in lengths])
    return Documents(np.concatenate([step.text for step in steps]), np.concatenate(lengths), counts)


def steps(count: int, lengths: Path | None = None) -> list[Step]:
    """The first steps that the demo trains, of a workload file or of the repository's examples."""
    return _steps(_workload(lengths), _corpus(), count)


def model() -> Model:
    """The demo's, as planners know it."""
    config = DecoderConfig()
    return Model(
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="fp32",
        hidden=config.hidden,
        ffn=config.ffn,
        layers={kind: config.kinds.count(kind) for kind in config.kinds},
    )


def _job() -> Job:
    policy = Policy(find_recipe("fcp"), seed=SEED)
    return Job(Cluster(nodes=1, ranks_per_node=RANKS), model(), policy, TOKENS // RANKS)


# --- training


def _train_planned(steps: Sequence[Step], progress: Progress) -> tuple[list[Ran], Service]:
    """What each step came to, each process holding its rows only; plans come from a service that runs as long."""
    with (
        tempfile.TemporaryDirectory() as name,
        _processes() as pipes,
        serving(Path(name) / "service") as server,  # starts while the processes do
    ):
        key = secrets.token_urlsafe(32)
        create_job(server.url, "demo", _job(), key=key).close()
        _documents(steps).save(Path(name))
        begin = demo_rank.Begin(name, f"{server.url}/v1/jobs/demo", key)
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(begin))
        title = f"train on {RANKS} processes, planned"
        ran = _watched(progress, title, len(steps), (_ran(_answers(pipes)) for _ in steps))
        delivered = sum(len(own.plans) for own in ran)
        return ran, Service(delivered, _planning_ms(server.url), max(ran[-1].waited_ms))


def _ran(told: list[demo_rank.Step]) -> Ran:
    return Ran(told[0].loss, tuple(own.plan for own in told), tuple(own.waited_ms for own in told))


def _planning_ms(url: str) -> float:
    """The mean time that the service's workers took for an iteration."""
    text = urllib3.request("GET", f"{url}/metrics").data.decode()
    figures = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    name = "apportion_planning_seconds"
    return 1e3 * float(figures[f"{name}_sum"]) / float(figures[f"{name}_count"])


@contextmanager
def _processes() -> Iterator[list[Connection]]:
    """A pipe to each process; they are gone when the `with` is left, at once where it is left by an error."""
    pipes: list[Connection] = []
    workers: list[subprocess.Popen[bytes]] = []
    patience_s = 0.0
    try:
        for rank in range(RANKS):
            ours, theirs = Pipe()
            pipes.append(ours)
            with theirs:
                workers.append(_process(theirs.fileno(), rank))
        yield pipes
        patience_s = STOPPING_S
    finally:
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(patience_s)
            worker.kill()
            worker.wait()
        for pipe in pipes:
            pipe.close()


def _process(pipe: int, rank: int) -> subprocess.Popen[bytes]:
    arguments = (str(number) for number in (pipe, rank, RANKS))
    command = tied(signal.SIGKILL, "-m", demo_rank.__name__, *arguments)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(pipe,))


def _answers(pipes: list[Connection]) -> list[demo_rank.Step]:
    """What every process told of one step; the first failure wins."""
    told: dict[int, demo_rank.Step] = {}
    while len(told) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in told], STALLED_S)
        if not ready:
            raise ExecutionError(f"demo processes {sorted(set(range(len(pipes))) - set(told))} do not answer")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                told[rank] = _answer(rank, pipe)
    return [told[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection) -> demo_rank.Step:
    try:
        told = msgspec.msgpack.decode(pipe.recv_bytes(), type=demo_rank.Step | demo_rank.Failure)
    except EOFError:
        raise ExecutionError(f"demo process {rank} died") from None
    if isinstance(told, demo_rank.Failure):
        raise ExecutionError(f"demo process {rank} failed:\n{told.text}")
    return told


def _train_plain(steps: Sequence[Step]) -> Iterator[float]:
    """The loss of each step, all tokens in one process."""
    model, optimizer = demo_rank.trainer()
    for step in steps:
        ids = torch.from_numpy(step.text.astype(np.int64))
        target = torch.from_numpy(step.batch.labels())
        labels = torch.where(target >= 0, ids[target.clamp(min=0)], IGNORED)
        positions = torch.from_numpy(step.batch.positions())

        def attention(q: Tensor, k: Tensor, v: Tensor, kind: str, batch: Batch = step.batch) -> Tensor:
            return plain_attention(q, k, v, batch, kind)

        optimizer.zero_grad()
        loss = normalised_loss(model(ids, positions, attention), labels, step.valid_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


# --- result


def _plan(steps: Sequence[Step]) -> Iterator[Planned]:
    for step in steps:
        begin = time.perf_counter()
        made = plan_job(_job(), [step.batch], verify=False)
        yield Planned(made.plan.plans[0], (time.perf_counter() - begin) * 1e3)


def _costs(steps: Sequence[Step], planned: Sequence[Planned]) -> dict[str, dict[str, float]]:
    return {
        "planned (fcp)": _median([_planned_costs(own) for own in planned]),
        "contiguous": _median([_baseline_costs(contiguous, step) for step in steps]),
        "zig-zag ring": _median([_baseline_costs(zigzag_ring, step) for step in steps]),
    }


def _broken(index: int, plan: Plan, ran: tuple[bytes, ...]) -> Iterator[str]:
    """What is wrong with the plan of a step, and with those that the processes ran."""
    try:
        verify(plan)
    except VerifyError as error:
        yield f"step {index}: {error}"
    if set(ran) != {plan.id}:
        yield f"step {index}: the processes ran {sorted(one.hex()[:12] for one in set(ran))}, not {plan.id.hex()[:12]}"
    spans = plan.layout("attention").spans
    holders = np.unique(spans.rank_of_row()[spans["sequence"] == 0])
    if len(holders) != RANKS:
        yield f"step {index}: the long document is on ranks {holders.tolist()} only"


def _planned_costs(planned: Planned) -> dict[str, float]:
    report = planned.plan.report
    imbalance = report["imbalance"]
    costs = Costs(imbalance["compute"], imbalance["tokens"], report["bytes"]["total"], report["slots"])
    largest = report["plan_bytes"]["largest_rank"]
    return asdict(costs) | {"plan_bytes_of_largest_rank": largest, "planning_ms": planned.planning_ms}


def _baseline_costs(baseline: Callable[[Batch, int, Model], Costs], step: Step) -> dict[str, float]:
    return asdict(baseline(step.batch, RANKS, _job().model))


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the steps, so that the first call's compilation does not count as planning."""
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def _record(outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "failures": outcome.failures,
        "steps": len(outcome.planned),
        "ranks": RANKS,
        "tokens": TOKENS,
        "losses": {"planned": outcome.planned, "plain": outcome.plain},
        "largest_difference": outcome.difference,
        "tolerance": TOLERANCE,
        "layouts": outcome.costs,
        "service": asdict(outcome.service),
        "seconds": outcome.seconds,
    }


def _show(outcome: Outcome) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_loss_table(outcome), _cost_table(outcome))
    for failure in outcome.failures:
        console.print(f"[red]failed:[/red] {failure}")
    service = outcome.service
    console.print(
        f"service: {service.delivered} plans delivered, {service.planning_ms:.1f} ms to plan and verify a step, "
        f"{service.waited_ms:.0f} ms waited for them in all by the process that waited longest"
    )
    verdict = "[green]ok[/green]" if outcome.ok else "[red]not ok[/red]"
    console.print(
        f"{verdict}: largest difference of losses {outcome.difference:.1e} (allowed {TOLERANCE:.0e}), "
        f"{len(outcome.planned)} steps of {TOKENS:,} tokens on {RANKS} processes, {outcome.seconds:.0f} s"
    )


def _loss_table(outcome: Outcome) -> Table:
    table = Table(title="loss", title_justify="left")
    for name in ("step", "planned, 4 processes", "plain, 1 process", "difference"):
        table.add_column(name, justify="right")
    last = len(outcome.planned) - 1
    for index, (a, b) in enumerate(zip(outcome.planned, outcome.plain, strict=True)):
        if index % 5 == 0 or index == last:
            table.add_row(str(index), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table


def _cost_table(outcome: Outcome) -> Table:
    table = Table(title="the same batches, median of all steps", title_justify="left")
    table.add_column("", no_wrap=True, min_width=12)  # the names stay whole in 80 columns
    for name in ("compute imbalance", "token imbalance", "bytes moved", "slots", "plan size", "planning"):
        table.add_column(name, justify="right")
    for name, costs in outcome.costs.items():
        table.add_row(
            name,
            f"{100 * costs['compute_imbalance']:.1f} %",
            f"{100 * costs['token_imbalance']:.1f} %",
            f"{costs['bytes_moved'] / 1e6:.2f} MB",
            f"{costs['slots']:.0f}",
            f"{costs['plan_bytes_of_largest_rank'] / 1e3:.1f} KB" if "planning_ms" in costs else "-",
            f"{costs['planning_ms']:.1f} ms" if "planning_ms" in costs else "-",
        )
    return table
