"""Interface for trainers: samples with fields, padding, token functions, groups of ranks, resumed passes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import apportion as ap
from apportion import ConfigError, ExecutionError, PlannedLoader, masks
from apportion.trainer.loading import metrics
from apportion.trainer.loading.iterations import Draw, Repeated
from apportion.trainer.step.loss import IGNORED
from tests.ranks import jobs_seam
from tests.ranks.jobs_seam import Broken
from tests.ranks.loading import LENGTHS, Recorded, job, planning
from tests.ranks.rank_pool import Pool, RankError
from tests.support.sparse import sparse


def loader_of(dataset: Any = None, kwargs: Any = None, **more: Any) -> PlannedLoader:
    return PlannedLoader(dataset or Recorded(), **{**(kwargs or planning(job())), "shuffle": False, **more})


class Samples:
    """A dataset of a list of samples."""

    def __init__(self, samples: list[dict[str, Any]], lengths: list[int]) -> None:
        self.samples, self.lengths = samples, lengths

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


# --- samples with fields


def test_fields_are_cut_like_tokens_and_labels_like_predicted_tokens(pool: Pool) -> None:
    kwargs, ranks = planning(job(3, 66, microbatches=2)), 3
    results = pool.run(jobs_seam.fields, ranks, kwargs, {"rows_multiple": 4})
    for batches in zip(*results, strict=True):
        totals = np.array([0, 0.0])
        for b in batches:
            real, ids = b["sample_ids"] >= 0, b["tokens"]
            assert len(ids) % 4 == 0
            assert not ids[~real].any()
            assert (b["labels"][~real] == IGNORED).all()
            np.testing.assert_array_equal(ids[real], 100 * b["sample_ids"][real] + b["local_to_sample"][real])
            np.testing.assert_array_equal(b["position_ids"][real], b["local_to_sample"][real])
            np.testing.assert_array_equal(b["advantages"][real], ids[real] / 7)
            np.testing.assert_array_equal(b["places"][real], np.stack([ids, ids + 1], axis=1)[real])
            lengths = np.array(LENGTHS)[b["sample_ids"]]
            follows, target = real & (b["local_to_sample"] + 1 < lengths), ids + 1
            np.testing.assert_array_equal(b["labels"], np.where(follows & (target % 3 != 0), target, IGNORED))
            np.testing.assert_array_equal(b["loss_weights"], np.where(follows, target % 5, 0))
            labelled = b["labels"] != IGNORED
            totals += [labelled.sum(), b["loss_weights"][labelled].sum()]
        assert batches[0]["totals"].tolist() == batches[1]["totals"].tolist()
    every = sum(int((b["labels"] != IGNORED).sum()) for rank in results for b in rank)
    assert every == sum(b["totals"][0] for b in results[0][::2]) or len(results[0]) % 2


def test_a_rank_without_samples_has_the_fields_of_the_others(pool: Pool) -> None:
    kwargs = planning(job(4, 128))
    results = pool.run(jobs_seam.fields, 4, kwargs, {"lengths": LENGTHS, "sampler": [[3]]})
    assert sorted(len(rank[0]["tokens"]) for rank in results) == [0, 0, 0, 1]
    assert {tuple(sorted(rank[0])) for rank in results} == {tuple(sorted(results[0][0]))}
    assert {rank[0]["places"].shape[1:] for rank in results} == {(2,)}


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        ({"tokens": [1, 2, 3]}, r"sample 0.*must have input_ids"),
        ({"input_ids": [1, 2, 3], "reward": 1.0}, r"sample 0: reward.*an entry for each of the 3 tokens"),
        ({"input_ids": [1, 2, 3], "advantages": [0.5, 1.0]}, r"sample 0: advantages.*shape \(2,\)"),
        ({"input_ids": [1, 2, 3], "names": ["a", "b", "c"]}, r"sample 0: names"),
        ({"input_ids": [1.7, 2.0, 3.0]}, r"sample 0: input_ids.*integers"),
        ({"input_ids": [1, 2, 3], "labels": [0.5, 1.0, 2.0]}, r"sample 0: labels.*integers"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}, r"sample 0: position_ids.*the plan's mask"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}, r"sample 0: attention_mask.*no padding"),
        (
            {"input_ids": [1, 2, 3], "labels": [1, -1, 3]},
            r"labels = -1: must not be negative; use the label -100",
        ),
        (
            {"input_ids": [1, 2, 3, 4, 5], "labels": [2, 3, 4, 5, -100]},
            r"labels = 'shifted': belong to the next",
        ),
        ({"input_ids": [1, 2, -3]}, r"input_ids = -3: must not be negative"),
        ({"input_ids": [1, 2, 3], "weights": [1, 2, 3]}, r"weights.*name them loss_weights"),
        ({"input_ids": [1, 2, 3], "label": [1, 2, 3]}, r"label = .*name them labels"),
        ({"input_ids": [1, 2, 3], "assistant_mask": [0, 1, 1]}, r"assistant_mask.*name it loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_masks": [0, 1, 1]}, r"loss_masks.*name it loss_mask"),
        ({"input_ids": [1, 2, 3], "padding_mask": [1, 1, 0]}, r"padding_mask.*remove padding"),
        ({"input_ids": [1, 2, 3], "segment_ids": [0, 0, 1]}, r"segment_ids.*documents\(\[lengths\]\)"),
        ({"input_ids": [1, 2, 3], "document_ids": [0, 0, 1]}, r"document_ids.*documents\(\[lengths\]\)"),
    ],
)
def test_errors_of_samples_name_the_field(sample: dict[str, list[str | float] | float], error: str) -> None:
    loader = loader_of(Samples([sample], [len(sample.get("input_ids", [1, 2, 3]))]))
    with pytest.raises(ConfigError, match=error):
        list(loader)


def test_samples_of_a_microbatch_must_have_equal_fields() -> None:
    dense = {"input_ids": torch.arange(3), "attention_mask": torch.ones(3)}
    (batch,) = loader_of(Samples([dense, dense], [3, 3]))
    assert batch.fields == {}
    with pytest.raises(ExecutionError, match=r"sample 1 has the fields .*rewards"):
        list(loader_of(Samples([dense, {**dense, "rewards": [0.0] * 3}], [3, 3])))
    for other in ([0.5, 1.0, 0.0], np.zeros((3, 2), np.int64)):
        samples = [{**dense, "rewards": [0, 1, 1]}, {**dense, "rewards": other}]
        with pytest.raises(ExecutionError, match=r"sample 1 has the fields rewards.*rewards int64 \[\]"):
            list(loader_of(Samples(samples, [3, 3])))


def test_a_batch_can_be_moved_to_a_device() -> None:
    (batch,) = loader_of(Samples([{"input_ids": [5, 6], "rewards": [0.5, 1.0]}], [2]))
    moved = batch.to("meta")
    assert {x.device.type for x in (moved.tokens, moved.labels, moved.fields["rewards"])} == {"meta"}
    assert moved.handle is batch.handle


# --- token tensors


@pytest.mark.parametrize("options", [{}, {"rows_multiple": 8}])
@pytest.mark.parametrize("mask", [None, masks.tree([(-1, 20), (0, 7), (1, 5), (0, 8)])])
def test_token_functions_are_inverses_with_exact_gradients(pool: Pool, options: Any, mask: Any) -> None:
    more = {} if mask is None else {"masks": mask, "sampler": [[0]]}
    for ranks in (1, 3):
        kwargs = planning(job(ranks, 66), **options, **more)
        assert pool.run(jobs_seam.verbs, ranks, kwargs, 5) == [(True,) * 4] * ranks


def test_token_functions_refuse_a_wrong_number_of_rows() -> None:
    batch = next(iter(loader_of(rows_multiple=8)))
    for verb, rows in ((batch.shard_tokens, 3), (batch.gather_tokens, 3), (batch.roll, 3)):
        with pytest.raises(ExecutionError, match="got 3"):
            verb(torch.zeros(rows))
    with pytest.raises(ConfigError, match="shift"):
        batch.roll(batch.labels, 0)


# --- padding


def test_padding_changes_neither_loss_nor_gradients(pool: Pool) -> None:
    kwargs = planning(job(4, 64))
    plain, padded, fixed = (
        pool.run(jobs_seam.padded, 4, kwargs, options)
        for options in ({}, {"rows_multiple": 8}, {"envelope": ap.Envelope(rows=24)})
    )
    assert all(rows % 8 == 0 and rows for counts, *_ in padded for rows in counts)
    assert {rows for counts, *_ in fixed for rows in counts} == {24}
    assert {loss for _, loss, _ in plain} == {loss for _, loss, _ in padded} == {loss for _, loss, _ in fixed}
    for found in (padded, fixed):
        np.testing.assert_allclose(found[0][2], plain[0][2], rtol=0, atol=1e-6)


def test_a_plan_outside_the_envelope_on_one_rank_ends_all_ranks(pool: Pool) -> None:
    kwargs = planning(job(4, 64))
    with pytest.raises(RankError, match=r"envelope\.rows = 8: a plan needs"):
        pool.run(jobs_seam.padded, 4, kwargs, {"envelope": ap.Envelope(rows=8)})


@pytest.mark.parametrize("sinks", sparse([True, False], 2))
def test_padding_works_under_plans_that_project(pool: Pool, sinks: bool) -> None:
    plain, padded = (pool.run(jobs_seam.padded_block, 2, multiple, sinks) for multiple in (None, 16))
    for (found, behind), (expected, _) in zip(padded, plain, strict=True):
        assert behind == [0.0, 0.0]
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, other)


def test_code_that_does_not_support_padding_refuses_it() -> None:
    (batch,) = loader_of(Recorded([5]), rows_multiple=8)
    with pytest.raises(ExecutionError, match="3 rows of padding: make the loader without rows_multiple"):
        batch.handle.require_unpadded("layouts are moved")


def test_padding_is_at_least_one_row(pool: Pool) -> None:
    kwargs = planning(job(4, 128))
    results = pool.run(jobs_seam.fields, 4, kwargs, {"sampler": [[3]], "rows_multiple": 1})
    assert [len(rank[0]["tokens"]) for rank in results] == [1] * 4


# --- the order


def test_drop_last_drops_an_incomplete_iteration() -> None:
    lengths = [64] * 7
    whole = loader_of(Recorded(lengths), planning(job(microbatches=3)))
    cut = loader_of(Recorded(lengths), planning(job(microbatches=3)), drop_last=True)
    assert [len(list(loader)) for loader in (whole, cut)] == [len(whole), len(cut)] == [7, 6]


def test_drop_last_applies_to_samplers_and_must_leave_an_iteration() -> None:
    sampler = [[[0], [1]], [[2]], [[3], [4]]]
    kwargs = planning(job(microbatches=2))
    loader = PlannedLoader(Recorded(), **kwargs, sampler=sampler, drop_last=True)
    assert [batch.samples.tolist() for batch in loader] == [[0], [1], [3], [4]]
    assert len(loader) == 4
    with pytest.raises(ConfigError, match=r"drop_last.*leaves no iteration of the epoch's 1"):
        list(loader_of(Recorded([3, 4]), planning(job(microbatches=3)), drop_last=True))


def test_an_unreadable_sample_on_one_rank_ends_all_ranks(pool: Pool) -> None:
    dataset = jobs_seam.Broken([20, 20, 1])
    errors = pool.errors(jobs_seam.passed, 3, dataset, planning(job(3, 66)), [[0, 1], [0, 2]])
    starts = ["ExecutionError: iteration", "ExecutionError: iteration", "OSError: a sample is lost"]
    assert sorted(message[:25] for message in errors) == starts
    assert sum("have no rows: OSError: a sample is lost on rank" in message for message in errors) == 2


def test_an_unreadable_sample_in_a_data_loader_process_ends_the_pass() -> None:
    batches = iter(loader_of(jobs_seam.Broken([20, 20, 1]), sampler=[[0, 1], [0, 2]], workers=1))
    assert next(batches).iteration == 0
    with pytest.raises(OSError, match="a sample is lost"):
        next(batches)


def test_ranks_whose_samples_have_different_fields_fail(pool: Pool) -> None:
    kwargs = planning(job(2, 40, recipe="contiguous"))
    errors = pool.errors(jobs_seam.passed, 2, jobs_seam.Mixed([20, 20]), kwargs, [[0, 1]])
    assert errors[0] == errors[1]
    assert "iteration 0: samples have different fields" in errors[0]
    assert [part in errors[0] for part in ("float32", "float64", "on rank 0", "on rank 1")] == [True] * 4


def test_groups_share_an_order_and_count_all_labels(pool: Pool) -> None:
    results = pool.run(jobs_seam.groups, 8, {"shuffle": False})
    assert results[:4] == results[:1] * 4
    assert results[4:] == results[4:5] * 4
    dealt = [sample for b in results[0] + results[4] for sample in b[4]]
    assert dealt == list(range(len(LENGTHS)))  # one order, in turn
    for first, other in zip(results[0], results[4], strict=True):
        assert first[:4] == other[:4]
    by_iteration = {}
    for number, _, _, valid, samples, weight in results[0] + results[4]:
        assert weight == valid  # samples have no weights
        count = sum(LENGTHS[sample] - 1 for sample in samples)
        by_iteration[number] = (valid, by_iteration.get(number, (0, 0))[1] + count)
    assert all(valid == count for valid, count in by_iteration.values())


def test_a_group_that_fails_ends_the_others(pool: Pool) -> None:
    datasets = [Broken([20, 20, 1])] * 4 + [Recorded([20, 20, 1])] * 4
    options = {"sampler": [[[0], [1]], [[0, 2], [1]]]}
    errors = pool.errors(jobs_seam.groups, 8, options, each=datasets)
    assert sum(message == "OSError: a sample is lost" for message in errors) == 1
    assert sum("have no rows: OSError: a sample is lost on rank" in message for message in errors[:4]) == 3
    assert all("groups [0] failed: " in message and "a sample is lost" in message for message in errors[4:])


@pytest.mark.parametrize(
    ("iterations", "groups", "own"),
    [
        ([2, 2, 2, 2], 2, [[0, 2], [1, 3]]),
        ([2, 2, 2, 1], 2, [[0], [1]]),
        ([2, 2, 1], 2, [[0], [1]]),
        ([1, 1, 1], 1, [[0, 1, 2]]),
        ([1], 2, [[], []]),
    ],
)
def test_groups_get_iterations_in_turn_and_equal_numbers_of_microbatches(
    iterations: list[int], groups: int, own: list[list[int]]
) -> None:
    epoch = [[np.array([number])] * count for number, count in enumerate(iterations)]
    for group in range(groups):
        assert [int(dealt[0][0]) for dealt in Draw(None, None, 0, group, groups).share(epoch)] == own[group]


@pytest.mark.parametrize(
    ("iterations", "own"),
    [
        ([2, 2, 2, 2], [["0", "2"], ["1", "3"]]),
        ([2, 2, 2, 1], [["0", "2", "3"], ["1", "2 again", "3 again"]]),
        ([2, 2, 1], [["0", "2"], ["1", "2 again"]]),
        ([1], [["0"], ["0 again"]]),
    ],
)
def test_an_evaluation_completes_the_last_round_with_repeated_iterations(
    iterations: list[int], own: list[list[str]]
) -> None:
    epoch = [[np.array([number])] * count for number, count in enumerate(iterations)]
    for group in range(2):
        dealt = Draw(None, None, 0, group, 2, completes=True).share(epoch)
        assert [f"{part[0][0]}{' again' * isinstance(part, Repeated)}" for part in dealt] == own[group]


def test_an_evaluation_by_groups_covers_all_samples(pool: Pool) -> None:
    sizes = [50] * 9  # microbatches of one sample, two an iteration, and one that is left
    results = pool.run(jobs_seam.groups, 8, {"shuffle": False}, Recorded(sizes), True)
    first, other = results[0], results[4]
    assert sorted(sample for b in first + other for sample in b[4]) == [*range(len(sizes))]
    assert [b[:4] for b in first] == [b[:4] for b in other]
    assert sum(b[3] for b in first if b[2]) == sum(size - 1 for size in sizes)
    for error in pool.errors(jobs_seam.groups, 8, {"shuffle": False}, Recorded(sizes)):
        assert "the last 1 iterations are dropped in every epoch" in error


def test_groups_that_are_out_of_step_fail(pool: Pool) -> None:
    sampler = [[[0], [1]], [[2]]]
    for other in (sampler[:1], [[[0, 1]], [[2]]]):
        options = [{"sampler": other}] * 4 + [{"sampler": sampler}] * 4
        errors = pool.errors(jobs_seam.groups, 8, each=options)
        assert all("groups are not in step" in message and "group 0: [0, " in message for message in errors)


def test_groups_that_draw_from_different_orders_all_fail(pool: Pool) -> None:
    for changes, reason in (({"seed": 1}, "seed 1"), ({"lengths": LENGTHS[::-1]}, "7 samples, lengths")):
        results = pool.errors(jobs_seam.groups, 8, each=[{}] * 4 + [changes] * 4)
        assert all("groups draw from different orders of samples: 7 samples" in error for error in results)
        assert all(reason in error for error in results)


def test_groups_with_their_own_samplers_stay_in_step(pool: Pool) -> None:
    results = pool.run(jobs_seam.groups, 8, {"sampler": [[[0], [1]], [[2]]]})
    for result in (results[0], results[4]):
        assert [b[:3] for b in result] == [(0, 0, False), (0, 1, True), (1, 0, True)]


# --- resuming a pass


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_another_loader_resumes_after_the_last_batch(pool: Pool, stop: int) -> None:
    kwargs = planning(job(2, 64, microbatches=2))
    for whole, gone_on in pool.run(jobs_seam.resumed, 2, kwargs, stop, {}):
        assert gone_on == whole


def test_a_state_does_not_depend_on_the_number_of_data_loader_workers() -> None:
    whole, gone_on = jobs_seam.resumed(ap.Communicator.shared(), planning(job(1, 64)), 2, {"workers": 2})
    assert gone_on == whole


def test_a_state_is_plain_data_and_an_abandoned_pass_starts_over() -> None:
    loader = loader_of()
    first = next(iter(loader))
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["iteration"], state["microbatch"]) == (0, 1, 0)
    assert next(iter(loader)).samples.tolist() == first.samples.tolist()
    whole = list(loader)
    assert len(whole) == len(loader)
    over = loader.state_dict()
    assert (over["epoch"], over["iteration"]) == (0, len(whole))
    assert len(list(loader)) == len(whole)
    loader.load_state_dict(over)  # saved after the pass, so nothing remains
    assert list(loader) == []
    loader.load_state_dict(over)
    loader.set_epoch(1)
    assert len(list(loader)) == len(whole)


def test_setting_another_epoch_discards_the_position_of_the_state() -> None:
    loader = loader_of()
    state = {**loader.state_dict(), "iteration": 2}
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert next(iter(loader)).iteration == 2
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert next(iter(loader)).iteration == 0


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("lengths", lambda: loader_of(Recorded([64, 3]))),
        ("masks", lambda: loader_of(masks=masks.full())),
        ("job.tokens_per_rank", lambda: loader_of(kwargs=planning(job(tokens=70)))),
        ("job.policy", lambda: loader_of(kwargs=planning(job(recipe="ring")))),
        ("shuffle", lambda: loader_of(shuffle=True)),
        ("job.policy.seed", lambda: loader_of(seed=4)),
    ],
)
def test_a_state_of_another_loader_is_refused_by_field(field: str, other: Callable[..., Any]) -> None:
    state = loader_of().state_dict()
    with pytest.raises(ConfigError, match=rf"state\.{field}\b.*was saved with a different"):
        other().load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 9}, {"version": 1, "epoch": 0}, None])
def test_malformed_states_are_refused(state: dict[str, int] | None) -> None:
    with pytest.raises(ConfigError, match="state"):
        loader_of().load_state_dict(state)


def test_a_state_that_is_loaded_in_place_is_compared_like_any_other() -> None:
    """torch's distributed checkpoints write the saved values into the nested values of a loader's own state."""
    loader, saved = loader_of(), loader_of().state_dict()
    saved["job"]["policy"]["seed"] += 1
    template = loader.state_dict()
    template["job"]["policy"].update(saved["job"]["policy"])
    message = r"state\.job\.policy\.seed = 1: .*was saved with a different policy\.seed"
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict(template)


def test_metrics_count_yielded_batches() -> None:
    loader = loader_of()
    assert loader.metrics()["iterations"] == 0
    batches = list(loader)
    found = loader.metrics()
    expected = {"iterations": len(batches), "tokens": sum(LENGTHS), "fallbacks": 0}
    assert {name: found[name] for name in expected} == expected
    assert found["tokens_per_s"] > 0
    assert found["waited_s"] > 0


def test_tokens_per_second_count_only_finished_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    loader = loader_of()
    assert loader.metrics()["tokens_per_s"] == 0
    sizes = [b.batch.tokens for b in loader]
    assert loader.metrics()["tokens_per_s"] == sum(sizes) / len(sizes)
    for _ in range(50):
        next(clock)  # between passes
    passing = iter(loader)
    next(passing), next(passing)
    passing.close()  # the end of the second one is unknown
    assert loader.metrics()["tokens_per_s"] == (sum(sizes) + sizes[0]) / (len(sizes) + 1)


def test_masks_of_kinds_unknown_to_the_model_are_refused_at_construction() -> None:
    two = ap.Model(2, 1, 8, dtype="fp32", layers={"full": 1, "sliding": 1})
    with pytest.raises(ConfigError, match=r"masks.*default.*full.*sliding"):
        PlannedLoader(Recorded(), ap.Cluster(1, 1), two, 64, source="local")
