"""The demo: four processes train under plans, one process trains without, and the losses agree.

    document lengths ──sample──► batches ──plan, verify──► plans ──slices──► 4 gloo processes ──► losses ┐
                                     └──► the same model in one process with plain attention ──► losses ┴─► compare

Every process gets its own slice of each plan and its own rows of tokens and labels, nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from apportion.ir import masks
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.codec import Slice
from apportion.ir.errors import ConfigError, ExecutionError, VerifyError
from apportion.ir.model import Model
from apportion.ir.plan import Plan
from apportion.ir.verify import verify
from apportion.ir.workload import Workload, read_workload, sample
from apportion.trainer.attention import Communicator, PlanHandle, planned_attention
from apportion.trainer.baselines import Costs, contiguous, zigzag_ring
from apportion.trainer.decoder import Decoder, DecoderConfig
from apportion.trainer.loader import local_rows
from apportion.trainer.loss import normalised_loss
from apportion.trainer.plain import plain_attention

RANKS = 4
TOKENS = 6144
LONG = TOKENS // 2  # of the document that spans all ranks
WINDOW = 512
TOLERANCE = 1e-4
LEARNING_RATE = 2e-3
SEED = 0
STALLED_S = 120
WIDTH = 110  # of the tables where there is no terminal

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.yaml")

Bytes = NDArray[np.uint8]


class Share(NamedTuple):
    """What one process gets for one step."""

    piece: bytes
    tokens: Any  # [rows] int64 arrays
    labels: Any
    valid_tokens: int


@dataclass(frozen=True)
class Step:
    """One planned batch with its text."""

    batch: Batch
    text: Bytes
    plan: Plan
    planning_ms: float

    @property
    def valid_tokens(self) -> int:
        return int((self.batch.labels() >= 0).sum())

    def share(self, rank: int) -> Share:
        piece = self.plan.for_rank(rank)
        tokens, labels = local_rows(piece, self.batch, self.read)
        return Share(piece.encode(), tokens.numpy(), labels.numpy(), self.valid_tokens)

    def read(self, sequence: int) -> Bytes:
        begin, end = self.batch.starts[sequence : sequence + 2].tolist()
        return self.text[begin:end]


@dataclass(frozen=True)
class Outcome:
    """What the demo found; `ok` decides the exit code."""

    planned: list[float]
    plain: list[float]
    costs: dict[str, dict[str, float]]
    failures: list[str]
    seconds: float

    @property
    def difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.planned, self.plain, strict=True))

    @property
    def ok(self) -> bool:
        return not self.failures


def run(lengths: Path | None = None, steps: int = 20, as_json: bool = False) -> int:
    """Runs the demo and prints what it found; 0 if losses agree and all checks hold.

    lengths: a workload file of real document lengths; those in the repository's examples by default."""
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1", "give a positive number")
    begin = time.perf_counter()
    with Progress(console=Console(stderr=as_json)) as progress:
        prepared = _watched(
            progress, "plan and verify", steps, _prepare(_workload(lengths), _corpus(), steps)
        )
        planned = _watched(progress, f"train on {RANKS} processes, planned", steps, _train_planned(prepared))
        plain = _watched(progress, "train in one process, plain", steps, _train_plain(prepared))
    outcome = _outcome(prepared, planned, plain, time.perf_counter() - begin)
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


def _prepare(workload: Workload, corpus: Bytes, steps: int) -> Iterator[Step]:
    for index in range(steps):
        batch = _batch(workload, index)
        at = index * TOKENS % max(1, len(corpus) - TOKENS)
        text = np.resize(corpus[at : at + TOKENS], TOKENS)
        plan, planning_ms = _plan(batch)
        yield Step(batch, text, plan, planning_ms)


def _batch(workload: Workload, index: int) -> Batch:
    """One long document and others drawn from the workload, under two attention kinds."""
    drawn, _ = sample(workload, TOKENS - LONG, TOKENS, SEED + index)
    kinds = {"global": masks.causal(), "local": masks.sliding_window(WINDOW)}
    return Batch.from_lengths([LONG, *drawn.lengths.tolist()], kinds)


def _plan(batch: Batch) -> tuple[Plan, float]:
    from apportion.planner.api import plan

    cluster = Cluster(nodes=1, ranks_per_node=RANKS)
    begin = time.perf_counter()
    made = plan(batch, cluster, _model(DecoderConfig()), seed=SEED, verify=False)
    return made, (time.perf_counter() - begin) * 1e3


def _model(config: DecoderConfig) -> Model:
    return Model(
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="fp32",
        hidden=config.hidden,
        ffn=config.ffn,
        layers={kind: config.kinds.count(kind) for kind in config.kinds},
    )


# --- training


