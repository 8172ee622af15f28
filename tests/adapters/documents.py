"""Packed documents for tests with trainers, for loaders on ranks and for one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from apportion.ir.request.sampling import Sampling

LENGTHS = (40, 9, 33, 1, 25, 60, 12, 21, 8, 50, 5, 17, 30, 2, 44, 19)
VOCABULARY = 16


class Documents:
    """Dataset of random tokens; sample i is the same in any process."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> Any:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, VOCABULARY, self.lengths[index])


def documents(*_: Any) -> Any:
    return Documents()


class Apart(Documents):
    """Tokens that differ between ranks, as if each changed them at random."""

    def __getitem__(self, index: int) -> Any:
        return (super().__getitem__(index) + torch.distributed.get_rank()) % VOCABULARY


def differing_documents(*_: Any) -> Any:
    return Apart()


def packed(
    dataset: Any, tokens: int, microbatches: int, seed: int, multiple: Any = 8, epochs: Any = 10
) -> Iterator[Any]:
    """Yields microbatches (tokens, positions, labels), [length] int64 each, in the order that a loader draws for the
    seed; only whole iterations. Padding at the end is a document without labels."""
    sampling = Sampling(dataset.lengths, tokens, microbatches, seed)
    for epoch in range(epochs):
        for iteration in sampling.epoch(epoch):
            if len(iteration) == microbatches:
                yield from (_end_to_end([dataset[i] for i in samples], multiple) for samples in iteration)


def _end_to_end(samples: Any, multiple: Any) -> Any:
    padding = -sum(map(len, samples)) % multiple
    tokens = np.concatenate([*samples, np.zeros(padding, np.int64)])
    positions = np.concatenate([*(np.arange(len(one)) for one in samples), np.zeros(padding, np.int64)])
    labels = np.concatenate([*(np.append(one[1:], -100) for one in samples), np.full(padding, -100)])
    return tuple(torch.from_numpy(column.astype(np.int64)) for column in (tokens, positions, labels))
