"""A rank's rows of a planned microbatch: tokens and labels, read from the samples that it holds.

Labels are shifted before sharding: the label of a rank's last row may be a token that another rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from apportion.ir.batch import Batch
from apportion.ir.codec import Slice
from apportion.ir.errors import ExecutionError
from apportion.ir.iteration_slice import IterationSlice
from apportion.trainer.loss import IGNORED
from apportion.trainer.wanted import Wanted

Ints = NDArray[np.integer[Any]]


class Dataset(Protocol):
    """Map-style: sample i is a 1-d array or tensor of token ids. It may have `lengths`, integers [n], and `masks`."""

    def __getitem__(self, index: int, /) -> ArrayLike | Tensor: ...

    def __len__(self) -> int: ...


def local_rows(
    piece: Slice, batch: Batch, read: Callable[[int], ArrayLike | Tensor]
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [rows] int64 of the slice's rank. `read(i)` gives the ids of sequence i of the batch and is
    called once for each sequence that the rank holds. Raises ExecutionError where a sample has another length, or the
    plan is of another batch."""
    spans = piece.layout(piece.header.home_layout).spans
    _check_batch(spans, batch)
    rows = int(spans["length"].sum())
    tokens, labels = np.empty(rows, np.int64), np.full(rows, IGNORED, np.int64)
    starts, samples = batch.starts, dict[int, Ints]()
    columns = (spans[name].tolist() for name in ("row", "token", "length", "sequence"))
    for row, token, length, sequence in zip(*columns, strict=True):
        if sequence not in samples:
            samples[sequence] = _checked(read(sequence), int(batch.lengths[sequence]), sequence)
        ids, start, here = samples[sequence], int(starts[sequence]), slice(row, row + length)
        tokens[here] = ids[token - start : token - start + length]
        targets = batch.labels(token, token + length)
        labels[here] = np.where(targets >= 0, ids[np.maximum(targets - start, 0)], IGNORED)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def rows_of(dataset: Dataset, wanted: Wanted, piece: IterationSlice) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, labels) of each microbatch of an iteration, read when asked for. Raises as `local_rows`."""
    for own, (batch, samples) in zip(piece.slices, wanted.parts(piece.indexes), strict=True):
        yield local_rows(own, batch, partial(_read, dataset, samples))


def _check_batch(spans: Any, batch: Batch) -> None:
    """Spans must lie in the sequences that they name."""
    sequence, token = spans["sequence"], spans["token"].astype(np.int64)
    known = sequence < len(batch.lengths)
    own = np.where(known, sequence, 0)
    ends = token + spans["length"]
    if not (known & (token >= batch.starts[own]) & (ends <= batch.starts[own + 1])).all():
        raise ExecutionError(
            f"the plan is not of this batch of {len(batch.lengths)} sequences: the run was begun with other samples"
        )


def _read(dataset: Dataset, samples: Ints, sequence: int) -> ArrayLike | Tensor:
    return dataset[int(samples[sequence])]


def _checked(sample: ArrayLike | Tensor, length: int, sequence: int) -> Ints:
    ids = np.asarray(sample, np.int64)
    if ids.shape != (length,):
        raise ExecutionError(
            f"sequence {sequence} has shape {ids.shape}, it was planned with length {length}"
        )
    return ids