def _trainer() -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = Decoder(DecoderConfig())
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _train_plain(steps: Sequence[Step]) -> Iterator[float]:
    """The loss of each step, all tokens in one process."""
    model, optimizer = _trainer()
    for step in steps:
        ids = torch.from_numpy(step.text.astype(np.int64))
        target = step.batch.labels()
        labels = torch.where(
            torch.from_numpy(target) >= 0, ids[torch.from_numpy(np.maximum(target, 0))], -100
        )
        positions = torch.from_numpy(step.batch.positions())

        def attention(q: Tensor, k: Tensor, v: Tensor, kind: str, batch: Batch = step.batch) -> Tensor:
            return plain_attention(q, k, v, batch, kind)

        optimizer.zero_grad()
        loss = normalised_loss(model(ids, positions, attention), labels, step.valid_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


def _train_planned(steps: Sequence[Step]) -> Iterator[float]:
    """The loss of each step, each process holding its rows only."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(RANKS)]
    pipes = [ours for ours, _ in pairs]
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_work, args=(theirs, rank, folder), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for worker in workers:
            worker.start()
        for _, theirs in pairs:
            theirs.close()
        try:
            # all are running: a process reads its shares only once it has met the others
            for rank, pipe in enumerate(pipes):
                pipe.send([step.share(rank) for step in steps])
            for _ in steps:
                yield _answers(pipes)[0]
        finally:
            for worker in workers:
                worker.join(5)
                worker.kill()


def _answers(pipes: list[Connection]) -> list[float]:
    """One number from every process; the first traceback wins."""
    values: dict[int, float] = {}
    while len(values) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in values], STALLED_S)
        if not ready:
            raise ExecutionError(
                f"demo processes {sorted(set(range(len(pipes))) - set(values))} do not answer"
            )
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                values[rank] = _answer(rank, pipe)
    return [values[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection) -> float:
    try:
        value = pipe.recv()
    except EOFError:
        raise ExecutionError(f"demo process {rank} died") from None
    if isinstance(value, str):
        raise ExecutionError(f"demo process {rank} failed:\n{value}")
    return float(value)


def _work(pipe: Connection, rank: int, folder: str) -> None:
    """One process: trains on its shares and reports the global loss of each step."""
    import traceback

    torch.set_num_threads(1)
    try:
        place = (Path(folder) / "store").as_uri()
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
        for loss in _train_shares(pipe.recv()):
            pipe.send(loss)
        dist.barrier()  # no process hangs up on another one's last collective
        dist.destroy_process_group()
    except Exception:
        pipe.send(traceback.format_exc())


def _train_shares(shares: Sequence[Share]) -> Iterator[float]:
    model, optimizer = _trainer()
    communicator = Communicator()
    for share in shares:
        handle = PlanHandle(Slice.decode(share.piece), communicator)
        tokens, labels = torch.from_numpy(share.tokens), torch.from_numpy(share.labels)

        def attention(q: Tensor, k: Tensor, v: Tensor, kind: str, handle: PlanHandle = handle) -> Tensor:
            return planned_attention(q, k, v, handle, kind)

        optimizer.zero_grad()
        loss = normalised_loss(model(tokens, handle.position_ids, attention), labels, share.valid_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        _sum_gradients(model)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        yield total.item()


def _sum_gradients(model: Decoder) -> None:
    """What data parallelism does; each rank's loss is already its share of the global mean."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


# --- result


def _outcome(steps: Sequence[Step], planned: list[float], plain: list[float], seconds: float) -> Outcome:
    costs = {
        "planned (fcp)": _median([_planned_costs(step) for step in steps]),
        "contiguous": _median([_baseline_costs(contiguous, step) for step in steps]),
        "zig-zag ring": _median([_baseline_costs(zigzag_ring, step) for step in steps]),
    }
    found = Outcome(planned, plain, costs, _broken_plans(steps), seconds)
    if not found.difference <= TOLERANCE:
        found.failures.append(f"losses differ by {found.difference:.1e}, allowed is {TOLERANCE:.0e}")
    return found


def _broken_plans(steps: Sequence[Step]) -> list[str]:
    failures = []
    for index, step in enumerate(steps):
        try:
            verify(step.plan)
        except VerifyError as error:
            failures.append(f"step {index}: {error}")
        spans = step.plan.layout("attention").spans
        holders = np.unique(spans.rank_of_row()[spans["sequence"] == 0])
        if len(holders) != RANKS:
            failures.append(f"step {index}: the long document is on ranks {holders.tolist()} only")
    return failures


def _planned_costs(step: Step) -> dict[str, float]:
    report = step.plan.report
    imbalance = report["imbalance"]
    costs = Costs(imbalance["compute"], imbalance["tokens"], report["bytes"]["total"], report["slots"])
    largest = report["plan_bytes"]["largest_rank"]
    return asdict(costs) | {"plan_bytes_of_largest_rank": largest, "planning_ms": step.planning_ms}


def _baseline_costs(baseline: Callable[[Batch, int, Model], Costs], step: Step) -> dict[str, float]:
    return asdict(baseline(step.batch, RANKS, step.plan.request.model))


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
        "seconds": outcome.seconds,
    }


def _show(outcome: Outcome) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_loss_table(outcome), _cost_table(outcome))
    for failure in outcome.failures:
        console.print(f"[red]failed:[/red] {failure}")
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
