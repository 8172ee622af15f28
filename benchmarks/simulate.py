"""How long a simulation takes: `fcp` with 2K blocks, 32K tokens a rank, forward and backward, one core.

    python benchmarks/simulate.py [--ranks 8,64,256,1024] [--repeats 3]

Prints JSON, a row a rank count: the best of `repeats` simulations in milliseconds, after one that is not counted, and
what was simulated.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter
from typing import Any

from apportion.bench import Source, cluster_of
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.model import Model
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe, with_block
from apportion.planner.simulate import Simulation, simulate

BLOCK = 2048
TOKENS_PER_RANK = 32_768


def plan_of(ranks: int, seed: int) -> Plan:
    batch, _ = Source().batch(ranks * TOKENS_PER_RANK, seed)
    recipe = with_block(find_recipe("fcp"), BLOCK)
    return api.plan(batch, cluster_of(ranks), Model(), recipe=recipe, seed=seed, verify=False)


def timed(plan: Plan) -> tuple[float, Simulation]:
    """(milliseconds, what was found)."""
    start = perf_counter()
    found = simulate(plan)
    return (perf_counter() - start) * 1e3, found


def row(ranks: int, seed: int, repeats: int) -> dict[str, Any]:
    plan = plan_of(ranks, seed)
    timed(plan)
    runs = [timed(plan) for _ in range(repeats)]
    found = runs[0][1]
    return {
        "ranks": ranks,
        "seed": seed,
        "simulate_ms": round(min(ms for ms, _ in runs), 2),
        "instructions": sum(len(run.op) for run in found.runs.values()),
        "transfers": sum(len(run.traffic.sender) for run in found.runs.values()),
        "forward_ms": round(found.forward_ms, 3),
        "backward_ms": round(found.backward_ms, 3),
        "exposed_ms": round(found.exposed_ms, 3),
        "efficiency": round(found.efficiency, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,64,256,1024", help="rank counts, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = [row(int(ranks), args.seed, args.repeats) for ranks in args.ranks.split(",")]
    print(json.dumps({"recipe": "fcp", "block": BLOCK, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
