"""The example's config with Titan's own attention, on the same documents, for one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import planned_llama
from torchtitan.components.dataloader import BaseDataLoader

from tests.adapters.documents import packed


class PackedFiles(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, tokenizer: Any, **_: Any) -> None:
        self.documents = planned_llama.documents(tokenizer, None)

    def __iter__(self) -> Iterator[Any]:
        for tokens, positions, labels in packed(self.documents, 2 * 4096, microbatches=2, seed=0):
            yield {"input": tokens[None], "positions": positions[None]}, labels[None]

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def own_tiny() -> Any:
    """2 microbatches per step on one rank."""
    config = planned_llama.tiny()
    training = replace(config.training, global_batch_size=2)
    training.disable_cuda_graphs = True
    return replace(config, dataloader=PackedFiles.Config(), training=training)
