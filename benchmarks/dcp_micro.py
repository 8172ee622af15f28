"""Simulates DCP's micro-benchmark (its Figures 13 and 14): attention of one layer on 32 A100s under four masks and four
length scales, forward and backward.

    python -m benchmarks.dcp_micro --seeds 8 --json benchmarks/results/dcp_micro.json

All systems run the same batches: 131,072 tokens of log-normal documents, with median 2K times the scale and sigma 1.5
(assumed: the paper shows its lengths only in a figure).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.api import plan
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate import simulate
from benchmarks.papers import DCP_DATA, DCP_MASKS, TE, masked_batch

TOKENS, NODES, GPUS = 131_072, 4, 8
#: 32 query and 8 KV heads under 4-way tensor parallelism
MODEL = Model(q_heads=8, kv_heads=2, head_dim=128)
SCALES = (0.5, 1.0, 2.0, 4.0)
MEDIAN, SIGMA = DCP_DATA["LongDataCollections"]
#: LoongTrain with its heads split in two, as in `TE` (TransformerEngine)
LOONGTRAIN = Recipe(
    "loongtrain-heads-2",
    {**find_recipe("loongtrain").to_data()["steps"], "inner": {"ulysses": {"degree": 2}}},
)
SYSTEMS = (find_recipe("dcp"), find_recipe("ring"), LOONGTRAIN, TE)


def draw(scale: float, mask: str, seed: int) -> Batch:
    """Draws a batch of log-normal documents with median `scale` x 2K."""
    lengths = lognormal_lengths(seed, TOKENS, MEDIAN * scale, SIGMA, longest=TOKENS)
    return masked_batch(lengths.tolist(), mask)


def measure(seeds: int) -> Iterator[dict[str, Any]]:
    """Yields a row per mask, scale and system: milliseconds and bytes (means over batches), and `most_of_ring`, the
    largest ratio of the system's time to `ring`'s on any batch."""
    hardware = Hardware.load("a100")
    cluster = hardware.cluster(NODES, GPUS)
    for mask in DCP_MASKS:
        for scale in SCALES:
            batches = [draw(scale, mask, seed) for seed in range(seeds)]
            ring: list[float] = []
            for recipe in (SYSTEMS[1], SYSTEMS[0], *SYSTEMS[2:]):
                rows = []
                for batch in batches:
                    candidate = plan(batch, cluster, MODEL, recipe, hardware=hardware, verify=False)
                    run, traffic = simulate(candidate, hardware), candidate.report["bytes"]
                    rows.append((run.forward_ms, run.backward_ms, traffic["total"], traffic["inter_node"]))
                times = [forward + backward for forward, backward, *_ in rows]
                ring = ring or times
                forward, backward, total, inter_node = np.mean(rows, axis=0).tolist()
                yield {
                    "mask": mask,
                    "scale": scale,
                    "system": recipe.name,
                    "forward_ms": forward,
                    "backward_ms": backward,
                    "bytes": total,
                    "between_nodes": inter_node,
                    "most_of_ring": max(ours / theirs for ours, theirs in zip(times, ring, strict=True)),
                }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    rows = []
    for row in measure(options.seeds):
        rows.append(row)
        print(
            f"{row['mask']:17} {row['scale']:4} {row['system']:19} {row['forward_ms']:7.2f} {row['backward_ms']:7.2f}"
            f" ms {row['bytes'] / 1e9:6.2f} {row['between_nodes'] / 1e9:6.2f} GB {row['most_of_ring']:5.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
