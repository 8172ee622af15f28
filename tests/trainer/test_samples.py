"""Dataset wrappers for the loader: masks and packed rows, overlong samples, streams."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, Subset

import apportion as ap
from apportion.ir.errors import CapacityError, ConfigError, ExecutionError
from apportion.trainer.step import loss
from apportion.trainer.step.loss import IGNORED
from tests.ranks.loading import job, planning

TOKENS = list(range(10, 18))


def batch_of(*samples: Any, **options: Any) -> ap.PlannedBatch:
    (batch,) = ap.PlannedLoader(ap.Samples(samples), **planning(job()), shuffle=False, **options)
    return batch


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_loss_mask_removes_the_label_of_the_predicted_token(name: str) -> None:
    batch = batch_of({"input_ids": TOKENS, name: [0, 0, 0, 1, 1, 0, 1, 0]})
    assert batch.labels.tolist() == [IGNORED, IGNORED, 13, 14, IGNORED, 16, IGNORED, IGNORED]
    assert batch.valid_tokens == 3
    assert not batch.fields


def test_batches_without_labels_are_told_apart_and_copies_belong_to_the_newest() -> None:
    samples = [{"input_ids": TOKENS, "loss_mask": [0] * len(TOKENS)}] * 4
    batches = [*ap.PlannedLoader(ap.Samples(samples), **planning(job(tokens=8)), shuffle=False)]
    assert [loss.batch_of(batch.labels) for batch in batches] == batches
    assert loss.batch_of(batches[0].labels.clone()) is batches[-1]


def test_loss_masks_and_labels_of_a_sample_are_combined() -> None:
    masks = {"completion_mask": [False] * 4 + [True] * 4, "assistant_masks": [1] * 6 + [0] * 2}
    batch = batch_of({"input_ids": TOKENS, "labels": [*TOKENS[:4], -100, *TOKENS[5:]], **masks})
    assert batch.labels[batch.labels != IGNORED].tolist() == [15]


def test_weights_of_tokens_without_a_label_do_not_count() -> None:
    weights = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    batch = batch_of({"input_ids": TOKENS, "loss_weights": weights, "loss_mask": [0, 0, 1, 0, 1, 0, 0, 0]})
    assert batch.total_weight == 2.0 + 8.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attention_mask", mask) for mask in ([1, 1, 1, 0], [1, 1, 2, 2])),
        *((name, [0, 0, 1, 1]) for name in ("seq_idx", "token_type_ids", "prompt_mask", "position_ids")),
        *((name, [2, 3, 4, -100]) for name in ("shift_labels", "label_ids", "cu_seqlens")),
        *((name, [[1.0]] * 4) for name in ("pixel_values", "inputs_embeds")),
        ("seq_lengths", [2, 2]),
        ("completion_mask", [0.5, 1, 1, 1]),
    ],
)
def test_fields_that_would_be_ignored_are_refused_by_name(name: str, value: Any) -> None:
    dataset = Plain([{"input_ids": TOKENS[:4], name: value}], [4])
    with pytest.raises(ConfigError, match=rf"sample 0: {name}"):
        list(ap.PlannedLoader(dataset, **planning(job())))


class Plain(list[Any]):
    """A list of samples with their lengths."""

    masks: Any = None

    def __init__(self, samples: list[Any], lengths: list[int]) -> None:
        super().__init__(samples)
        self.lengths = lengths


PACKED = [
    {"seq_lengths": [3, 4, 1]},
    {"position_ids": [0, 1, 2, 0, 1, 2, 3, 0]},
    {"position_ids": np.array([0, 1, 2, 0, 1, 2, 3, 0]), "attention_mask": [1, 1, 1, 2, 2, 2, 2, 3]},
]


@pytest.mark.parametrize("packed", PACKED)
def test_a_packed_row_is_split_into_documents(packed: Any) -> None:
    samples = [{"input_ids": TOKENS, **packed}]
    samples_found = ap.Samples(samples)
    assert samples_found.masks == [ap.masks.documents([3, 4, 1])]
    assert ap.Samples(samples, columns=["input_ids", *packed])[0] == {
        "input_ids": TOKENS,
        "seq_lengths": [3, 4, 1],
    }
    batch = batch_of(*samples)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert batch.labels.tolist() == [11, 12, IGNORED, 14, 15, 16, IGNORED, IGNORED]


def test_a_row_that_was_packed_anew_is_refused() -> None:
    samples = [{"input_ids": TOKENS, "seq_lengths": [3, 5]}]
    loader = ap.PlannedLoader(ap.Samples(samples), **planning(job()))
    assert len(list(loader)) == 1
    samples[0]["seq_lengths"] = [5, 3]
    with pytest.raises(ConfigError, match=r"sample 0: seq_lengths = \[5, 3\]: was planned .* \[3, 5\]"):
        list(loader)


class Wrapped(Plain):
    """Samples that kept their lengths and lost their masks."""

    def __init__(self, samples: ap.Samples) -> None:
        super().__init__([samples[i] for i in range(len(samples))], samples.lengths.tolist())


def test_documents_of_samples_in_other_datasets_are_kept_or_refused() -> None:
    samples: Any = ap.Samples([[1, 2], {"input_ids": TOKENS, "seq_lengths": [3, 5]}])
    unpacked: Any = ap.Samples([[3, 4, 5]])
    joined = ConcatDataset([unpacked, Subset(samples, [1]), samples])
    for dataset, positions in (
        (Subset(samples, [1]), [0, 1, 2, 0, 1, 2, 3, 4]),
        (Subset(joined, [1, 0]), [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]),
        (ConcatDataset([unpacked, unpacked]), [0, 1, 2] * 2),
    ):
        (batch,) = ap.PlannedLoader(dataset, **planning(job()), shuffle=False)
        assert batch.position_ids.tolist() == positions
    with pytest.raises(
        ConfigError, match=r"sample 1: seq_lengths = \[3, 5\]: was planned .* \[8\] tokens; .* wraps"
    ):
        list(ap.PlannedLoader(Wrapped(samples), **planning(job())))
    with pytest.raises(ConfigError, match="dataset's masks"):
        ap.PlannedLoader(joined, **planning(job()), masks=ap.masks.causal())


class TokensOnly(Dataset[Any]):
    """A wrapper that keeps the lengths and tokens of its samples, not their documents."""

    def __init__(self, samples: Any) -> None:
        self.base, self.lengths = samples, samples.lengths

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        sample = self.base[index]
        return sample["input_ids"] if isinstance(sample, dict) else sample


class Mixture:
    """The first samples of several datasets."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.lengths = parts, [len(self._tokens(part[0])) for part in parts]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self._tokens(self.parts[index][0])

    @staticmethod
    def _tokens(sample: Any) -> Any:
        return sample["input_ids"] if isinstance(sample, dict) else sample


