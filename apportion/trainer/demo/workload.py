"""What the demo trains: document lengths of a workload file, and text of the repository; its model and its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bytes.job import Job
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.request.workload import Workload, read_workload, sample
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.demo.decoder import DecoderConfig
from apportion.trainer.demo.process import KINDS, DemoDocuments

RANKS = 4
TOKENS = 6144
LONG = TOKENS // 2  # of the document that spans all ranks
SEED = 0

PACKAGE = Path(__file__).resolve().parents[2]
REPOSITORY = PACKAGE.parent
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.yaml")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class StepDocuments:
    """One step's documents, one after another: their lengths and masks, and the text of all."""

    batch: Batch
    text: Bytes

    @property
    def valid_tokens(self) -> int:
        return self.batch.labelled


def steps(count: int, lengths: Path | None = None) -> list[StepDocuments]:
    """The first steps that the demo trains, of a workload file or of the repository's examples."""
    workload, corpus = _workload(lengths), _corpus()
    return [StepDocuments(_batch(workload, index), _text(corpus, index)) for index in range(count)]


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


def _batch(workload: Workload, index: int) -> Batch:
    """One long document and others drawn from the workload, under two attention kinds."""
    drawn, _ = sample(workload, TOKENS - LONG, TOKENS, SEED + index)
    return Batch.from_lengths([LONG, *drawn.lengths.tolist()], KINDS)


def _text(corpus: Bytes, index: int) -> Bytes:
    at = index * TOKENS % max(1, len(corpus) - TOKENS)
    return np.resize(corpus[at : at + TOKENS], TOKENS)


def documents(steps: Sequence[StepDocuments]) -> DemoDocuments:
    lengths = [step.batch.lengths for step in steps]
    counts = np.array([len(own) for own in lengths])
    return DemoDocuments(np.concatenate([step.text for step in steps]), np.concatenate(lengths), counts)


def model() -> Model:
    """The demo's, as planners know it."""
    config = DecoderConfig()
    return Model(
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="fp32",
        hidden=config.hidden,
        ffn=config.ffn,
        layers={kind: config.kinds.count(kind) for kind in config.kinds},
    )


def job() -> Job:
    policy = Policy(find_recipe("fcp"), seed=SEED)
    return Job(Cluster(nodes=1, ranks_per_node=RANKS), model(), policy, TOKENS // RANKS)
