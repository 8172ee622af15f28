"""Selects the samples of each iteration, in the order that loaders and offline planning share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.fields import choice, integer, integers, keep
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.specs import causal
from apportion.ir.request.batch import Batch
from apportion.ir.request.sequences import Sequence as Sample

#: one spec, or one per attention kind
MaskSpec = Mask | Mapping[str, Mask]
#: one spec for all samples, or one per sample; None: causal
Masks = MaskSpec | Sequence[MaskSpec | None] | None


#: handling of samples with more tokens than a limit
OVERLONG = ("drop", "cut", "refuse")
_REMEDY = (
    'cut or drop longer samples (--overlong cut, in Python ap.Samples(dataset, limit={}, overlong="cut"))'
)


def find_overlong(lengths: Ints, limit: int, overlong: str) -> Bools:
    """bool [n]: True for samples of more than `limit` tokens, which the caller drops or cuts. Raises CapacityError if
    there are any and `overlong` is "refuse"."""
    is_overlong: Bools = lengths > limit
    if choice("overlong", overlong, OVERLONG) == "refuse" and is_overlong.any():
        first = int(is_overlong.argmax())
        message = f"sample {first} has {lengths[first]} tokens; the limit is {limit}"
        raise CapacityError(f"{message}: {_REMEDY.format(limit)}")
    return is_overlong


@dataclass(frozen=True, eq=False)
class Sampling:
    """Fills microbatches with as many consecutive samples as fit, and iterations with consecutive microbatches.

    lengths: tokens of each sample, integers [n]. tokens: capacity of a microbatch, over all ranks. microbatches: number
    per iteration; the last iteration of an epoch may have fewer. shuffle: use a random order, from seed and epoch
    number. Raises ConfigError, and CapacityError for a sample longer than a microbatch.
    """

    lengths: ArrayLike
    tokens: int
    microbatches: int = 1
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        values = self.lengths if isinstance(self.lengths, list | tuple | range) else np.asarray(self.lengths)
        lengths = integers("lengths", values, 1, MAX_TOKENS)
        object.__setattr__(self, "lengths", lengths)
        keep(self, "microbatches", integer)
        keep(self, "seed", integer, 0)
        keep(self, "tokens", integer, 1, MAX_TOKENS)
        if int(lengths.max(initial=0)) > self.tokens:
            longest = int(lengths.argmax())
            raise CapacityError(
                f"sample {longest} has {lengths[longest]} tokens; a microbatch holds {self.tokens}: raise "
                f"tokens_per_rank, or {_REMEDY.format(self.tokens)}"
            )

    def epoch(self, number: int) -> list[list[Ints]]:
        """The iterations of an epoch, each a list of its microbatches' sample numbers, int64."""
        lengths = np.asarray(self.lengths)
        order = np.arange(len(lengths))
        if self.shuffle:
            np.random.Generator(np.random.PCG64([self.seed, integer("epoch", number, 0)])).shuffle(order)
        batches = _fill_microbatches(order, lengths[order], self.tokens)
        return [batches[i : i + self.microbatches] for i in range(0, len(batches), self.microbatches)]


def _fill_microbatches(order: Ints, lengths: Ints, tokens: int) -> list[Ints]:
    """Fills microbatches of `tokens` tokens with consecutive samples, as many as fit."""
    ends = np.cumsum(lengths)
    batches, first = [], 0
    while first < len(order):
        offset = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, offset + tokens, side="right"))
        batches.append(order[first:end])
        first = end
    return batches


def batches_of(samples: Sequence[Ints], lengths: ArrayLike, masks: Masks, packs: bool) -> tuple[Batch, ...]:
    """The batches to plan for an iteration: one per microbatch, or one of all samples if the recipe packs them itself.
    samples: int64 arrays, the sample numbers of each microbatch. Raises ConfigError."""
    lengths = np.asarray(lengths)
    groups = [np.concatenate(samples)] if packs else samples
    if masks is None or isinstance(masks, Mask | Mapping):
        return tuple(Batch.from_lengths(lengths[group], masks) for group in groups)
    if len(masks) != len(lengths):
        rule = f"there must be one for each of the {len(lengths)} samples"
        raise ConfigError(
            "masks", f"{len(masks)} masks", rule, "give one spec for all, or the mask of each sample"
        )
    return tuple(_masked_batch(group, lengths, masks) for group in groups)


def _masked_batch(group: Ints, lengths: Ints, masks: Sequence[MaskSpec | None]) -> Batch:
    specs = [masks[sample] for sample in group.tolist()]
    if all(spec is None for spec in specs):
        return Batch.from_lengths(lengths[group])
    return Batch.from_sequences(
        Sample(length, causal() if spec is None else spec)
        for length, spec in zip(lengths[group].tolist(), specs, strict=True)
    )
