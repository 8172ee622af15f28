"""Planned against plain attention on the user's own backend and devices, with every engine that runs there.

    torchrun --nproc-per-node 2 -m apportion selftest        gloo on CPUs, NCCL on GPUs
    apportion selftest                                       one process

Every rank draws the same numbers, runs its rows under a plan, and compares them with plain attention in float64
that it computes itself. The errors of plain attention in the same dtype stand beside them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from apportion.backends.torch.engines import ENGINES
from apportion.ir.bytes.slices import Slice
from apportion.ir.masks import specs as masks
from apportion.ir.plan.tables import Header
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.trainer.step.attention import Communicator, PlanHandle, planned_attention
from apportion.trainer.step.plain import plain_attention

LENGTHS = (1201, 640, 150, 56, 1)
WINDOW = 300
BLOCK = 128
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
SEED = 0
WIDTH = 100  # of the table, in narrower terminals too: lines may wrap, figures may not
# Planned attention may err twice as much as plain attention, and a last place where plain attention errs by luck less.
FACTOR = 2.0
_COLUMNS = ("engine", "kind", "dtype", "error", "of plain attention", "forward", "backward", "")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class SelftestRow:
    """One engine, kind and dtype: norms of the errors relative to the exact result, largest over out, dq, dk and dv."""

    engine: str
    kind: str
    dtype: str
    error: float
    plain_error: float
    forward_ms: float
    backward_ms: float

    @property
    def ok(self) -> bool:
        last_place = torch.finfo(DTYPES[self.dtype]).eps
        return self.error <= FACTOR * max(self.plain_error, last_place)


def run(as_json: bool = False) -> int:
    """Runs on all ranks and prints on rank 0; 0 if all errors of all engines are within their bounds."""
    skipped: dict[str, None] = {}
    with process_group() as device:
        communicator = Communicator()
        rows = [
            row
            for dtype in DTYPES
            for kind in ("causal", "window")
            for row in _rows(_problem(kind, dtype, communicator, device), communicator, skipped.setdefault)
        ]
    if communicator.rank == 0:
        record = _record(rows, communicator, device, list(skipped))
        print(json.dumps(record)) if as_json else _show(rows, record)
    return 0 if all(row.ok for row in rows) else 1


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The ranks that torchrun started, on this rank's device; a single process without it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
        dist.barrier()  # no rank hangs up on another one's last collective
    finally:
        dist.destroy_process_group()


class _PlainCase(NamedTuple):
    """One kind and dtype on this rank: q, k, v and dO of its rows, and what plain attention makes of them exactly."""

    piece: Slice
    kind: str
    rows: list[Tensor]
    exact: list[Tensor]
    plain_error: float


def _problem(kind: str, dtype: str, communicator: Communicator, device: torch.device) -> _PlainCase:
    from apportion.planner.api import plan
    from apportion.planner.recipe.recipes import find_recipe, with_block

    batch = Batch.from_lengths(LENGTHS, {"causal": masks.causal(), "window": masks.sliding_window(WINDOW)})
    model = Model(HEADS, KV_HEADS, HEAD_DIM, dtype=dtype, layers={"causal": 1, "window": 1})
    made = plan(
        batch, Cluster(1, communicator.ranks), model, with_block(find_recipe("fcp"), BLOCK), seed=SEED
    )
    piece = made.for_rank(communicator.rank)
    mine = torch.from_numpy(piece.layout(piece.header.home_layout).tokens(0)).to(device)
    inputs = [tensor.to(device, DTYPES[dtype]) for tensor in _random_inputs(batch.tokens)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q, k, v, batch, kind)

    exact = [tensor[mine] for tensor in _run(plain, [tensor.double() for tensor in inputs])[0]]
    same = [tensor[mine] for tensor in _run(plain, inputs)[0]]
    return _PlainCase(piece, kind, [tensor[mine] for tensor in inputs], exact, _error(same, exact, device))


def _rows(
    problem: _PlainCase, communicator: Communicator, skip: Callable[[str], object]
) -> Iterator[SelftestRow]:
    """A row for each engine; skip: is told which do not run here, and why."""
    header, device = problem.piece.header, problem.exact[0].device
    for name in ENGINES:
        why_not = _obstacle(name, header, device)
        if why_not is not None:
            skip(f"{name}: {why_not}")
            continue
        got, *times = _planned(PlanHandle(problem.piece, communicator, name), problem)
        error = _error(got, problem.exact, device)
        yield SelftestRow(name, problem.kind, header.dtype, error, problem.plain_error, *times)


def _obstacle(engine: str, header: Header, device: torch.device) -> str | None:
    """Why an engine does not run here."""
    found = ENGINES[engine].obstacle(header, device)
    if found is None and (engine, device.type, header.dtype) == ("stage", "cpu", "bf16"):
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return found


def _planned(handle: PlanHandle, problem: _PlainCase) -> tuple[list[Tensor], float, float]:
    def planned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return planned_attention(q, k, v, handle, problem.kind)

    _run(planned, problem.rows)  # compares ids, makes tables, compiles, connects the ranks
    return _run(planned, problem.rows)


def _random_inputs(tokens: int) -> list[Tensor]:
    """q, k, v, dO in token order, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, n, HEAD_DIM, generator=generator) for n in heads]


def _run(attention: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], float, float]:
    """(out, dq, dk, dv), and the milliseconds of forward and backward."""
    *qkv, do = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    begin = _now(do.device)
    out = attention(*leaves)
    middle = _now(do.device)
    out.backward(do)  # type: ignore[no-untyped-call]
    end = _now(do.device)
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [out.detach(), *grads], (middle - begin) * 1e3, (end - middle) * 1e3


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _error(got: list[Tensor], exact: list[Tensor], device: torch.device) -> float:
    """|got - exact| / |exact| over all ranks, the largest of the tensors."""
    squares = [[(a.double() - b).square().sum(), b.square().sum()] for a, b in zip(got, exact, strict=True)]
    sums = torch.stack([torch.stack(pair) for pair in squares]).to(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1]).sqrt().max())


def _record(
    rows: list[SelftestRow], communicator: Communicator, device: torch.device, skipped: list[str]
) -> dict[str, Any]:
    return {
        "ok": all(row.ok for row in rows),
        "ranks": communicator.ranks,
        "device": device.type,
        "tokens": sum(LENGTHS),
        "rows": [asdict(row) | {"ok": row.ok} for row in rows],
        "skipped": skipped,
    }


def _show(rows: list[SelftestRow], record: Mapping[str, Any]) -> None:
    title = f"{record['ranks']} ranks on {record['device']}, {record['tokens']:,} tokens"
    skipped = escape("\n".join(record["skipped"]))
    table = Table(*_COLUMNS, title=title, title_justify="left", caption=skipped, caption_justify="left")
    for row in rows:
        errors = f"{row.error:.1e}", f"{row.plain_error:.1e}"
        times = f"{row.forward_ms:.1f} ms", f"{row.backward_ms:.1f} ms"
        says = "[green]ok[/green]" if row.ok else "[red]too large[/red]"
        table.add_row(row.engine, row.kind, row.dtype, *errors, *times, says)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)
