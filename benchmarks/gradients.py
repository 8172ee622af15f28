"""Gradients that travel in the model's dtype (`sent_gradients: model`): what they cost in accuracy, what they save.

Run: python -m benchmarks.gradients errors [--recipes fcp,ring] [--dtypes bf16,fp16]    eight processes, gloo
     python -m benchmarks.gradients hops [--recipes fcp,ring] [--ranks 2,4,8,16,32]     in float64, on numpy
     python -m benchmarks.gradients times [--recipes fcp,auto] [--ranks 8,64]           simulated

errors: two nodes of four ranks, the plain engine, two batches of 4,096 tokens; of each gradient the norm of the
difference to dense attention in float64 of the same numbers, over the norm of the latter. hops: one document of 8,192
tokens, bfloat16 on the wire and float64 everywhere else, so that the error is of the rounding alone. times: as
`benchmarks/auto.py`, built-in h100, the README's model, 32K tokens a rank, log-normal documents of seed 0. Prints
tables.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import spawn

from apportion.backends import numpy as executor
from apportion.bench import cluster_of
from apportion.comparison import Refusal, Setting, Trial, attempt
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.tensors import SENT_GRADIENTS
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.step.attention import Communicator, PlanHandle, planned_attention
from benchmarks.auto import MODEL, batch_of
from benchmarks.targets import line

CLUSTER = Cluster(nodes=2, ranks_per_node=4)
SMALL = Model(q_heads=4, kv_heads=2, head_dim=64, layers=1)
BATCHES = {"one document": (4096,), "six documents": (2000, 1000, 500, 300, 200, 96)}
NAMES = ("dq", "dk", "dv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- errors


def numbers(lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, [tokens, heads, head_dim] in a dtype."""
    random = torch.Generator().manual_seed(0)
    heads = (SMALL.q_heads, SMALL.kv_heads, SMALL.kv_heads, SMALL.q_heads)
    return [
        torch.randn(sum(lengths), count, SMALL.head_dim, dtype=torch.float64, generator=random).to(dtype)
        for count in heads
    ]


def dense(lengths: Sequence[int], given: Sequence[Tensor]) -> list[Tensor]:
    """dq, dk and dv of causal documents in float64."""
    leaves = [x.double().requires_grad_() for x in given[:3]]
    shared, outs = SMALL.q_heads // SMALL.kv_heads, []
    for q, k, v in zip(*(leaf.split(list(lengths)) for leaf in leaves), strict=True):
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(SMALL.head_dim)
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(future, -math.inf).softmax(-1), v))
    return list(torch.autograd.grad(torch.cat(outs), leaves, given[3].double()))


def errors(plans: Sequence[Plan], lengths: Sequence[int]) -> list[list[float]]:
    """Of dq, dk and dv of each plan, the relative error of the norm; runs all of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (plans, lengths, folder), nprocs=CLUSTER.ranks)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(CLUSTER.ranks)]
    exact = dense(lengths, numbers(lengths, DTYPES[plans[0].header.dtype]))
    rows = []
    for number, plan in enumerate(plans):
        home = plan.layout(plan.header.home_layout)
        tokens = torch.cat([torch.from_numpy(home.tokens(rank)) for rank in range(CLUSTER.ranks)])
        parts = (torch.cat([one[number][i] for one in found]) for i in range(len(NAMES)))
        rows.append(
            [
                float((got.double() - want[tokens]).norm() / want.norm())
                for got, want in zip(parts, exact, strict=True)
            ]
        )
    return rows


def _rank(rank: int, plans: Sequence[Plan], lengths: Sequence[int], folder: str) -> None:
    """One rank's gradients of every plan, into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=CLUSTER.ranks)
    communicator, found = Communicator(), []
    for plan in plans:
        handle = PlanHandle(plan.for_rank(rank), communicator, engine="plain")
        tokens = torch.from_numpy(plan.layout(plan.header.home_layout).tokens(rank))
        *leaves, do = (x[tokens] for x in numbers(lengths, handle.dtype))
        out = planned_attention(*(leaf.requires_grad_() for leaf in leaves), handle)
        found.append([x.detach() for x in torch.autograd.grad(out, leaves, do)])
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def error_table(recipes: Sequence[str], dtypes: Sequence[str]) -> Iterator[str]:
    yield line(["batch", "dtype", "recipe", *(f"{name}, {way}" for name in NAMES for way in SENT_GRADIENTS)])
    yield line(["---"] * 3 + ["--:"] * 6)
    for title, lengths in BATCHES.items():
        for dtype in dtypes:
            models = [replace(SMALL, dtype=dtype, sent_gradients=way) for way in SENT_GRADIENTS]
            plans = [
                api.plan(Batch.from_lengths(lengths), CLUSTER, model, recipe=name)
                for name in recipes
                for model in models
            ]
            found = errors(plans, lengths)
            for name, *both in zip(recipes, found[::2], found[1::2], strict=True):
                cells = (f"{error:.2e}" for pair in zip(*both, strict=True) for error in pair)
                yield line([title, dtype, name, *cells])


