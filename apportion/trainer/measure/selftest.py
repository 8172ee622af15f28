"""Self-test of planned against plain attention on the user's backend and devices, with every engine available there.

    torchrun --nproc-per-node 2 -m apportion selftest        gloo on CPUs, NCCL on GPUs
    apportion selftest                                       one process

Every rank draws the same numbers, runs its rows under a plan, and compares them with plain attention in float64
that it computes itself. The errors of plain attention in the same dtype are shown for comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from apportion.backends.torch.engines import ENGINES
from apportion.ir.bytes.slices import Slice
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.trainer.measure.bench import Attention, on_gpu, on_host, process_group
from apportion.trainer.step.attention import Communicator, PlanHandle, planned_attention
from apportion.trainer.step.plain import plain_attention

LENGTHS = (1201, 640, 150, 56, 1)
WINDOW = 300
BLOCK = 128
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
SEED = 0
WIDTH = 100  # of the table, even in narrower terminals: lines may wrap, figures may not
# Planned attention may have twice the error of plain attention, plus an ulp in case plain attention's error is tiny.
FACTOR = 2.0
_COLUMNS = ("engine", "kind", "dtype", "error", "of plain attention", "forward", "backward", "")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def run(as_json: bool = False) -> int:
    """Runs on all ranks and prints on rank 0; returns 0 if all errors of all engines are within their bounds."""
    skipped: dict[str, None] = {}
    with process_group() as device:
        communicator = Communicator()
        cases = product(DTYPES, ("causal", "window"))
        rows = [row for dtype, kind in cases for row in _rows(kind, dtype, communicator, device, skipped)]
    record = {"ok": all(row["ok"] for row in rows), "ranks": communicator.ranks, "device": device.type}
    record |= {"tokens": sum(LENGTHS), "rows": rows, "skipped": list(skipped)}
    if communicator.rank == 0:
        if as_json:
            print(json.dumps(record))
        else:
            _show(record)
    return 0 if record["ok"] else 1


def _rows(
    kind: str, dtype: str, communicator: Communicator, device: torch.device, skipped: dict[str, None]
) -> Iterator[dict[str, Any]]:
    """A row for each engine that runs here, for one kind and dtype: relative norms of the errors, the largest of out,
    dq, dk and dv; milliseconds. skipped: collects the engines that do not run, and the reasons."""
    batch = Batch.from_lengths(LENGTHS, {"causal": masks.causal(), "window": masks.sliding_window(WINDOW)})
    piece = _piece(batch, dtype, communicator)
    indexes = torch.from_numpy(piece.layout(piece.header.home_layout).tokens(0)).to(device)
    inputs = [tensor.to(device, DTYPES[dtype]) for tensor in _random_inputs(batch.tokens)]
    plain = partial(plain_attention, batch=batch, kind=kind)
    exact = [tensor[indexes] for tensor in _run(plain, [tensor.double() for tensor in inputs])[0]]
    plain_error = _error([tensor[indexes] for tensor in _run(plain, inputs)[0]], exact, device)
    bound = FACTOR * max(plain_error, torch.finfo(DTYPES[dtype]).eps)
    for name in ENGINES:
        reason = ENGINES[name].obstacle(piece.header, device)
        if reason is None and (name, device.type, dtype) == ("stage", "cpu", "bf16"):
            reason = "Triton's interpreter multiplies bfloat16 incorrectly"
        if reason is not None:
            skipped[f"{name}: {reason}"] = None
            continue
        planned = partial(planned_attention, handle=PlanHandle(piece, communicator, name), kind=kind)
        rows = [tensor[indexes] for tensor in inputs]
        _run(planned, rows)  # warm-up: compares ids, builds tables, compiles, connects the ranks
        out, forward_ms, backward_ms = _run(planned, rows)
        error = _error(out, exact, device)
        row = {"engine": name, "kind": kind, "dtype": dtype, "error": error, "plain_error": plain_error}
        yield row | {"forward_ms": forward_ms, "backward_ms": backward_ms, "ok": error <= bound}


def _piece(batch: Batch, dtype: str, communicator: Communicator) -> Slice:
    from apportion.planner.api import plan
    from apportion.planner.recipe.recipes import find_recipe, with_block

    model = Model(HEADS, KV_HEADS, HEAD_DIM, dtype=dtype, layers={"causal": 1, "window": 1})
    recipe = with_block(find_recipe("fcp"), BLOCK)
    return plan(batch, Cluster(1, communicator.ranks), model, recipe, seed=SEED).for_rank(communicator.rank)


def _random_inputs(tokens: int) -> list[Tensor]:
    """q, k, v, dO in token order, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, n, HEAD_DIM, generator=generator) for n in heads]


def _run(attention: Attention, inputs: list[Tensor]) -> tuple[list[Tensor], float, float]:
    """(out, dq, dk, dv), and the milliseconds of forward and backward."""
    *qkv, do = inputs
    clock = on_gpu if do.device.type == "cuda" else on_host
    leaves = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    out, forward = clock(lambda: attention(*leaves))
    grads, backward = clock(lambda: torch.autograd.grad(out, leaves, do))
    return [out.detach(), *grads], forward.device, backward.device


def _error(out: list[Tensor], exact: list[Tensor], device: torch.device) -> float:
    """|out - exact| / |exact| over all ranks, the largest of the tensors."""
    squares = [[(a.double() - b).square().sum(), b.square().sum()] for a, b in zip(out, exact, strict=True)]
    sums = torch.stack([torch.stack(pair) for pair in squares]).to(device)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1]).sqrt().max())


def _show(record: Mapping[str, Any]) -> None:
    title = f"{record['ranks']} ranks on {record['device']}, {record['tokens']:,} tokens"
    skipped = escape("\n".join(record["skipped"]))
    table = Table(*_COLUMNS, title=title, title_justify="left", caption=skipped, caption_justify="left")
    for row in record["rows"]:
        errors = f"{row['error']:.1e}", f"{row['plain_error']:.1e}"
        times = f"{row['forward_ms']:.1f} ms", f"{row['backward_ms']:.1f} ms"
        status = "[green]ok[/green]" if row["ok"] else "[red]too large[/red]"
        table.add_row(row["engine"], row["kind"], row["dtype"], *errors, *times, status)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)