@pytest.mark.parametrize(
    "samples",
    [
        ap.Samples([TOKENS, {"input_ids": TOKENS, "seq_lengths": [3, 5]}]),
        ap.trees.fold([[1, 2, 3], [1, 2, 4]]),
    ],
    ids=["packed", "forest"],
)
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (TokensOnly, "base"),
        (lambda samples: TokensOnly(TokensOnly(samples)), "base.base"),
        (lambda samples: Subset(TokensOnly(samples), [0]), "dataset.base"),
        (lambda samples: ConcatDataset([TokensOnly(samples)] * 2), "base"),
        (lambda samples: Mixture([[TOKENS], samples]), "parts"),
    ],
)
def test_masks_that_a_wrapper_hides_are_refused(samples: Any, wrap: Any, name: str) -> None:
    dataset = wrap(samples)
    with pytest.raises(ConfigError, match=rf"dataset\.{name}\.masks.*ignored: its wrapper has no masks"):
        ap.PlannedLoader(dataset, **planning(job()))
    with pytest.raises(ConfigError, match=rf"dataset\.{name}\.masks"):  # as an adapter's, of a model's config
        ap.PlannedLoader(dataset, **planning(job()), masks=ap.masks.sliding_window(2))
    with pytest.raises(ConfigError, match="masks"):
        ap.Samples(dataset)
    masks = [ap.masks.causal()] * len(dataset)
    assert len(list(ap.PlannedLoader(dataset, **planning(job()), masks=masks))) == 1


def test_a_wrapper_of_samples_with_one_mask() -> None:
    plain: Any = TokensOnly(ap.Samples([TOKENS]))
    (batch,) = ap.PlannedLoader(plain, **planning(job()))
    assert batch.tokens.tolist() == TOKENS
    window = ap.masks.sliding_window(2)
    dataset: Any = TokensOnly(ap.Samples([TOKENS], mask=window))
    with pytest.raises(ConfigError, match=r"dataset\.base\.masks"):
        ap.PlannedLoader(dataset, **planning(job()))
    assert len(list(ap.PlannedLoader(dataset, **planning(job()), masks=window))) == 1


