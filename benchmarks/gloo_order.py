"""Does the simulator order recipes as the clock does? Recipes on two gloo processes of this CPU, forward and backward.

    python benchmarks/gloo_order.py [--hardware mine.json] [--recipes ring,allgather] [--lengths 5000,1500,900]

The CPU is profiled (unless `--hardware` brings a profile), its links are measured between the two processes, each
recipe's plan is simulated on that hardware and executed with the torch backend: all plans in turn, round after round,
so that whatever else the machine does hits all alike. The median counts; the best is told beside it. Prints JSON: for
each batch the rows by measured time, and how well the two orders agree. The processes need a core each to themselves:
with fewer, times mean little.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.multiprocessing import spawn

from apportion.backends.torch.profile.device import profile
from apportion.backends.torch.profile.links import profile_links, with_links
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe, Step
from apportion.planner import api
from apportion.planner.recipe import recipes
from apportion.planner.simulate import simulate
from apportion.trainer.step.attention import Communicator, PlanHandle, planned_attention

Floats = NDArray[np.float64]

RANKS = 2
MODEL = Model(q_heads=4, kv_heads=2, head_dim=64, dtype="fp32", layers=1)
BATCHES = ((6000,), (4000, 1200, 600, 300), (2000, 1500, 1000, 700, 400, 300))
BLOCKS = (256, 512, 1024)
NAMES = (
    "fcp",
    "ring",
    "allgather",
    "ulysses",
    "usp",
    "hybrid_dp",
    "megatron_hybrid",
    "wlb",
    "flexsp",
    "contiguous",
)
SAME = 1e-4  # of the logarithms of two times
NOT_COALESCED = (256, 1)  # block, coalesce


@dataclass(frozen=True)
class Case:
    """A plan under its name, and what the simulator says: milliseconds forward and backward."""

    name: str
    plan: Plan
    simulated_ms: tuple[float, float]


def variants(names: Sequence[str]) -> Iterator[tuple[str, Recipe]]:
    """Recipes by name; `fcp` also with fixed blocks, and with a round for every slot."""
    for name in names:
        recipe = recipes.find_recipe(name)
        yield name, recipe
        if name == "fcp":
            for block in BLOCKS:
                yield f"fcp, blocks of {block}", recipes.with_block(recipe, block)
            block, coalesce = NOT_COALESCED
            schedule = Step("schedule", "matchings", {"coalesce": coalesce, "buffers": 3})
            fixed = recipes.with_block(recipe, block)
            steps = tuple(schedule if step.step == "schedule" else step for step in fixed)
            yield f"fcp, blocks of {block}, a round a slot", Recipe(recipe.name, steps)


def cases(lengths: Sequence[int], names: Sequence[str], hardware: Hardware) -> tuple[list[Case], list[Any]]:
    """Plans that serve the batch, and rows of those that do not."""
    batch, cluster = Batch.from_lengths(lengths, mask=masks.causal()), hardware.cluster(1, RANKS)
    found, refused = [], []
    for name, recipe in variants(names):
        try:
            plan = api.plan(batch, cluster, MODEL, recipe=recipe, hardware=hardware)
        except ApportionError as error:
            refused.append({"recipe": name, "status": "refused", "reason": str(error)})
            continue
        simulated = simulate(plan, hardware)
        found.append(Case(name, plan, (simulated.forward_ms, simulated.backward_ms)))
    return found, refused


def runner(plan: Plan, communicator: Communicator) -> Callable[[], tuple[float, float]]:
    """A function that runs forward and backward once; milliseconds of the slower rank."""
    handle, head = PlanHandle(plan.for_rank(communicator.rank), communicator), plan.header
    random = torch.Generator().manual_seed(communicator.rank)

    def rows(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(handle.rows, heads, dim, generator=random)

    q, k = rows(head.q_heads, head.head_dim), rows(head.kv_heads, head.head_dim)
    v, do = rows(head.kv_heads, head.v_head_dim), rows(head.q_heads, head.v_head_dim)

    def run() -> tuple[float, float]:
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        forward_ms, out = timed(lambda: planned_attention(*leaves, handle))
        backward_ms, _ = timed(lambda: torch.autograd.grad(out, leaves, do))
        return forward_ms, backward_ms

    return run


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds until the slower rank is done, from a common start, and the result of `work`."""
    dist.barrier()
    start = perf_counter()
    result = work()
    took = torch.tensor((perf_counter() - start) * 1e3, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item(), result


def measure(plans: Sequence[Plan], rounds: int) -> Floats:
    """float64 [rounds, plans, 2]: milliseconds forward and backward, after a round that does not count."""
    runs = [runner(plan, Communicator()) for plan in plans]
    return np.array([[run() for run in runs] for _ in range(rounds + 1)])[1:]


def agreement(measured: Floats, simulated: Floats) -> dict[str, float]:
    """Of times [plans]: rank correlation (Spearman), the share of pairs in the same order, of those that the simulator
    tells apart and of those that it sees more than a tenth apart, and the ratio of the times. `noise` is how far (a
    ratio) measured times of plans are apart that the simulator takes for the same: closer pairs say nothing."""
    first, second = np.triu_indices(len(measured), 1)
    apart = np.abs(np.log(simulated[first] / simulated[second]))
    same = (measured[first] < measured[second]) == (simulated[first] < simulated[second])
    noise = np.exp(np.abs(np.log(measured[first] / measured[second])))[apart < SAME]
    found = {
        "spearman": np.corrcoef(_places(measured), _places(simulated))[0, 1] if len(first) else 1.0,
        "pairs_in_order": _share(same[apart >= SAME]),
        "pairs_a_tenth_apart": (apart > np.log(1.1)).sum(),
        "of_these_in_order": _share(same[apart > np.log(1.1)]),
        "simulated_over_measured": np.median(simulated / measured),
        "noise": noise.max(initial=1.0),
    }
    return {name: round(float(value), 3) for name, value in found.items()}


def _places(times: Floats) -> Floats:
    """Place of each time in their order; equal ones share theirs."""
    _, place, count = np.unique(np.round(times, 3), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - count / 2)[place]


def _share(found: NDArray[np.bool_]) -> float:
    return float(found.mean()) if len(found) else 1.0


def compared(lengths: Sequence[int], names: Sequence[str], hardware: Hardware, rounds: int) -> dict[str, Any]:
    """One batch on all recipes, fastest first."""
    found, refused = cases(lengths, names, hardware)
    measured = measure([case.plan for case in found], rounds)
    simulated = np.array([case.simulated_ms for case in found])
    median, best = np.median(measured, axis=0), measured.min(axis=0)
    rows = [
        {
            "recipe": case.name,
            "status": "ok",
            "measured_ms": np.round(median[i], 2).tolist(),
            "best_ms": np.round(best[i], 2).tolist(),
            "simulated_ms": np.round(simulated[i], 2).tolist(),
        }
        for i, case in enumerate(found)
    ]
    order = np.argsort(median.sum(axis=1), kind="stable")
    return {
        "lengths": list(lengths),
        "agreement": agreement(median.sum(axis=1), simulated.sum(axis=1)),
        "agreement_of_best": agreement(best.sum(axis=1), simulated.sum(axis=1)),
        "rows": [rows[i] for i in order] + refused,
    }


def work(rank: int, folder: str, job: argparse.Namespace) -> None:
    """One process. Both plan, which is deterministic, and measure; rank 0 prints."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    links = profile_links()
    hardware = with_links(Hardware.load(Path(folder) / "hardware.json"), links)
    names = job.recipes.split(",") if job.recipes else NAMES
    batches = [[int(n) for n in job.lengths.split(",")]] if job.lengths else BATCHES
    found = [compared(lengths, names, hardware, job.rounds) for lengths in batches]
    if rank == 0:
        figures = {
            name: getattr(hardware, name).value for name in ("intra_gbs", "intra_latency_us", "rowop_us")
        }
        print(json.dumps({"device": hardware.device, "ranks": RANKS, **figures, "batches": found}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", help="a profile of this CPU; default: measure a quick one")
    parser.add_argument(
        "--recipes", default="", help="names, separated by commas; default: the built-in ones"
    )
    parser.add_argument(
        "--lengths", default="", help="one batch of these lengths instead of the built-in ones"
    )
    parser.add_argument("--rounds", type=int, default=9)
    job = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print("profile", file=sys.stderr)
        hardware = Hardware.load(job.hardware) if job.hardware else profile(quick=True)
        (Path(folder) / "hardware.json").write_text(json.dumps(hardware.to_data()))
        spawn(work, (folder, job), RANKS)  # the first one that fails ends the others


if __name__ == "__main__":
    main()
