"""The data seam: each rank's tokens, position ids and labels of a planned microbatch.

    dataset ──fill microbatches──► Batch ──plan──► slice of this rank ──read only held samples──► PlannedBatch

Labels are shifted before sharding: the label of a rank's last row may be a token that another rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.transport import Communicator
from apportion.ir.bands import MAX_TOKENS
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.codec import Slice
from apportion.ir.errors import CapacityError, ConfigError, ExecutionError, UnknownNameError
from apportion.ir.fields import integer, integers
from apportion.ir.masks import Mask
from apportion.ir.model import Model
from apportion.ir.policy import Recipe
from apportion.trainer.loss import IGNORED

Ints = NDArray[np.integer[Any]]


class Dataset(Protocol):
    """Map-style: sample i is a 1-d array or tensor of token ids."""

    def __getitem__(self, index: int) -> ArrayLike | Tensor: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class PlannedBatch:
    """One rank's share of one microbatch; rows are in the plan's home layout."""

    tokens: Tensor  # [rows] int64 token ids
    position_ids: Tensor  # [rows] int64
    labels: Tensor  # [rows] int64, IGNORED where there is nothing to predict
    handle: PlanHandle
    iteration: int
    microbatch: int
    is_last: bool  # of its iteration: step the optimizer after it
    valid_tokens: int  # labels of all ranks and all microbatches of the iteration


def local_rows(
    piece: Slice, batch: Batch, read: Callable[[int], ArrayLike | Tensor]
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) [rows] int64 of the slice's rank. `read(i)` gives the ids of sequence i of the batch and is
    called once for each sequence that the rank holds. Raises ExecutionError where a sample has another length."""
    spans = piece.layout(piece.header.home_layout).spans
    rows = int(spans["length"].sum())
    tokens, labels = np.empty(rows, np.int64), np.full(rows, IGNORED, np.int64)
    starts, label_of, samples = batch.starts, batch.labels(), dict[int, Ints]()
    columns = (spans[name].tolist() for name in ("row", "token", "length", "sequence"))
    for row, token, length, sequence in zip(*columns, strict=True):
        if sequence not in samples:
            samples[sequence] = _checked(read(sequence), int(batch.lengths[sequence]), sequence)
        ids, start, here = samples[sequence], int(starts[sequence]), slice(row, row + length)
        tokens[here] = ids[token - start : token - start + length]
        targets = label_of[token : token + length]
        labels[here] = np.where(targets >= 0, ids[np.maximum(targets - start, 0)], IGNORED)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def _checked(sample: ArrayLike | Tensor, length: int, sequence: int) -> Ints:
    ids = np.asarray(sample, np.int64)
    if ids.shape != (length,):
        raise ExecutionError(
            f"sequence {sequence} has shape {ids.shape}, it was planned with length {length}"
        )
    return ids