def test_a_row_without_marks_beside_packed_ones_is_one_document() -> None:
    samples = [{"input_ids": TOKENS, "seq_lengths": [3, 5]}, {"input_ids": TOKENS[:3], "seq_lengths": None}]
    assert ap.Samples(samples).masks == [ap.masks.documents([3, 5]), None]
    batch = batch_of(*samples)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    dataset = Plain(samples[1:], [3])
    assert len(list(ap.PlannedLoader(dataset, **planning(job())))) == 1


@pytest.mark.parametrize("sample", [{"tokens": TOKENS}, {"input_ids": None}, {"input_ids": 3}])
def test_samples_without_tokens_are_refused_by_number(sample: Any) -> None:
    with pytest.raises(ConfigError, match=r"sample 1 = .*must have input_ids"):
        ap.Samples([{"input_ids": TOKENS}, sample])


def test_documents_have_the_masks_of_the_kinds_of_a_model() -> None:
    kinds = {"full": ap.masks.causal(), "window": ap.masks.sliding_window(2)}
    samples = ap.Samples([{"input_ids": TOKENS, "seq_lengths": [3, 5]}, {"input_ids": TOKENS}], mask=kinds)
    assert samples.masks == [{name: ap.masks.documents([3, 5], one) for name, one in kinds.items()}, kinds]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_lengths", [3, 4]),
        ("seq_lengths", []),
        ("position_ids", [1, 2, 3, 0, 1, 2, 3, 4]),
        ("position_ids", [0, 1, 3, 0, 1, 2, 3, 4]),
        ("position_ids", [0, 1, 2]),
    ],
)
def test_documents_that_do_not_fill_their_row_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"sample 0: {name}"):
        ap.Samples([{"input_ids": TOKENS, name: value}])


def test_positions_of_other_documents_are_refused() -> None:
    contradiction = {"seq_lengths": [3, 5], "position_ids": [0, 1, 2, 3, 0, 1, 2, 3]}
    with pytest.raises(ConfigError, match="sample 0: position_ids"):
        ap.Samples([{"input_ids": TOKENS, **contradiction}])


def test_masks_of_the_wrapped_dataset_are_kept() -> None:
    dataset = Plain([TOKENS], [len(TOKENS)])
    dataset.masks = ap.masks.sliding_window(2)
    with pytest.raises(ConfigError, match=r"masks.*would be ignored"):
        ap.Samples(dataset)


