"""Child process for Mt-KaHyPar, which holds the interpreter's lock, may crash, and cannot be interrupted.

Reads from standard input, as consecutive arrays of `numpy.save`: the number of jobs, then for each job: weights, fixed
(part or -1), ptr, pins, price and the maximum weight of each part. Writes a partition for each job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints

Job = tuple[Ints, Ints, Ints, Ints, Ints, Ints]

#: arrays of a job
COLUMNS = 6


def write(stream: Any, arrays: Sequence[Ints]) -> None:
    """Writes arrays consecutively."""
    for array in arrays:
        np.save(stream, array, allow_pickle=False)


def read(stream: Any, count: int) -> list[Ints]:
    """Reads `count` arrays. Raises ValueError or EOFError if they are missing."""
    return [np.load(stream, allow_pickle=False) for _ in range(count)]


def main() -> None:
    """Partitions all jobs."""
    stream = BytesIO(sys.stdin.buffer.read())
    (jobs,) = read(stream, 1)
    engine = import_module("mtkahypar")
    start = engine.initialize(1, False)  # one thread; the deterministic presets give the same result with two
    for _ in range(int(jobs[0])):
        weights, fixed, ptr, pins, price, caps = read(stream, COLUMNS)
        write(sys.stdout.buffer, [_partition(engine, start, (weights, fixed, ptr, pins, price, caps))])


def _partition(engine: Any, start: Any, job: Job) -> Ints:
    weights, fixed, ptr, pins, price, caps = job
    context = start.context_from_preset(engine.PresetType.DETERMINISTIC_QUALITY)
    context.logging = False
    context.set_partitioning_parameters(len(caps), 0.01, engine.Objective.KM1)
    context.set_individual_target_block_weights(caps.tolist())
    engine.set_seed(0)
    edges = [part.tolist() for part in np.split(pins, ptr[1:-1])]
    graph = start.create_hypergraph(
        context, len(weights), len(edges), edges, weights.tolist(), price.tolist()
    )
    if (fixed >= 0).any():
        graph.add_fixed_vertices(fixed.tolist(), len(caps))
    return np.array(graph.partition(context).get_partition(), np.int64)


if __name__ == "__main__":
    main()
