"""Reads a rank's rows of a planned microbatch from its samples: tokens, labels and other fields per token.

Labels are shifted before sharding: the label of a rank's last row may be a token that another rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.masks.predecessors import is_ordered, lower_links
from apportion.ir.request.batch import Batch
from apportion.trainer.loading.iterations import Iteration
from apportion.trainer.step.microbatch import IGNORED, WEIGHTS

Sample = ArrayLike | Tensor | Mapping[str, Any]

TOKENS, LABELS, LENGTHS = "input_ids", "labels", "seq_lengths"
SHIFTED = (LABELS, WEIGHTS)
MROPE = "mrope_position_ids"  # [length, 3]
NOWHERE = -1  # sample, and position in it, of padding
_COMPARED = 16  # shared samples to compare between ranks, per microbatch
_WIDE = 16  # values of a field to compare, per token
#: loss masks: 1 for tokens to learn, 0 for others; all masks of a sample apply
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
#: fields that carry no information if every entry has this value
_NEUTRAL_VALUES = {"attention_mask": 1, "token_type_ids": 0}
_BY_MASK = "the plan's mask defines it: samples have no padding and no positions of their own"
_DOCUMENTS = "give the loader `masks`, such as documents([lengths])"
_PACKED = "give the loader ap.Samples(dataset), which makes documents of it"
_NOT_APPLIED = "of this name would not be applied"
#: fields that would change the result but do not reach the model, or that have another name in other packages
_RULES = (
    ("attention_mask padding_mask pad_mask key_padding_mask", _BY_MASK, "remove padding, and give `masks`"),
    ("position_ids cu_seqlens cu_seq_lens_q cu_seq_lens_k seq_idx", _BY_MASK, _PACKED),
    ("segment_ids segment_id document_ids document_id doc_ids sequence_ids", _BY_MASK, _DOCUMENTS),
    ("token_type_ids", "no layer would receive it", "leave it out if the model does not need it"),
    ("completion_masks assistant_mask assistant_tokens_mask", f"a mask {_NOT_APPLIED}", "name it loss_mask"),
    ("loss_masks label_mask labels_mask", f"a mask {_NOT_APPLIED}", "name it loss_mask, 1 for learnt ones"),
    ("weight weights loss_weight", f"weights {_NOT_APPLIED}", f"name them {WEIGHTS}, or anything else"),
    ("shift_labels label_ids label target targets target_ids", f"labels {_NOT_APPLIED}", "name them labels"),
    ("prompt_mask", "is 1 for tokens not to learn", "give completion_mask, which is 1 elsewhere"),
    ("inputs_embeds", "rows are looked up by token id", "leave it out"),
    (
        "pixel_values",
        "images belong to no token",
        "give the loader ap.Media, or embeddings of your own as `image`",
    ),
)
_REFUSED = {name: (rule, remedy) for names, rule, remedy in _RULES for name in names.split()}


class Dataset(Protocol):
    """Map-style. A sample is a 1-d array or tensor of token ids, or a mapping: `input_ids`, and any field that has an
    entry for each token, [length, ...]; `labels` are aligned with their own tokens, as in Hugging Face, with -100 for
    tokens not to learn, and so are `completion_mask`, `assistant_masks` and `loss_mask`: a label is dropped if one of
    them is 0. A dataset may have `lengths`, integers [n], and `masks`."""

    def __getitem__(self, index: int, /) -> Sample: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Form:
    """Form of rows. shifted: fields that belong to the predicted token, like labels. multiple: the number of rows is
    padded to a multiple of it, at least one row; None: no padding. envelope: sizes to which rows, and buffers and
    tables of handles, are padded. vocabulary: the number of token ids, if known."""

    shifted: Collection[str] = SHIFTED
    multiple: int | None = None
    envelope: Envelope = UNPADDED
    vocabulary: float = math.inf

    def padded(self, rows: int) -> int:
        """The number of rows with padding."""
        if self.multiple is not None:
            rows = -(-max(rows, 1) // self.multiple) * self.multiple
        return self.envelope.size("rows", rows)


class Rows(NamedTuple):
    """A rank's rows of a microbatch, [rows] int64 each; fields: other fields of its samples, [rows, ...]. Padding comes
    last: token 0, no label, sample -1. shared: (number, checksum) of the longest samples of which other ranks
    also hold a part, and of the first sample of a pass."""

    tokens: Tensor
    labels: Tensor
    sample_ids: Tensor
    local_to_sample: Tensor
    fields: dict[str, Tensor]
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def label_count(self) -> int:
        """The number of rows with a label."""
        return int((self.labels != IGNORED).sum())

    @property
    def weight(self) -> float:
        """The sum of loss weights of rows with a label, 1 each by default."""
        weights = self.fields.get(WEIGHTS)
        if weights is None:
            return float(self.label_count)
        return float(weights[self.labels != IGNORED].double().sum())

    @property
    def form(self) -> str:
        """Names, dtypes and widths of the fields."""
        return _form(self.fields)


def local_rows(
    piece: Slice,
    batch: Batch,
    read: Callable[[int], Sample],
    samples: Ints | None = None,
    form: Form = Form(),
    begins: bool = False,
) -> Rows:
    """The rows of the slice's rank. `read(i)` returns sequence i of the batch; it is called once for each sequence that
    the rank holds, or for one if it holds none; samples: the number of each sequence in the dataset, by default its
    index; begins: True to compare sequence 0 between all ranks, whose datasets may be in a different order. Raises
    ExecutionError if a sample has a different length or fields, or the plan is for another batch."""
    spans = piece.layout(piece.header.home_layout).spans
    _check_batch(spans, batch)
    numbers = np.arange(len(batch.lengths)) if samples is None else np.asarray(samples)
    sequences = _SequenceReader(read, batch, numbers)
    parts = list[Rows]()
    columns = (spans[name].tolist() for name in ("row", "token", "length", "sequence"))
    for _, token, length, sequence in sorted(zip(*columns, strict=True)):
        start = int(batch.starts[sequence])
        targets = batch.labels(token, token + length)
        targets = np.where(targets >= 0, targets - start, NOWHERE)
        parts.append(
            _sample_rows(sequences.of(sequence), int(numbers[sequence]), token - start, targets, form.shifted)
        )
    if unknown := {*form.shifted} - {*SHIFTED, *sequences.any_sample().fields}:
        rule, remedy = "must be a field of the samples", "correct its name, or leave it out"
        raise ConfigError("shifted", min(unknown), rule, remedy)
    empty = _sample_rows(sequences.any_sample(), NOWHERE, 0, np.zeros(0, np.int64), form.shifted)
    return _concatenate([empty, *parts], form)._replace(
        shared=_shared(spans, batch, sequences, numbers, begins)
    )


def _sample_rows(sample: _Sample, number: int, first: int, targets: Ints, shifted: Collection[str]) -> Rows:
    """Rows of the sample's tokens from `first` on. targets: index of the token that each row predicts; -1: none."""
    count, target = len(targets), torch.from_numpy(targets)
    fields = {
        name: _take_or_missing(values, target, 0) if name in shifted else values[first : first + count]
        for name, values in sample.fields.items()
    }
    labels, ids = _take_or_missing(sample.labels, target, IGNORED), torch.full((count,), number)
    return Rows(sample.tokens[first : first + count], labels, ids, torch.arange(first, first + count), fields)