class Iterable(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([TOKENS])


@pytest.mark.parametrize("stream", [iter([TOKENS]), Iterable(), ChainDataset([Iterable()])])
def test_streams_are_refused_where_samples_have_numbers(stream: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset = .*: has no length.*ap\.StreamedLoader"):
        ap.Samples(stream)
    with pytest.raises(ConfigError, match=r"dataset = .*: has no length.*ap\.StreamedLoader"):
        ap.PlannedLoader(stream, **planning(job()), lengths=[len(TOKENS)])


def test_samples_that_are_overlong_are_refused_cut_or_dropped_and_counted() -> None:
    packed, masked = {"seq_lengths": [3, 5]}, {"loss_mask": [1] * 8}
    samples = [{"input_ids": TOKENS, **packed}, [1, 2], {"input_ids": TOKENS, **masked}]
    with pytest.raises(CapacityError, match=r"sample 0 has 8 tokens; the limit is 5.*overlong"):
        ap.Samples(samples, limit=5)
    cut = ap.Samples(samples, limit=5, overlong="cut")
    assert (cut.cut, cut.dropped, cut.lengths.tolist()) == (2, 0, [5, 2, 5])
    assert cut.masks == [ap.masks.documents([3, 2]), None, None]
    assert cut[2] == {"input_ids": TOKENS[:5], "loss_mask": [1] * 5, "seq_lengths": [5]}
    dropped = ap.Samples(samples, limit=5, overlong="drop")
    assert (dropped.cut, dropped.dropped, dropped.lengths.tolist()) == (0, 2, [2])
    assert (dropped[0], dropped.kept.tolist()) == ([1, 2], [1])


@pytest.mark.parametrize("limit", [None, 5])
def test_samples_that_became_longer_are_refused(limit: int | None) -> None:
    samples = [TOKENS[:4], TOKENS]
    loader = ap.PlannedLoader(ap.Samples(samples, limit=limit, overlong="cut"), **planning(job()))
    samples[:] = [TOKENS[:5], [*TOKENS, 19]]
    with pytest.raises(
        ExecutionError, match=r"sample \d has shape \(\d,\), but was planned with length \d: give "
    ):
        list(loader)


def test_fields_of_another_length_than_their_tokens_are_not_cut() -> None:
    labels = {"input_ids": TOKENS, "labels": [*TOKENS, 19]}
    for options in ({}, {"limit": 5, "overlong": "cut"}):
        with pytest.raises(
            ConfigError, match=r"sample 0: labels = .shape \(9,\).: must have an entry for each of the"
        ):
            list(ap.PlannedLoader(ap.Samples([labels], **options), **planning(job())))


# ---- streams


class Stream:
    """Sample i of an epoch has 3 + i % 5 tokens."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return (np.full(3 + i % 5, 1000 * self.epoch + i) for i in range(self.count))


def stream_loader(**options: Any) -> ap.StreamedLoader:
    return ap.StreamedLoader(Stream(40), **planning(job(tokens=30)), buffer=16, **options)


def samples_of(batches: Any) -> list[list[int]]:
    return [sorted(set(batch.tokens.tolist())) for batch in batches]


def test_a_stream_yields_every_sample_once_per_epoch_in_buffers() -> None:
    loader, orders = stream_loader(), list[list[int]]()
    for epoch in (0, 2):
        loader.set_epoch(epoch)
        seen = [sample - 1000 * epoch for batch in samples_of(loader) for sample in batch]
        assert sorted(seen) == list(range(40))
        assert sorted(seen[:16]) == list(range(16)) != seen[:16]
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_stream_resumes_after_the_last_batch(stop: int) -> None:
    first, whole = stream_loader(), samples_of(stream_loader())
    passing = iter(first)
    for _ in range(stop):
        next(passing)
    state, second = json.loads(json.dumps(first.state_dict())), stream_loader()
    second.load_state_dict(state)
    assert samples_of(second) == whole[stop:]
    assert samples_of(first) == whole  # an abandoned pass starts over


class Skipping(Stream):
    """Its rest is a new stream, as in Hugging Face datasets."""

    def skip(self, count: int) -> Any:
        stream = Skipping(self.count)
        stream.first = self.first + count
        return stream

    first = 0

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self.first, None)


@pytest.mark.parametrize("stop", [0, 5])
def test_a_stream_that_skips_has_the_epoch_of_the_loader(stop: int) -> None:
    first, second = (ap.StreamedLoader(Skipping(40), **planning(job(tokens=30)), buffer=16) for _ in range(2))
    first.set_epoch(1)
    passing = iter(first)
    head = samples_of(islice(passing, stop))
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)
    rest = samples_of(second)
    assert sorted(token for batch in (*head, *rest) for token in batch) == [*range(1000, 1040)]


def test_too_few_samples_for_an_iteration_at_the_end_of_a_stream_are_dropped() -> None:
    options = planning(job(tokens=30, microbatches=2), drop_last=True)
    ended = ap.StreamedLoader(Stream(33), **options, buffer=16)
    assert len({sample for batch in samples_of(ended) for sample in batch}) <= 32
    with pytest.raises(ConfigError, match="leaves no iteration of the epoch's 1 for 1 groups of ranks"):
        list(ap.StreamedLoader(Stream(33), **options, buffer=1))


def test_a_stream_that_has_ended_resumes_with_the_next_epoch() -> None:
    first, second = stream_loader(), stream_loader()
    samples_of(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert samples_of(second) == []
    for loader in (first, second):
        loader.set_epoch(1)
    third = stream_loader()
    third.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert samples_of(third) == samples_of(second) == samples_of(first) != []


def test_an_epoch_before_the_loaded_one_causes_a_warning() -> None:
    first, second = stream_loader(), stream_loader()
    first.set_epoch(1)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) discards the loaded place in epoch 1"):
        second.set_epoch(0)


def test_a_stream_drops_and_counts_overlong_samples() -> None:
    loader = stream_loader(limit=5, overlong="drop")
    kept = [sample for batch in samples_of(loader) for sample in batch]
    assert sorted(kept) == [i for i in range(40) if i % 5 < 3]
    assert loader.dropped == 16


def test_unsupported_options_of_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="lengths"):
        stream_loader(lengths=[1])
    with pytest.raises(ConfigError, match="cannot restart"):
        ap.StreamedLoader(iter([]), **planning(job()), buffer=2)
    with pytest.raises(ConfigError, match="size"):
        stream_loader().load_state_dict({**stream_loader().state_dict(), "size": 3})