class PlannedLoader:
    """Iterates over a dataset in planned microbatches; every rank makes one with equal arguments.

    dataset: map-style; lengths: tokens of each sample, integers [n]; samples are read only where a rank holds a part.
    tokens: at most so many in a microbatch, all ranks together. mask: one spec, or {kind: spec}; default causal.
    microbatches: per optimizer step; a recipe with a pack step (such as `wlb`) spreads the samples of a step anew over
    as many. shuffle: in an order drawn from seed and epoch (`set_epoch`).
    source: who plans. "local": this process, in a thread that is one iteration ahead; planning is deterministic,
    so all ranks get the same plan, and they compare its id before they use it.

    Raises ConfigError, and CapacityError for a sample longer than a microbatch.
    """

    def __init__(
        self,
        dataset: Dataset,
        lengths: ArrayLike,
        cluster: Cluster,
        model: Model,
        tokens: int,
        mask: Mask | Mapping[str, Mask] | None = None,
        *,
        source: str = "local",
        communicator: Communicator | None = None,
        microbatches: int = 1,
        recipe: str | Mapping[str, Any] | Recipe = "fcp",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if source != "local":
            raise UnknownNameError("source", source, "the sources are local", "write local")
        from apportion.planner.recipes import find_recipe

        self._dataset, self._mask, self._recipe = dataset, mask, find_recipe(recipe)
        self._packs = self._recipe.step("pack") is not None
        self._lengths = _checked_lengths(dataset, lengths)
        self._cluster, self._model, self._tokens = cluster, model, integer("tokens", tokens, 1, MAX_TOKENS)
        self._microbatches = integer("microbatches", microbatches)
        self._seed, self._shuffle, self._epoch = seed, shuffle, 0
        self._communicator = communicator if communicator is not None else Communicator()
        if int(self._lengths.max(initial=0)) > tokens:
            longest = int(self._lengths.argmax())
            raise CapacityError(
                f"sample {longest} has {self._lengths[longest]} tokens, a microbatch takes {tokens}: raise `tokens` "
                "or cut the sample"
            )

    def set_epoch(self, epoch: int) -> None:
        """Another order, for the next iteration over the loader."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[PlannedBatch]:
        groups = self._iterations()
        with ThreadPoolExecutor(1, "apportion-plan") as thread:
            ahead = thread.submit(self._plan, groups[0]) if groups else None
            for number in range(len(groups)):
                planned = ahead.result() if ahead else []
                ahead = thread.submit(self._plan, groups[number + 1]) if number + 1 < len(groups) else None
                yield from self._yielded(number, planned)

    def __len__(self) -> int:
        """Microbatches of an epoch."""
        return sum(map(len, self._iterations()))

    def _iterations(self) -> list[list[Ints]]:
        """Sample numbers of each microbatch of each iteration; microbatches are filled in order."""
        order = np.arange(len(self._lengths))
        if self._shuffle:
            np.random.Generator(np.random.PCG64([self._seed, self._epoch])).shuffle(order)
        batches = _filled(order, self._lengths[order], self._tokens)
        step = self._microbatches
        return [batches[i : i + step] for i in range(0, len(batches), step)]

    def _plan(self, group: Sequence[Ints]) -> list[_Planned]:
        if self._packs:
            return self._packed(np.concatenate(group), len(group))
        from apportion.planner.api import plan

        batches = [Batch.from_lengths(self._lengths[samples], self._mask) for samples in group]
        plans = (plan(batch, self._cluster, self._model, self._recipe, self._seed) for batch in batches)
        slices = (made.for_rank(self._communicator.rank) for made in plans)
        return [_Planned(*parts) for parts in zip(group, batches, slices, strict=True)]

    def _packed(self, samples: Ints, microbatches: int) -> list[_Planned]:
        """The samples of an iteration, packed anew into as many microbatches by the recipe's pack step."""
        from apportion.planner.iterate import plan_iteration

        batch = Batch.from_lengths(self._lengths[samples], self._mask)
        recipe = _packing(self._recipe, microbatches, -(-self._tokens // self._cluster.ranks))
        made = plan_iteration(batch, self._cluster, self._model, recipe, self._seed)
        slices = made.for_rank(self._communicator.rank)
        return [
            _Planned(samples[index], batch.take(index), piece)
            for index, piece in zip(made.indexes, slices, strict=True)
        ]

    def _yielded(self, iteration: int, planned: list[_Planned]) -> Iterator[PlannedBatch]:
        valid = sum(int((item.batch.labels() >= 0).sum()) for item in planned)
        for number, item in enumerate(planned):
            handle = PlanHandle(item.piece, self._communicator)
            tokens, labels = local_rows(item.piece, item.batch, self._reader(item.samples))
            last = number == len(planned) - 1
            yield PlannedBatch(tokens, handle.position_ids, labels, handle, iteration, number, last, valid)

    def _reader(self, samples: Ints) -> Callable[[int], ArrayLike | Tensor]:
        return lambda sequence: self._dataset[int(samples[sequence])]


@dataclass(frozen=True)
class _Planned:
    """One microbatch: the sample of each sequence of the batch, and this rank's slice of the plan."""

    samples: Ints
    batch: Batch
    piece: Slice


def _packing(recipe: Recipe, microbatches: int, tokens_per_rank: int) -> Recipe:
    """The recipe with the loader's figures in its pack step. Raises ConfigError where that would defer samples."""
    steps = recipe.to_data()["steps"]
    ((name, params),) = steps["pack"].items()
    if params.get("defer"):
        rule = "the loader reads every sample in its iteration"
        raise ConfigError(
            f"recipe.pack.{name}.defer", True, rule, "use plan_iteration and keep what it defers"
        )
    ours = {"microbatches": microbatches, "tokens_per_rank": tokens_per_rank}
    return Recipe(recipe.name, {**steps, "pack": {name: {**params, **ours}}})


def _checked_lengths(dataset: Dataset, lengths: ArrayLike) -> Ints:
    listed = lengths if isinstance(lengths, list | tuple | range) else np.asarray(lengths)
    checked = integers("lengths", listed, 1, MAX_TOKENS)
    held = len(dataset) if isinstance(dataset, Sized) else "an unknown number of"
    if held != len(checked):
        rule = f"there must be one for each sample, and the dataset has {held} samples"
        raise ConfigError("lengths", f"{len(checked)} lengths", rule, "give the length of each sample")
    return checked


def _filled(order: Ints, lengths: Ints, tokens: int) -> list[Ints]:
    """Consecutive samples, as many as fit into `tokens`, microbatch by microbatch."""
    stops = np.cumsum(lengths)
    batches, begin = [], 0
    while begin < len(order):
        before = int(stops[begin - 1]) if begin else 0
        end = int(np.searchsorted(stops, before + tokens, side="right"))
        batches.append(order[begin:end])
        begin = end
    return batches
