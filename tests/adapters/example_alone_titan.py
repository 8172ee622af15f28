"""The example's config with Titan's own attention and data, for one process."""

from dataclasses import dataclass, replace

import planned_llama
from torchtitan.components.dataloader import BaseDataLoader

from tests.adapters.documents import packed


class PackedFiles(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, tokenizer, **_):
        self.documents = planned_llama.documents(tokenizer, None)

    def __iter__(self):
        for tokens, positions, labels in packed(self.documents, 2 * 4096, microbatches=2, seed=0):
            yield {"input": tokens[None], "positions": positions[None]}, labels[None]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def own_tiny():
    """2 microbatches a step on one rank."""
    config = planned_llama.tiny()
    training = replace(config.training, global_batch_size=2)
    training.disable_cuda_graphs = True
    return replace(config, dataloader=PackedFiles.Config(), training=training)