def _concatenate(parts: Sequence[Rows], form: Form) -> Rows:
    """Concatenates the parts, followed by padding. Raises ConfigError for a token beyond the vocabulary."""
    for part in parts:
        if len(part.tokens) and (token := int(part.tokens.max())) >= form.vocabulary:
            rule, remedy = f"the model has {form.vocabulary} embeddings", "use its tokenizer, or resize them"
            raise ConfigError(f"sample {int(part.sample_ids[0])}: {TOKENS}", token, rule, remedy)
    rows = sum(len(part.tokens) for part in parts)
    padding = form.padded(rows) - rows

    def column(tensors: Iterable[Tensor], fill: int) -> Tensor:
        joined = torch.cat([*tensors])
        return torch.cat((joined, joined.new_full((padding, *joined.shape[1:]), fill)))

    columns = zip(*(part[:4] for part in parts), strict=True)
    tokens, labels, ids, positions = map(column, columns, (0, IGNORED, NOWHERE, NOWHERE))
    fields = {name: column((part.fields[name] for part in parts), 0) for name in parts[0].fields}
    return Rows(tokens, labels, ids, positions, fields)


def rows_of(
    dataset: Dataset, iteration: Iteration, piece: IterationSlice, form: Form, begins: bool
) -> Iterator[Rows]:
    """Yields the rows of each microbatch of an iteration, read lazily. begins: whether it is the pass' first.
    Raises `local_rows`' errors; ExecutionError if the plan is for other batches."""
    iteration.check(piece)
    parts = zip(piece.slices, iteration.parts(piece.indexes), strict=True)
    for number, (part, (batch, samples)) in enumerate(parts):

        def read(sequence: int, samples: Ints = samples) -> Sample:
            return dataset[int(samples[sequence])]

        rows = local_rows(part, batch, read, samples, form, begins and number == 0)
        if iteration.repeats:
            labels, ids = torch.full_like(rows.labels, IGNORED), torch.full_like(rows.sample_ids, NOWHERE)
            rows = rows._replace(labels=labels, sample_ids=ids)
        yield rows


