"""Dataset wrappers for the loader: lengths and masks from columns, overlong samples, and streams.

    Hugging Face Dataset, or any map-style one ──Samples──► samples, `lengths`, `masks` ──► PlannedLoader
    iterable ──`buffer` samples──► Samples ──► PlannedLoader, one pass ──► the next buffer

A packed row marks its documents by `seq_lengths` (trl) or by `position_ids` that restart (axolotl, transformers); the
documents become a mask of the row. Samples keep `seq_lengths`, which the loader compares with the planned mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Unpack
from warnings import warn

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.specs import causal, documents
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.sampling import MaskSpec, find_overlong
from apportion.trainer.loading.arguments import check_map_style, masks_of, own_masks
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import DISCARDS, LoaderOptions, PlannedLoader
from apportion.trainer.loading.rows import LENGTHS, TOKENS, Dataset

POSITIONS, ATTENTION = "position_ids", "attention_mask"
_READ = 1000  # samples to read at a time


class Samples(Dataset):
    """A map-style dataset for the loader that reads `lengths` and `masks` from its columns.

        ap.PlannedLoader(ap.Samples(dataset, limit=8 * 8192, overlong="cut"), cluster, model, 8192)

    dataset: a Hugging Face `Dataset`, or anything with `[i]` and `len`; samples as in the loader's `Dataset`, and
    packed rows with `seq_lengths` or `position_ids`. columns: the ones that samples keep, by default all but these two.
    mask: of each document, or one for each attention kind; causal by default. limit: maximum tokens of a sample, such
    as the capacity of a microbatch on all ranks; overlong: how longer ones are handled: "refuse" raises CapacityError,
    "cut" keeps their first tokens, "drop" leaves them out. `cut` and `dropped` count them; `kept`: int64, the index in
    the dataset of each sample. Raises ConfigError if documents do not make up their row, and for a dataset with
    `masks`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        columns: Collection[str] | None = None,
        mask: MaskSpec | None = None,
        limit: int | None = None,
        overlong: str = "refuse",
    ) -> None:
        if own_masks(dataset) is not None:
            rule = "would be ignored: samples have the mask of the argument `mask`"
            remedy = "pass mask=, or the dataset itself to the loader"
            raise ConfigError("masks", "of the dataset", rule, remedy)
        check_map_style(dataset)
        self._dataset, self._columns, self._mask = dataset, columns, mask
        packs = list(_packs(dataset))
        longest = np.array([sum(pack) for pack in packs], np.int64)
        limit = self._limit = None if limit is None else integer("limit", limit)
        is_overlong = find_overlong(longest, MAX_TOKENS if limit is None else limit, overlong)
        self.dropped, self.cut = (int(is_overlong.sum()) * (overlong == option) for option in ("drop", "cut"))
        self.kept: Ints = np.flatnonzero(~is_overlong) if overlong == "drop" else np.arange(len(packs))
        self._found = longest[self.kept]  # before cutting
        packs = [_truncate(packs[i], limit) for i in self.kept.tolist()]
        self.lengths: Ints = np.array([sum(pack) for pack in packs], np.int64)
        self._has_packs = any(len(pack) > 1 for pack in packs)
        self.masks = [_mask_of(pack, mask) for pack in packs] if self._has_packs else masks_of(dataset, mask)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        sample: Any = self._dataset[int(self.kept[index])]
        if not isinstance(sample, Mapping):
            return self._cut(index, sample)
        names = set(sample if self._columns is None else self._columns) - {LENGTHS, POSITIONS}
        fields = {name: sample[name] for name in sample if name in names}
        if sample.keys() & {LENGTHS, POSITIONS} and np.asarray(fields.get(ATTENTION, 1)).all():
            fields.pop(ATTENTION, None)  # some packers number the documents in it
        result = {name: self._cut(index, value) for name, value in fields.items()}
        pack = _truncate(_pack(int(self.kept[index]), sample), self._limit)
        return result | {LENGTHS: pack} if self._has_packs or len(pack) > 1 else result

    def _cut(self, index: int, value: Any) -> Any:
        """Cuts a value with an entry for each token of an overlong sample; the loader refuses other lengths."""
        found, length = int(self._found[index]), int(self.lengths[index])
        return value[:length] if length < found and np.ndim(value) and len(value) == found else value