# --- hops


def hop_table(recipes: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    """The relative error of dk that rounding alone makes, by the number of ranks; nodes of four."""
    yield line(["recipe", *(f"{count} ranks" for count in ranks)])
    yield line(["---", *["--:"] * len(ranks)])
    for name in recipes:
        yield line([name, *(f"{_rounding(name, count):.2e}" for count in ranks)])


def _rounding(recipe: str, ranks: int) -> float:
    model, tokens = Model(q_heads=1, kv_heads=1, head_dim=16, layers=1), 8192
    cluster = Cluster(max(ranks // 4, 1), min(ranks, 4))
    random = np.random.default_rng(0)
    given = [random.standard_normal((tokens, 1, model.head_dim)) for _ in range(4)]
    plans = [
        api.plan(Batch.from_lengths([tokens]), cluster, replace(model, sent_gradients=way), recipe=recipe)
        for way in SENT_GRADIENTS
    ]
    exact, found = (executor.run(plan, plan.header.kinds[0], *given).dk for plan in plans)
    if exact is None or found is None:
        raise AssertionError("dO was given")
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


# --- times


def time_table(recipes: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    yield line(["recipe", "ranks", "GB sent, wide", "model", "ms, wide", "model", "faster"])
    yield line(["---", *["--:"] * 6])
    hardware = Hardware.load("h100")
    for count in ranks:
        batch = batch_of("lognormal", count, 0)
        for name in recipes:
            pair = [_trial(batch, name, count, hardware, way) for way in SENT_GRADIENTS]
            refused = [one.reason for one in pair if isinstance(one, Refusal)]
            if refused:
                yield line([name, str(count), *["-"] * 5]) + f"  {refused[0]}"
                continue
            sent = [f"{one.report['bytes']['total'] / 1e9:.2f}" for one in pair if isinstance(one, Trial)]
            times = [one.total_ms for one in pair if isinstance(one, Trial)]
            gain = f"{100 * (times[0] / times[1] - 1):.1f} %"
            yield line([name, str(count), *sent, *(f"{ms:.2f}" for ms in times), gain])


def _trial(batch: Batch, recipe: str, ranks: int, hardware: Hardware, way: str) -> Trial | Refusal:
    model = replace(MODEL, sent_gradients=way)
    return attempt(batch, find_recipe(recipe), Setting(cluster_of(ranks, None, hardware), model, hardware))


# --- the command


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds: Any = parser.add_subparsers(dest="what", required=True)
    of_errors, of_hops, of_times = (kinds.add_parser(name) for name in ("errors", "hops", "times"))
    of_errors.add_argument("--recipes", type=_names, default=["fcp", "blend", "distca", "dcp", "ring"])
    of_errors.add_argument("--dtypes", type=_names, default=list(DTYPES))
    of_hops.add_argument("--recipes", type=_names, default=["fcp", "blend", "distca", "ring"])
    of_hops.add_argument("--ranks", type=_names, default=["2", "4", "8", "16", "32"])
    of_times.add_argument("--recipes", type=_names, default=["fcp", "blend", "distca", "dcp", "ring", "auto"])
    of_times.add_argument("--ranks", type=_names, default=["8", "64"])
    told = parser.parse_args()
    if told.what == "errors":
        found = error_table(told.recipes, told.dtypes)
    else:
        table = hop_table if told.what == "hops" else time_table
        found = table(told.recipes, [int(count) for count in told.ranks])
    for row in found:
        print(row, flush=True)


if __name__ == "__main__":
    main()
