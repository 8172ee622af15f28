"""Images, videos and sound of samples: an encoder's microbatches next to the decoder's.

    dataset    sample 5: text, tokens for image 7, text, tokens for image 8        `places` (5, 12), (5, 90)
    media      image 7, image 8: patches, read by the ranks to which the encoder's plan assigns them

The media of a microbatch's samples, in their order, are one batch of the encoder, which is planned like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Ints, group_of, index_in_group, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.fields import instance, integer, integers
from apportion.ir.masks.specs import full
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.sampling import Masks
from apportion.trainer.loading import arguments
from apportion.trainer.loading.iterations import BatchBuilder, Draw
from apportion.trainer.loading.rows import LABELS, TOKENS, Dataset
from apportion.trainer.step.microbatch import IGNORED


@dataclass(frozen=True, eq=False)
class Media(Dataset):
    """Inputs of an encoder in front of the model: images, videos, sound; the loader plans them too.

    dataset: map-style; medium i is a mapping of fields with an entry for each of its rows (patches, frames), [rows,
    ...], all with the same fields. lengths: rows of each medium, integers, by default the dataset's. model: the
    encoder's attention heads. places: integers [media, 2]: the sample of each, and the first token that stands for it;
    each token stands for `merge` rows. orders: for each medium int64 [tokens], the index of the token that each
    `merge` rows stand for; by default in order. masks: one for all or one for each; by default all rows of a medium
    see each other. recipe, hardware: as for the loader. Raises ConfigError if media do not fit.
    """

    dataset: Any
    model: Model
    places: ArrayLike
    merge: int = 1
    lengths: ArrayLike | None = None
    orders: Sequence[ArrayLike] | None = None
    masks: Masks = None
    recipe: Recipe | Policy | str | None = None
    hardware: Hardware | str | None = None

    def __post_init__(self) -> None:
        instance("media.model", self.model, Model)
        merge, lengths = integer("media.merge", self.merge), arguments.lengths_of(self.dataset, self.lengths)
        places = np.asarray(self.places)
        if places.shape != (len(lengths), 2):
            rule, remedy = (
                f"must be [{len(lengths)}, 2]",
                "pass the sample and the first token of each medium",
            )
            raise ConfigError("media.places.shape", places.shape, rule, remedy)
        if (odd := np.flatnonzero(lengths % merge)).size:
            rule = f"must be a multiple of merge = {merge}"
            raise ConfigError(f"media.lengths[{odd[0]}]", int(lengths[odd[0]]), rule, "give whole tokens")
        places = integers("media.places", places.ravel(), 0).reshape(-1, 2)
        masks = arguments.masks_of(self.dataset, self.masks)
        masks = full() if masks is None else masks
        for name, value in (("lengths", lengths), ("places", places), ("masks", masks)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(np.asarray(self.lengths))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A medium as a sample of the encoder's loader: rows are tokens without labels."""
        rows = int(np.asarray(self.lengths)[index])
        return {TOKENS: np.zeros(rows, np.int64), LABELS: np.full(rows, IGNORED), **self.dataset[index]}


@dataclass
class MediaOrder:
    """The media of a decoder's microbatches; as the encoder's sampler, it yields the media of each microbatch that
    has some. draw, start: the pass's samples and first iteration."""

    media: Media
    builder: BatchBuilder
    draw: Draw | None = None
    start: int = 0

    def __post_init__(self) -> None:
        self._tokens: Ints = np.asarray(self.media.lengths) // self.media.merge
        (sample, token), count = np.asarray(self.media.places).T, self._tokens
        self._order = np.lexsort((token, sample))
        sample, token, count = sample[self._order], token[self._order], count[self._order]
        lengths = self.builder.lengths
        integers("media.places", sample, 0, len(lengths) - 1)
        limit = np.append(token[1:], 0)
        limit = np.where(np.append(sample[1:], -1) == sample, limit, lengths[sample])
        if (overflow := np.flatnonzero(token + count > limit)).size:
            first = int(overflow[0])
            rule = f"covers tokens up to {token[first] + count[first]}, but the limit is {limit[first]}"
            remedy = "give each medium one token of its sample for each `merge` rows"
            place = [int(sample[first]), int(token[first])]
            raise ConfigError(f"media.places[{self._order[first]}]", place, rule, remedy)
        self._first = np.searchsorted(sample, np.arange(len(lengths) + 1))

    def __iter__(self) -> Iterator[list[int]]:
        for number, drawn in enumerate(islice(self.draw or (), self.start, None), self.start):
            for group in self.builder.samples(number, drawn):
                if len(selected := self.of(group)[0]):
                    yield selected.tolist()

    def of(self, samples: Ints) -> tuple[Ints, Ints]:
        """Media of these samples, in order, and the index of each one's sample: int64 [n] each."""
        counts = np.diff(self._first)[samples]
        group = group_of(counts)
        return self._order[self._first[samples][group] + index_in_group(counts)], group

    def places(self, batch: Batch, samples: Ints) -> Ints:
        """int64 [n, 3], as `EncoderFeed` takes them. batch: their sequences, without padding."""
        selected, group = self.of(samples)
        tokens = self._tokens[selected]
        first = batch.starts[group] + np.asarray(self.media.places)[selected, 1]
        if self.media.orders is None:
            return np.stack([first, offsets(tokens * self.media.merge)[:-1], tokens], 1)
        orders = [self._order_of(medium) for medium in selected.tolist()]
        token = np.concatenate(orders) + np.repeat(first, tokens)
        starts = np.flatnonzero(np.append(True, np.diff(token) != 1))
        return np.stack([token[starts], starts * self.media.merge, np.diff(np.append(starts, len(token)))], 1)

    def _order_of(self, medium: int) -> Ints:
        order, tokens = np.asarray((self.media.orders or ())[medium]), int(self._tokens[medium])
        if not np.array_equal(np.sort(order), np.arange(tokens)):
            rule = f"must name each of its {tokens} tokens once"
            raise ConfigError(f"media.orders[{medium}]", order.tolist()[:8], rule, "give a permutation")
        return order
