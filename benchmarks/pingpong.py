"""What it is worth that two halves of a microbatch take turns: simulated, several recipes, 32K tokens a rank.

    python benchmarks/pingpong.py [--recipes distca,ulysses,…] [--ranks 8,32,64] [--seeds 0,1,2] [--layers 4]

Built-in h100, Llama-3-8B layers with their linear parts, 8 ranks a node, log-normal documents (docs/performance.md).
Prints JSON, a row a recipe and rank count: milliseconds of all layers forward and backward in each way of
`planner.simulate.pair`, and the gains of turns over them. All are means of the seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from apportion.bench import Source, cluster_of
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.planner import api
from apportion.planner.iteration.iterate import pack
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate.pair.result import Pair
from apportion.planner.simulate.pair.run import simulate_pair

MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn=14336, layers=32)
TOKENS_PER_RANK = 32_768
#: even in the predicted time of attention and linear layers
HALVES = {**find_recipe("distca").to_data()["steps"], "pack": {"wlb": {"microbatches": 2}}}
GAINS = ("gain", "serial_gain", "whole_gain")  # over a single stream, one half after the other, the undivided


def pair_of(recipe: str, ranks: int, seed: int, layers: int) -> Pair:
    batch, _ = Source().batch(ranks * TOKENS_PER_RANK, seed)
    packing = pack(batch, cluster_of(ranks), MODEL, Policy(Recipe("halves", HALVES)))
    ping, pong = (batch.take(indexes) for indexes in packing.microbatches)

    def planned(part: Batch) -> Any:
        return api.plan(part, cluster_of(ranks), MODEL, recipe, verify=False)

    return simulate_pair(planned(ping), planned(pong), layers=layers, whole=planned(batch))


def rows(
    recipes: Sequence[str], ranks: Sequence[int], seeds: Sequence[int], layers: int
) -> Iterator[dict[str, Any]]:
    for recipe in recipes:
        for count in ranks:
            found = [pair_of(recipe, count, seed, layers).to_data() for seed in seeds]
            means = {way: sum(data["ms"][way] for data in found) / len(found) for way in found[0]["ms"]}
            gains = {name: sum(data[name] for data in found) / len(found) for name in GAINS}
            yield {
                "recipe": recipe,
                "ranks": count,
                "ms": {way: round(ms, 3) for way, ms in means.items()},
                **{name: round(gain, 4) for name, gain in gains.items()},
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes", default="distca,ulysses,allgather,fcp", help="names, separated by commas"
    )
    parser.add_argument("--ranks", default="8,32,64", help="rank counts, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    ranks, seeds = ([int(number) for number in text.split(",")] for text in (args.ranks, args.seeds))
    found = list(rows(args.recipes.split(","), ranks, seeds, args.layers))
    print(json.dumps({"hardware": "h100", "layers": args.layers, "seeds": seeds, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