def _packs(dataset: Dataset) -> Iterator[list[int]]:
    """Yields the lengths of each sample's documents. A transform may change them, so its results are read."""
    names = getattr(dataset, "column_names", None)
    if names is None or getattr(dataset, "format", {"type": "custom"})["type"] == "custom":
        for i in range(len(dataset)):
            sample = dataset[i]
            yield _pack(i, sample if isinstance(sample, Mapping) else {TOKENS: sample})
        return
    present = [name for name in (TOKENS, LENGTHS, POSITIONS) if name in names]
    if TOKENS not in present:
        rule = f"must have a column {TOKENS}, the token ids"
        raise ConfigError("dataset", names, rule, "tokenize it first")
    number = 0
    for table in dataset.select_columns(present).with_format("arrow").iter(_READ):  # type: ignore[attr-defined]
        columns = {name: table[name].combine_chunks() for name in present}
        sizes = columns[TOKENS].value_lengths().to_pylist()
        for row, size in enumerate(sizes):
            others = {name: columns[name][row].values for name in present if name != TOKENS}
            marks = {name: value.to_numpy() for name, value in others.items() if value is not None}
            yield _pack(number, {TOKENS: None if size is None else range(size), **marks})
            number += 1


def _pack(number: int, sample: Mapping[str, Any]) -> list[int]:
    """The lengths of a sample's documents; its own length if it marks none. Raises ConfigError."""
    # a Dataset that was concatenated has None where a part lacks a column
    sample = {name: value for name, value in sample.items() if value is not None}
    if not isinstance(sample.get(TOKENS), Sized):
        rule = f"must have {TOKENS}, its token ids"
        raise ConfigError(f"sample {number}", sorted(map(str, sample)), rule, "tokenize it first")
    tokens = len(sample[TOKENS])
    lengths = np.asarray(sample.get(LENGTHS, [tokens]))
    if LENGTHS in sample and (lengths.min(initial=1) < 1 or lengths.sum() != tokens):
        rule = f"must be positive lengths that add up to its {tokens} tokens"
        raise ConfigError(f"sample {number}: {LENGTHS}", lengths.tolist(), rule, "pack it again")
    if POSITIONS in sample:
        positions = np.asarray(sample[POSITIONS])
        if LENGTHS not in sample and positions.shape == (tokens,):
            lengths = np.diff(np.flatnonzero(positions == 0), append=tokens)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        if len(starts) != tokens or not np.array_equal(np.arange(tokens) - starts, positions):
            rule = f"must count from 0 in each document of its {tokens} tokens"
            raise ConfigError(
                f"sample {number}: {POSITIONS}", "other positions", rule, "give ap.masks instead"
            )
    return list(lengths.tolist())


def _truncate(pack: Sequence[int], limit: int | None) -> list[int]:
    """The documents of the first `limit` tokens."""
    if limit is None or sum(pack) <= limit:
        return list(pack)
    stops = np.minimum(np.cumsum(pack), limit)
    return [size for size in np.diff(stops, prepend=0).tolist() if size]


def _mask_of(pack: Sequence[int], mask: MaskSpec | None) -> MaskSpec | None:
    """Applies `mask` to each document."""
    if len(pack) == 1:
        return mask
    if isinstance(mask, Mapping):
        return {kind: documents(pack, spec) for kind, spec in mask.items()}
    return documents(pack, mask if isinstance(mask, Mask) else causal())


# ---- streams

_PLACE = ("epoch", "buffer", "size")
_OF_ALL_SAMPLES = {"lengths", "masks", "sampler", "media"}


