"""Config registry for TorchTitan: a tiny Llama 3 on the bytes of Python files, with Titan's or planned attention.

torchrun --nproc-per-node 2 examples/titan/train.py --module planned_llama --config planned_tiny
torchrun --nproc-per-node 4 examples/titan/train.py --module planned_llama --config planned_ticks
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models import llama3
from torchtitan.trainer import Trainer

from apportion.trainer.torchtitan import PlannedTrainer, planned


class Bytes(BaseTokenizer):
    """Tokenizer with one token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Files:
    """Map-style dataset: each file is a document; lengths are known in advance."""

    def __init__(self, tokenizer: BaseTokenizer, folder: Path) -> None:
        texts = [path.read_text()[:4000] for path in sorted(folder.rglob("*.py"))]
        self.documents = [np.array(tokenizer.encode(text)) for text in texts]
        self.lengths = [len(document) for document in self.documents]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[index]


def documents(tokenizer: BaseTokenizer, folder: str | None) -> Files:
    """The dataset that the configs below name."""
    return Files(tokenizer, Path(folder) if folder else Path(__file__).parents[1])


def tiny() -> Trainer.Config:
    """Titan's own trainer, without data."""
    debug = llama3.model_registry("debugmodel", attn_backend="flex")
    model = replace(debug.model, layers=debug.model.layers[:2])
    return Trainer.Config(
        model_spec=replace(debug, model=model),
        tokenizer=Bytes.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            global_batch_size=4, local_batch_size=1, seq_len=4096, steps=5, mixed_precision_param="float32"
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs torch > 2.13
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )


def planned_tiny() -> PlannedTrainer.Config:
    """2 ranks, 2 microbatches per step: global_batch_size is 4."""
    return planned(tiny(), dataset="planned_llama.documents", tokens_per_rank=4096, microbatches=2)


def planned_ticks() -> PlannedTrainer.Config:
    """4 ranks: two stages of two replicas each, which compute the attention of every tick together."""
    data = {"dataset": "planned_llama.documents", "tokens_per_rank": 4096, "microbatches": 2}
    config = planned(tiny(), **data, ticks=1)
    return replace(config, parallelism=replace(config.parallelism, pipeline_parallel_degree=2))