def _shared(
    spans: Any, batch: Batch, sequences: _SequenceReader, numbers: Ints, begins: bool
) -> tuple[tuple[int, int], ...]:
    counts = np.bincount(spans["sequence"], spans["length"], len(batch.lengths))
    parts = np.flatnonzero((counts > 0) & (counts < batch.lengths))
    longest = parts[np.argsort(-batch.lengths[parts], kind="stable")][:_COMPARED].tolist()
    first = [(int(numbers[0]), sequences.load(0).checksum)] if begins else []
    return (*first, *((int(numbers[i]), sequences.of(i).checksum) for i in longest))


@dataclass(frozen=True)
class _Sample:
    tokens: Tensor
    labels: Tensor  # the tokens if the sample has no labels
    fields: dict[str, Tensor]

    @property
    def checksum(self) -> int:
        """Checksum of the values of all tokens; of wide fields, of some tokens only."""
        result = 0
        for _, tensor in sorted({**self.fields, TOKENS: self.tokens, LABELS: self.labels}.items()):
            sampled = tensor.flatten()[:: 1 + tensor[:1].numel() // _WIDE].contiguous()
            result = crc32(sampled.view(torch.uint8).numpy().tobytes(), result)
        return result


@dataclass
class _SequenceReader:
    """Reads and checks the sequences of a microbatch, each once. numbers: sample numbers in the dataset."""

    read: Callable[[int], Sample]
    batch: Batch
    numbers: Ints
    _samples: dict[int, _Sample] = field(default_factory=dict)

    def load(self, sequence: int) -> _Sample:
        """The sample, without comparing its fields with those of the rank's other samples."""
        return self._samples.get(sequence) or self._read(sequence)

    def of(self, sequence: int) -> _Sample:
        if sequence not in self._samples:
            sample = self._read(sequence)
            first = next(iter(self._samples.values()), sample)
            if (form := _form(sample.fields)) != (first_form := _form(first.fields)):
                raise ExecutionError(
                    f"sample {self.numbers[sequence]} has the fields {form}, another of its microbatch {first_form}: "
                    "give all samples the same fields, of the same dtype and width"
                )
            self._samples[sequence] = sample
        return self._samples[sequence]

    def _read(self, sequence: int) -> _Sample:
        number, raw = int(self.numbers[sequence]), self.read(sequence)
        sample = _sample(raw, int(self.batch.lengths[sequence]), number)
        if isinstance(raw, Mapping) and raw.get(LENGTHS) is not None:
            self._check_documents(sequence, number, raw[LENGTHS])
        if (positions := sample.fields.get(MROPE)) is not None and positions.dim() == 2:
            self._check_branches(sequence, number, positions)
        return sample

    def _check_documents(self, sequence: int, number: int, lengths: Any) -> None:
        """Raises ConfigError if the documents of a packed row are not those of its mask."""
        first, last = self.batch.starts[sequence : sequence + 2]
        breaks = self.batch.position_breaks()
        starts = breaks[(breaks >= first) & (breaks < last) & (self.batch.position_at(breaks) == 0)]
        planned = np.diff(starts, append=last).tolist()
        if (given := np.asarray(lengths).tolist()) != planned:
            rule = f"was planned with documents of {planned} tokens"
            remedy = f"{_PACKED}, or the masks of the samples that it wraps"
            raise ConfigError(f"sample {number}: {LENGTHS}", given, rule, remedy)

    def _check_branches(self, sequence: int, number: int, positions: Tensor) -> None:
        """Raises ConfigError if the positions of a branch do not continue those of its parent."""
        masks = next(iter(self.batch.masks.values()))
        if not is_ordered(spec := masks.specs[masks.index[sequence]]):
            return
        links = lower_links(spec, self.batch.lengths[[sequence]], np.zeros(1, np.int64))
        first, last = (torch.from_numpy(column[links[1] >= 0]) for column in links)
        if (positions[first] != positions[last].amax(1, keepdim=True) + 1).any():
            rule, remedy = (
                "must continue from the parent of each branch",
                "pass the tree to hf_vision.mrope as mask=",
            )
            raise ConfigError(f"sample {number}: {MROPE}", "other positions", rule, remedy)

    def any_sample(self) -> _Sample:
        """Any sequence, to get the fields."""
        return next(iter(self._samples.values())) if self._samples else self.of(0)


def _form(fields: Mapping[str, Tensor]) -> str:
    texts = (f"{name} {values.dtype} {list(values.shape[1:])}" for name, values in sorted(fields.items()))
    return ", ".join(texts).replace("torch.", "") or "none"


def _take_or_missing(values: Tensor, index: Tensor, missing: int) -> Tensor:
    """values[index], with `missing` for an index of -1."""
    result = values[index.clamp(min=0)]
    result[index < 0] = missing
    return result


def _check_batch(spans: Any, batch: Batch) -> None:
    """Raises ExecutionError if a span exceeds its sequence."""
    sequence, token = spans["sequence"], spans["token"].astype(np.int64)
    is_known = sequence < len(batch.lengths)
    index = np.where(is_known, sequence, 0)
    ends = token + spans["length"]
    if not (is_known & (token >= batch.starts[index]) & (ends <= batch.starts[index + 1])).all():
        message = f"the plan is not for this batch of {len(batch.lengths)} sequences"
        raise ExecutionError(f"{message}: the run was started with different samples")


def _sample(sample: Sample, length: int, number: int) -> _Sample:
    """The tokens, labels and fields of the dataset's sample of this number. Raises ConfigError, ExecutionError."""
    sample = sample if isinstance(sample, Mapping) else {TOKENS: sample}
    label = f"sample {number}"
    if TOKENS not in sample:
        rule, remedy = f"must have {TOKENS}, the token ids", "name them so"
        raise ConfigError(label, sorted(map(str, sample)), rule, remedy)
    tokens = _to_int64(f"{label}: {TOKENS}", sample[TOKENS])
    if tokens.shape != (length,):
        rule = f"has shape {tuple(tokens.shape)}, but was planned with length {length}"
        raise ExecutionError(
            f"{label} {rule}: give the loader the lengths that samples have when they are read"
        )
    _refuse_unapplied(label, sample, length)
    dropped = (TOKENS, LABELS, LENGTHS, *_NEUTRAL_VALUES, *LOSS_MASKS)
    fields = {
        name: _field(f"{label}: {name}", sample[name], length) for name in sample if name not in dropped
    }
    labels = _field(f"{label}: {LABELS}", _to_int64(f"{label}: {LABELS}", sample.get(LABELS, tokens)), length)
    for name, ids in ((TOKENS, tokens), (LABELS, labels.where(labels != IGNORED, 0))):
        if length and int(ids.min()) < 0:
            rule, remedy = "must not be negative", f"use the label {IGNORED} for tokens not to learn"
            raise ConfigError(f"{label}: {name}", int(ids.min()), rule, remedy)
    _check_alignment(label, tokens, labels)
    for name in filter(sample.__contains__, LOSS_MASKS):
        labels = labels.where(_read_mask(f"{label}: {name}", sample[name], length), IGNORED)
    return _Sample(tokens, labels, fields)


def _check_alignment(label: str, tokens: Tensor, labels: Tensor) -> None:
    """Raises ConfigError for labels that are shifted already: each equals the next token instead of its own."""
    is_own, is_next = (labels[:-1] == tokens[:-1], labels[:-1] == tokens[1:])
    is_label = labels[:-1] != IGNORED
    if int(is_label.sum()) > 3 and is_next[is_label].all() and not is_own[is_label].all():
        rule = "belong to the next token already, and would be shifted again"
        remedy = "align each label with its own token"
        raise ConfigError(f"{label}: {LABELS}", "shifted", rule, remedy)


def _refuse_unapplied(label: str, sample: Mapping[str, Any], length: int) -> None:
    """Raises ConfigError for a field that should change the result, but would not be applied."""
    for name in filter(sample.__contains__, _REFUSED):
        path = f"{label}: {name}"
        if name in _NEUTRAL_VALUES and (_field(path, sample[name], length) == _NEUTRAL_VALUES[name]).all():
            continue
        raise ConfigError(path, "given", *_REFUSED[name])


def _read_mask(name: str, value: Any, length: int) -> Tensor:
    """Converts a mask of ones and zeros to bool [length]. Raises ConfigError."""
    mask = _field(name, value, length)
    if mask.dim() != 1 or not bool(((mask == 0) | (mask == 1)).all()):
        rule = "must be 1 for tokens to learn, else 0"
        raise ConfigError(name, "other entries", rule, "give other weights as loss_weights")
    return mask == 1


def _to_int64(name: str, value: Any) -> Tensor:
    """Converts to int64. Raises ConfigError for anything but integers."""
    tensor = _tensor(value)
    if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = type(value).__name__ if tensor is None else tensor.dtype
        raise ConfigError(name, kind, "must be integers", "give token ids")
    return tensor.long()


def _tensor(value: Any) -> Tensor | None:
    """Converts to a CPU tensor; None for values that are not arrays of numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.array(value)
        return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" else array)
    except (TypeError, ValueError):
        return None


def _field(name: str, value: Any, length: int) -> Tensor:
    tensor = _tensor(value)
    if tensor is None or tensor.dim() == 0 or len(tensor) != length:
        shape = type(value).__name__ if tensor is None else f"shape {tuple(tensor.shape)}"
        rule = f"must have an entry for each of the {length} tokens"
        raise ConfigError(name, shape, rule, "leave out fields of the whole sample, or repeat them per token")
    return tensor
