"""The demo's training data (documents as bytes, one token per byte) and the sizes for their plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.request.workload import Workload, read_workload, sample

RANKS, TOKENS = 4, 6144
LONG = TOKENS // 2  # tokens of the document that spans all ranks
SEED, RECIPE = 0, "auto"
KINDS = {"global": ap.masks.causal(), "local": ap.masks.sliding_window(512)}
CLUSTER = ap.Cluster(nodes=1, ranks_per_node=RANKS)
LAYERS = {"global": 1, "local": 1}
MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=16, dtype="fp32", hidden=64, ffn=192, layers=LAYERS)

Document = NDArray[np.uint8]


def documents(steps: int, file: Path | str | None = None) -> list[list[Document]]:
    """Draws a long document and shorter ones for each step, TOKENS in total, from the text of this package's source
    files. Lengths are drawn from those of the files or of a workload file. Raises ConfigError, CapacityError."""
    files = [path.read_bytes() for path in sorted(Path(ap.__path__[0]).rglob("*.py"))]
    sizes = np.array([len(data) for data in files if data], np.int64)
    workload = Workload(sizes, (None,) * len(sizes)) if file is None else read_workload(file)
    text, batches = np.frombuffer(b"".join(files), np.uint8), []
    for step in range(steps):
        drawn, _ = sample(workload, TOKENS - LONG, LONG, SEED + step)
        begin = step * TOKENS % (len(text) - TOKENS)
        batches.append(np.split(text[begin : begin + TOKENS], LONG + drawn.starts[:-1]))
    return batches


def batch_of(step: list[Document]) -> ap.Batch:
    return ap.Batch.from_lengths([len(document) for document in step], KINDS)