class StreamedLoader:
    """Iterates over a stream in planned microbatches; every rank creates one with equal arguments, and reads the whole
    stream.

        for batch in ap.StreamedLoader(stream, cluster, model, tokens_per_rank, buffer=4096, overlong="drop"):

    stream: yields samples as in `Samples`, in the same order on all ranks, restarting for each pass; `set_epoch` is
    called if it exists, and `skip(n)`, which returns the stream without its first n samples, when a pass resumes.
    buffer: number of samples read, shuffled and planned at a time; its last microbatch may be small, so choose many
    times the size of an iteration. mask, limit, overlong: as in `Samples`. options: as in `PlannedLoader`, except those
    about all samples: lengths, masks and sampler. Iterations and samples are numbered within a buffer.

    `state_dict` and `load_state_dict` work as in `PlannedLoader`: a pass resumes after the last batch that was yielded.
    Raises the errors of `Samples` and `PlannedLoader`, and ExecutionError if ranks read different lengths.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        cluster: Cluster,
        model: Model,
        tokens_per_rank: int,
        *,
        buffer: int,
        mask: Any = None,
        limit: int | None = None,
        overlong: str = "refuse",
        **options: Unpack[LoaderOptions],
    ) -> None:
        if unknown := sorted(_OF_ALL_SAMPLES & options.keys()):
            rule = "describes all samples, which a stream does not know in advance"
            raise ConfigError(unknown[0], "given", rule, "leave it out")
        if isinstance(stream, Iterator):
            rule = "allows only one pass, and cannot restart"
            raise ConfigError("stream", type(stream).__name__, rule, "pass an iterable that can restart")
        self._stream, self._size = stream, integer("buffer", buffer)
        self._samples = {"mask": mask, "limit": limit, "overlong": overlong}
        self._job, self._options = (cluster, model, tokens_per_rank), options
        self._epoch = self._number = 0  # of the next buffer
        self._loader: PlannedLoader | None = None
        self._inner: Mapping[str, Any] | None = None  # loader state for the next buffer
        self._begin: tuple[int, Mapping[str, Any] | None] = (0, None)  # number and inner of the next pass
        self.dropped = self.cut = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass over the stream."""
        if integer("epoch", epoch, 0) < self._epoch and self._begin != (0, None):
            warn(DISCARDS.format(epoch, self._epoch), stacklevel=2)
        if epoch != self._epoch:
            self._epoch, self._number, self._inner, self._begin = epoch, 0, None, (0, None)

    def __iter__(self) -> Iterator[PlannedBatch]:
        (self._number, self._inner), self._begin = self._begin, (0, None)
        self._loader, samples = None, self._rest()
        while chunk := list(islice(samples, self._size)):
            self._loader = self._planned(Samples(chunk, **self._samples))
            if self._loader is not None:
                yield from self._loader
            self._number, self._inner = self._number + 1, None
        self._loader = None  # a state saved now is past the last buffer

    def _rest(self) -> Iterator[Any]:
        """The samples from the next buffer on."""
        stream, skipped = self._stream, self._number * self._size
        self._set_epoch_of(stream)
        if skipped and hasattr(stream, "skip"):
            stream, skipped = stream.skip(skipped), 0
            self._set_epoch_of(stream)  # a new stream, whose epoch may be 0
        return islice(iter(stream), skipped, None)

    def _set_epoch_of(self, stream: Any) -> None:
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)

    def _planned(self, samples: Samples) -> PlannedLoader | None:
        """The loader of a buffer; None if all of its samples were dropped, or too few are left for an iteration. Raises
        ConfigError if that is so in the first buffer."""
        self.dropped, self.cut = self.dropped + samples.dropped, self.cut + samples.cut
        if not len(samples):
            return None
        loader = PlannedLoader(samples, *self._job, **self._options)
        loader.set_epoch(self._epoch)
        try:
            len(loader)
        except ConfigError as error:
            if not self._number or error.field not in ("drop_last", "replicas"):
                raise
            return None
        if self._inner is not None:
            loader.load_state_dict(self._inner)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch: JSON-like data, equal on all ranks."""
        inner = self._inner if self._loader is None else self._loader.state_dict()
        return {"epoch": self._epoch, "buffer": self._number, "size": self._size, "loader": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass resume after the last batch yielded before the state was saved. Raises ConfigError
        for a state of another buffer size; a state of another dataset or job raises an error when the pass begins."""
        if not isinstance(state, Mapping) or {*_PLACE, "loader"} - state.keys():
            rule = "is not the state of a stream"
            raise ConfigError("state", state, rule, "pass what `state_dict()` returned")
        if state["size"] != self._size:
            rule = f"the state was saved with a different buffer: this loader has {self._size}"
            raise ConfigError("state.size", state["size"], rule, "give the loader the same buffer")
        self._epoch, self._number = (integer(f"state.{name}", state[name], 0) for name in _PLACE[:2])
        self._inner, self._loader = state["loader"], None
        self._begin = self._number, self._inner
