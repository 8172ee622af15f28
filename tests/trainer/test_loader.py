"""The loader over a source that plans in its own thread: the batches of a pass, their order, and its end."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import pytest
import torch

from apportion import Batch, Job, PlannedLoader, PlanTimeoutError, masks
from apportion.ir.errors import CapacityError, ConfigError, ExecutionError, UnknownNameError
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe import recipes
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.loading.arguments import check_kinds
from apportion.trainer.loading.fetching import Fetched, Lookahead
from apportion.trainer.loading.iterations import BatchBuilder, Iteration, Iterations
from apportion.trainer.step.loss import IGNORED
from tests.ranks import jobs_loader
from tests.ranks.loading import LENGTHS, MODEL, HereSource, Recorded, job, planning, seen
from tests.ranks.rank_pool import Pool


def loader_of(kwargs: dict[str, Any] | None = None, dataset: Any = None, **options: Any) -> PlannedLoader:
    return PlannedLoader(dataset or Recorded(), **{**(kwargs or planning(job())), **options})


def tokens_of(loader: PlannedLoader) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in loader]


# --- what a pass yields


def test_every_token_is_on_one_rank_with_its_label_and_position(pool: Pool) -> None:
    kwargs = planning(job(3, 66, microbatches=2))
    results = [passes[0] for passes, _ in pool.run(jobs_loader.passes, 3, kwargs, 1)]
    for step in zip(*results, strict=True):
        tokens, labels, positions = (np.concatenate([rank[i] for rank in step]) for i in (5, 6, 7))
        order = np.argsort(tokens)
        assert len(set(tokens.tolist())) == len(tokens)
        np.testing.assert_array_equal(tokens % 100, positions)
        last = np.append(np.diff(tokens[order]) != 1, True)
        np.testing.assert_array_equal(labels[order], np.where(last, IGNORED, tokens[order] + 1))
        assert {rank[4] for rank in step} == {step[0][4]}
    assert sum(len(batch[5]) for rank in results for batch in rank) == sum(LENGTHS)


def test_a_rank_reads_only_its_own_samples(pool: Pool) -> None:
    data = Recorded([8] * 6)
    for passes, read in pool.run(jobs_loader.passes, 3, planning(job(3, 24)), 1, data):
        held = {token // 100 for batch in passes[0] for token in batch[5]}
        assert len(read) == len({*read})
        assert held <= {*read}
        assert len({*read} - held) <= 1  # the first of a pass, which ranks compare
        assert len(held) < 5


def test_iterations_end_with_their_last_microbatch_and_count_all_labels() -> None:
    dataset = Recorded()
    loader = loader_of(planning(job(microbatches=2)), dataset, shuffle=False)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    name = batches[1].handle.name
    assert repr(batches[1].handle) == f"<PlanHandle: plan {name}, rank 0 of 1, engine auto>"
    held = f"microbatch 1 of iteration 0, the last, {len(batches[1].tokens)} rows"
    assert repr(batches[1]) == f"<PlannedBatch: {held}, {batches[1].handle!r}>"
    places = [(b.iteration, b.microbatch, b.is_last) for b in batches]
    assert places == [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)]
    for iteration in (0, 1):
        group = [b for b in batches if b.iteration == iteration]
        assert {b.valid_tokens for b in group} == {sum(int((b.labels != IGNORED).sum()) for b in group)}
    assert sorted(dataset.read) == list(range(len(LENGTHS)))


def test_a_pack_step_redistributes_the_samples_of_an_iteration() -> None:
    lengths = [40, 8, 8, 8, 30, 10, 16, 4]
    loader = loader_of(planning(job(microbatches=2, recipe="wlb")), Recorded(lengths), shuffle=False)
    batches = list(loader)
    assert [(b.iteration, b.microbatch, b.is_last) for b in batches] == [(0, 0, False), (0, 1, True)]
    assert len(loader) == 2
    assert all(len(b.tokens) <= 64 for b in batches)
    expected = chain(*(Recorded(lengths)[i].tolist() for i in range(len(lengths))))
    assert sorted(np.concatenate([b.tokens for b in batches]).tolist()) == sorted(expected)
    small = loader_of(
        planning(job(microbatches=2, recipe="wlb")), Recorded(lengths), sampler=[[0, 1, 2], [3]]
    )
    assert len(small) == len([*small]) == 3  # a microbatch has at least one sample
    pack = {"wlb": {"defer": True, "outlier_tokens": 20}}
    steps = {**find_recipe("wlb").to_data()["steps"], "pack": pack}
    kwargs = planning(job(recipe={"name": "mine", "steps": steps}))
    with pytest.raises(ConfigError, match="defer"):
        list(loader_of(kwargs, Recorded(lengths)))


def test_masks_come_from_the_dataset_or_the_caller_shared_or_per_sample() -> None:
    data = Recorded([8, 5])
    data.masks = [masks.shared_question(2, [3, 3]), masks.causal()]  # type: ignore[attr-defined]
    (batch,) = loader_of(dataset=data, shuffle=False)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.labels.tolist()[4] == IGNORED  # the first answer's last token
    (batch,) = loader_of(dataset=data, shuffle=False, masks=[masks.causal(), masks.causal()])
    assert batch.labels.tolist()[4] == 5
    with pytest.raises(ConfigError, match="one for each of the 2 samples"):
        list(loader_of(dataset=data, masks=[None]))
    with pytest.raises(ConfigError, match=r"would replace the dataset's masks, one per sample"):
        loader_of(dataset=data, masks=masks.causal())


def test_masks_that_the_dataset_has_replaced_are_refused() -> None:
    data: Any = Recorded([8, 4])
    data.masks = [masks.documents([5, 3]), None]
    loader = loader_of(dataset=data)
    list(loader)
    data.masks = [masks.documents([5, 3]), masks.causal()]
    list(loader)  # equal masks
    data.masks = [masks.documents([3, 5]), None]
    with pytest.raises(ConfigError, match=r"dataset\.masks.*have changed since the loader was made"):
        list(loader)


def test_a_window_over_documents_of_another_kind_is_refused() -> None:
    window, model = masks.sliding_window(4), replace(MODEL, layers={"full": 1, "local": 1})
    options = {"dataset": Recorded([8]), "model": model}
    for good in (masks.documents([3, 5], window), masks.bands([[0, 8, 0, 8, 0, 3]])):
        list(loader_of(masks={"full": masks.documents([3, 5]), "local": good}, **options))
    list(loader_of(masks={"full": masks.tree([[-1, 3], [0, 5]]), "local": window}, **options))  # one path
    for full in (masks.documents([3, 5]), masks.tree([[-1, 2], [0, 3], [0, 3]])):
        with pytest.raises(ConfigError, match=r"sequences\[0\].mask.*kinds disagree on positions"):
            list(loader_of(masks={"full": full, "local": window}, **options))


def test_explicit_lengths_override_those_of_the_dataset() -> None:
    assert len(loader_of(lengths=torch.tensor(LENGTHS))) == len(loader_of())
    with pytest.raises(ConfigError, match="the dataset has 7 samples"):
        loader_of(lengths=[5, 4])
    with pytest.raises(ConfigError, match="as `lengths`"):
        loader_of(dataset=[np.arange(3)])
    for lengths, message in [([9.0], r"lengths\[0\] = 9.0: must be an integer"), ([0], r"lengths\[0\]")]:
        with pytest.raises(ConfigError, match=message):
            loader_of(dataset=Recorded([9]), lengths=lengths)
    with pytest.raises(ConfigError, match="integer dtype"):
        loader_of(dataset=Recorded([9]), lengths=np.array([9.0]))


# --- order


def test_order_follows_seed_and_epoch() -> None:
    loader = loader_of(seed=3)
    first, again = tokens_of(loader), tokens_of(loader)
    loader.set_epoch(1)
    assert first == again
    assert sorted(chain(*tokens_of(loader))) == sorted(chain(*first))
    assert tokens_of(loader) != first
    assert tokens_of(loader_of(seed=4)) != first


def test_a_pass_can_begin_in_the_middle() -> None:
    loader = loader_of()
    whole = [seen(batch) for batch in loader]
    loader.set_epoch(0, start=2)
    assert [seen(batch) for batch in loader] == whole[2:]
    assert [seen(batch) for batch in loader] == whole
    loader.set_epoch(0, start=len(whole))
    assert list(loader) == []


def test_passes_that_train_on_the_same_samples_again_cause_a_warning() -> None:
    loader = loader_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for taken in (None, None, None, None, 1, 2, 1):  # batches of a pass, None for all
            list(islice(loader, taken))
        with torch.no_grad():
            next(iter(loader))
    with pytest.warns(
        UserWarning, match="a fourth pass begins at iteration 0 of epoch 0, .* the same samples"
    ):
        next(iter(loader))


def test_an_epoch_before_that_of_a_loaded_state_causes_a_warning() -> None:
    loader, loaded = loader_of(), loader_of()
    loader.set_epoch(1)
    next(iter(loader))
    loaded.load_state_dict(loader.state_dict())
    loaded.set_epoch(1)
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) discards the loaded place in epoch 1"):
        loaded.set_epoch(0)


def test_a_sampler_gives_the_samples_of_each_iteration() -> None:
    loader = loader_of(sampler=[[0, 1], np.array([6, 2]), torch.tensor([4])])
    assert [sorted({t // 100 for t in tokens}) for tokens in tokens_of(loader)] == [[0, 1], [2, 6], [4]]
    loader = loader_of(planning(job(microbatches=2)), sampler=[[[0], [1, 2]], [[3]]])
    assert [(b.iteration, b.microbatch) for b in loader] == [(0, 0), (0, 1), (1, 0)]
    assert len(loader) == 3
    loader = loader_of(planning(job(microbatches=2, recipe="wlb")), sampler=[[0, 1, 2, 3]])
    assert [(b.iteration, b.microbatch) for b in loader] == [(0, 0), (0, 1)]


def test_a_sampler_may_be_endless_and_receives_the_epoch() -> None:
    class Endless:
        epoch = None

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return ([(i + self.epoch) % len(LENGTHS)] for i in count())

    loader = loader_of(sampler=Endless())
    loader.set_epoch(2)
    drawn = [int(batch.tokens[0]) // 100 for batch in islice(loader, 9)]
    assert drawn == [(i + 2) % len(LENGTHS) for i in range(9)]


@pytest.mark.parametrize(
    ("drawn", "error", "message"),
    [
        ([[7]], ConfigError, r"sampler\[0\]\[0\] = 7"),
        ([[0], [-1]], ConfigError, r"sampler\[1\]\[0\] = -1"),
        ([[]], ConfigError, "must have samples"),
        ([[[0], []]], ConfigError, "must have samples"),
        ([[0.5]], ConfigError, "must be an integer"),
        ([[0, 2]], CapacityError, r"batches\[0\] has 73 tokens"),
        ([[[0], [1]]], ConfigError, "batches"),
        ([0, 1], ConfigError, r"sampler\[0\] = 0: must be a list"),
    ],
)
def test_errors_of_samplers_are_named(drawn: Any, error: type[Any], message: str) -> None:
    with pytest.raises(error, match=message):
        list(loader_of(sampler=drawn))


def test_an_iterator_as_sampler_gives_one_pass_without_a_length() -> None:
    loader = loader_of(sampler=([i] for i in range(3)))
    with pytest.raises(TypeError, match="generator has no length"):
        len(loader)
    assert [batch.iteration for batch in loader] == [0, 1, 2]
    with pytest.raises(ConfigError, match="an earlier pass has read ahead in it"):
        list(loader)


def test_a_sampler_may_wait_for_the_trainer() -> None:
    """Each iteration is drawn after the previous one was used: prefetching threads must not block the trainer."""
    used = threading.Semaphore(1)

    class Waiting:
        def __iter__(self) -> Iterator[list[int]]:
            for sample in range(4):
                assert used.acquire(timeout=30)
                yield [sample]

    seen_so_far = []
    for batch in loader_of(sampler=Waiting()):
        seen_so_far.append(batch.iteration)
        used.release()
    assert seen_so_far == [0, 1, 2, 3]


# --- errors, time-outs, ends


def test_the_job_of_a_loader_has_the_callers_cluster_model_and_policy() -> None:
    whole = replace(job(), policy=replace(job().policy, seed=3, token_cap=70), hardware="h100")
    assert loader_of(planning(whole)).job == whole
    assert loader_of(planning(whole), seed=4).job.policy == replace(whole.policy, seed=4)
    assert loader_of(recipe="usp").job.policy.recipe == find_recipe("usp")
    with pytest.raises(ConfigError, match="the job plans for 2 ranks"):
        loader_of(planning(job(2)))
    with pytest.raises(ConfigError, match=r"job\.tokens_per_rank = None"):
        loader_of(tokens_per_rank=None)


@pytest.mark.parametrize("spec", [None, masks.full(), {"global": masks.full()}, [None], [masks.full()], []])
def test_masks_must_match_the_kinds_of_the_models_layers(spec: Any) -> None:
    check_kinds(job(), spec)
    kinds = {"global": masks.causal(), "local": masks.sliding_window(4)}
    two = replace(job(), model=replace(MODEL, layers={"global": 1, "local": 2}))
    for own in (kinds, [kinds, kinds]):
        check_kinds(two, own)
    with pytest.raises(ConfigError, match=r"masks = .*the layers of the job's model \['global', 'local'\]"):
        check_kinds(two, spec)


def test_other_arguments_are_checked() -> None:
    with pytest.raises(UnknownNameError, match="on_timeout"):
        loader_of(on_timeout="wait")
    wrong = [("timeout_s", 0), ("lookahead", 0), ("workers", -1)]
    for name, value in wrong:
        with pytest.raises(ConfigError, match=name):
            loader_of(**{name: value})
    with pytest.raises(CapacityError, match="sample 5 has 60 tokens; a microbatch holds 59"):
        loader_of(planning(job(tokens=59)))
    with pytest.raises(ConfigError, match="epoch"):
        loader_of().set_epoch(-1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shifted", "weight", "must be a list of field names"),
        ("shifted", 3, "must be a list of field names"),
        ("shifted", [3], "must be a list of field names"),
        ("shifted", [], "must have 'labels'"),
        ("shifted", ["labels", "wort"], "must be a field of the samples"),
        ("token", "secret", "is for a planning service"),
        ("ca", "ca.pem", "is for a planning service"),
        ("shuffle", "x", "must be true or false"),
        ("drop_last", "no", "must be true or false"),
        ("masks", "causal", r"must be a mask, .*; write ap\.masks\.causal\(\)"),
        ("masks", 3, "must be a mask"),
        ("source", "nowhere", "is not a folder"),
        ("source", 3, "must be a URL, a folder or a source of plans"),
        ("device", "bogus", "is not a torch device"),
        ("sampler", 3, "must be iterable"),
        ("sampler", "x", "must be iterable"),
        ("replicas", 3, "must be a process group"),
        ("communicator", 3, "must be a Communicator"),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .*: {message}") as caught:
        list(loader_of(**{field: value}))
    assert "secret" not in str(caught.value)


def test_a_sampler_is_not_shuffled() -> None:
    with pytest.raises(ConfigError, match="shuffle = True: applies to the default order"):
        loader_of(sampler=[[0]], shuffle=True)
    loader_of(sampler=[[0]], shuffle=False, seed=7)


def test_a_missing_plan_is_an_error_that_names_the_iteration() -> None:
    loader = loader_of(planning(job(), HereSource(frozenset([1]))), timeout_s=0.2)
    batches = iter(loader)
    assert next(batches).iteration == 0
    message = r"iteration 1, rank 0: no plan within 0\.2 s \(iteration 1 is late\)"
    with pytest.raises(PlanTimeoutError, match=message):
        next(batches)
    assert no_threads()
    assert loader.metrics()["waited_s"] >= 0.2


def test_a_late_iteration_is_planned_locally_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    expected = [seen(batch) for batch in loader_of()]
    loader = loader_of(planning(job(), HereSource(frozenset([1, 2]))), timeout_s=1.5, on_timeout="local")
    with caplog.at_level(logging.WARNING, "apportion"):
        assert [seen(batch) for batch in loader] == expected
    assert loader.metrics()["fallbacks"] == 2
    lines = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in lines] == ["iteration 1", "iteration 2"]
    for number, text in enumerate(lines, 1):
        assert f"no plan in time (iteration {number} is late)" in text


def test_a_plan_that_arrives_restores_the_patience_for_later_ones() -> None:
    iterations, waits = Iterations(BatchBuilder(job(), np.array([8]), None), [[0]]), list[float]()
    with closing(Lookahead(HereSource(), iterations, 0, 0.4, Fetched)) as ahead:
        for arrives in (False, False, True):
            if arrives:
                ahead.fetch(iterations.at(0))
            begun_s = time.monotonic()
            with pytest.raises(TimeoutError):
                ahead.take(1)
            waits.append(time.monotonic() - begun_s)
    assert min(waits[0], waits[2]) >= 0.4


def test_an_error_of_a_source_is_raised_at_its_iteration() -> None:
    batches = iter(loader_of(planning(job(), HereSource(broken=frozenset([2])))))
    assert [next(batches).iteration, next(batches).iteration] == [0, 1]
    with pytest.raises(ConfigError, match="are refused"):
        next(batches)
    assert no_threads()


def no_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "apportion-plans"]


# --- plans of another request


def without_last_sequence(job: Job, batches: tuple[Batch, ...]) -> tuple[Job, tuple[Batch, ...]] | None:
    return job, (*batches[:-1], batches[-1].take(range(len(batches[-1].lengths) - 1)))


def with_other_lengths(job: Job, batches: tuple[Batch, ...]) -> tuple[Job, list[Batch]]:
    return job, [Batch.from_lengths([*one.lengths[:-1], one.lengths[-1] + 1]) for one in batches]


OTHERS = {
    "another mask": lambda job, batches: (
        job,
        [Batch.from_lengths(b.lengths, masks.full()) for b in batches],
    ),
    "other lengths": with_other_lengths,
    "without the last sequence": without_last_sequence,
    "a microbatch less": lambda job, batches: (job, batches[:1]),
    "another model": lambda job, batches: (replace(job, model=replace(job.model, kv_heads=2)), batches),
    "another seed": lambda job, batches: (replace(job, policy=replace(job.policy, seed=7)), batches),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_a_plan_of_another_request_is_refused(difference: str) -> None:
    original = job(microbatches=2, tokens=100)
    sampler = [[[0, 1, 2], [3, 4]], [[5], [6]]]
    assert list(loader_of(planning(original), sampler=sampler))
    with pytest.raises(ExecutionError, match="iteration 0: the plan is not the one that this rank requested"):
        list(loader_of(planning(original, HereSource(other=OTHERS[difference])), sampler=sampler))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_packed_plan_of_other_sequences_is_refused(workers: int) -> None:
    requested = job(recipe="wlb", microbatches=2, tokens=200)
    assert list(loader_of(planning(requested), workers=workers))
    with pytest.raises(ExecutionError, match=r"it has \d+ sequences, \d+ were requested"):
        list(loader_of(planning(requested, HereSource(other=without_last_sequence)), workers=workers))


@pytest.mark.parametrize("recipe", recipes.entries())
def test_plans_of_every_recipe_match_their_request(recipe: str) -> None:
    """With and without the job's own cap and hardware."""
    requested = job(2, 128, recipe=recipe, microbatches=2 if find_recipe(recipe).step("pack") else 1)
    capped = replace(requested, policy=replace(requested.policy, token_cap=108), hardware="h100")
    for one in (requested, capped):
        batches = [Batch.from_lengths([40, 9, 33, 1, 25])]
        piece = plan_job(one, batches).slice_for(0)
        Iteration(one, 0, (np.arange(5),), tuple(batches)).check(piece)


# --- submitting


def test_iterations_are_submitted_ahead_of_the_trainer() -> None:
    source = HereSource()
    sampler = [[i] for i in range(7)]
    batches = iter(loader_of(planning(job(), source), lookahead=3, shuffle=False, sampler=sampler))
    next(batches)
    batches.close()
    keys = [key for key, _ in source.submitted]
    assert 3 <= len(dict.fromkeys(keys)) <= 4
    assert max(ahead for _, ahead in source.submitted) == 2


# --- agreement of ranks


def test_ranks_agree_on_a_plan_that_some_ranks_lack(pool: Pool) -> None:
    whole = job(3, 66)
    expected = [ids for ids, _, _ in pool.run(jobs_loader.agreeing, 3, [planning(whole)] * 3)]
    late = [planning(whole, HereSource(frozenset(own))) for own in ([], [1], [1, 3])]
    results = pool.run(jobs_loader.agreeing, 3, late)
    assert [ids for ids, _, _ in results] == expected
    assert [fallbacks for _, fallbacks, _ in results] == [2, 2, 2]
    assert {error for _, _, error in results} == {""}


def test_a_refused_plan_on_one_rank_ends_all_ranks(pool: Pool) -> None:
    kwargs = [planning(job(2)), planning(job(2), HereSource(broken=frozenset([1])))]
    (ids, _, first), (_, _, second) = pool.run(jobs_loader.agreeing, 2, kwargs)
    assert len(ids) == 1
    assert first == "ExecutionError: iteration 1: ranks [1] have no plan: " + second + " on rank 1"
    assert second.startswith("ConfigError: batches = 1: are refused")


def test_ranks_that_hold_different_plans_all_fail(pool: Pool) -> None:
    kwargs = [planning(job(2, seed=seed), shuffle=False) for seed in (0, 1)]
    results = pool.run(jobs_loader.agreeing, 2, kwargs)
    assert all(error.startswith("ExecutionError: ranks hold different plans") for _, _, error in results)


def test_ranks_that_begin_different_passes_fail(pool: Pool) -> None:
    for error in pool.errors(jobs_loader.apart, 2, planning(job(2))):
        assert "ranks begin different passes" in error
    others = [planning(job(2)), {**planning(job(2)), "shifted": ["labels", "worth"]}]
    results = pool.run(jobs_loader.agreeing, 2, others)
    assert all("microbatch 0, with shifted=['labels', 'worth'] on rank 1" in error for _, _, error in results)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([[[0], [1, 3]]], "2 microbatches, samples [0] of [40] tokens, [1, 3] of [9, 1] tokens under"),
        ([[[0], [1], [3]]], "3 microbatches, samples [0] of [40] tokens, [1] of [9] tokens, [3] of [1] tok"),
        ([[[0]]], "1 microbatches, samples [0] of [40] tokens under"),
    ],
)
def test_a_rank_with_other_microbatches_is_named_with_its_samples(
    pool: Pool, other: Any, message: str
) -> None:
    samplers = [[[[0], [1]]], other, [[[0], [1]]]]
    results = pool.run(jobs_loader.drawn, 3, planning(job(3, 66, 3)), samplers)
    assert [found for found, _ in results] == [0] * 3
    errors = {error for _, error in results}
    assert len(errors) == 1
    error = errors.pop()
    assert error.startswith("ExecutionError: ranks hold different plans: ")
    assert message in error
    assert error.count("on rank 1") == error.count("on ranks 0, 2") == 1


@pytest.mark.parametrize("on_timeout", ["raise", "local"])
def test_a_wrong_sampler_on_one_rank_ends_all_ranks_with_its_error(pool: Pool, on_timeout: str) -> None:
    """Also holds if only its number of microbatches is too large."""
    for other, message in (
        ([[[0]], [[1], [3]]], "must be 1 to 1: one per microbatch"),
        ([[[0]], [[9]]], r"= 9"),
    ):
        kwargs = planning(job(3, 66), on_timeout=on_timeout)
        results = pool.run(jobs_loader.drawn, 3, kwargs, [[[[0]], [[1]]], other, [[[0]], [[1]]]])
        assert [found for found, _ in results] == [1] * 3
        assert results[1][1].startswith("ConfigError: ")
        assert results[0] == results[2]
        assert all(message in error and "on rank 1" in error for _, error in results[::2])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("sampler", "draw different samples: 1 microbatches, samples [0, 1] of [64, 64] tokens"),
        ("dataset", "read different tokens, labels or fields of sample 0: "),
        ("dataset, samples whole", "read different tokens, labels or fields of sample 0: "),
        ("dataset, samples whole, resumed", "read different tokens, labels or fields of sample 2: "),
        ("field", "read different tokens, labels or fields of sample 0: "),
    ],
)
def test_ranks_that_read_different_samples_of_equal_lengths_fail(pool: Pool, mode: str, message: str) -> None:
    errors = pool.errors(jobs_loader.equally_long, 2, planning(job(2, 128)), mode)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"ExecutionError: iteration {int('resumed' in mode)}: ranks {message}")


def test_gradients_of_a_plain_module_are_summed_once_per_step(pool: Pool) -> None:
    assert pool.run(jobs_loader.summed_again, 2, 1) == [5.0, 5.0]
    for error in pool.errors(jobs_loader.summed_again, 2, 2):
        assert "has gradients that are sums already; call sum_gradients once" in error


@pytest.mark.parametrize("inside", [False, True])
def test_averaged_gradients_of_ddp_are_turned_into_sums_once(pool: Pool, inside: bool) -> None:
    for error in pool.errors(jobs_loader.summed_twice, 2, inside):
        assert "sums its gradients already" in error


def test_ranks_with_passes_of_different_lengths_fail_and_are_named(pool: Pool) -> None:
    samplers = [[[[0]], [[1]]], [[[0]]], [[[0]], [[1]]]]
    results = pool.run(jobs_loader.drawn, 3, planning(job(3, 66)), samplers)
    assert [found for found, _ in results] == [1, 1, 1]
    for _, error in results:
        assert "all_gather of plans on ranks 0, 2" in error
        assert "all_gather of the end of a pass on rank 1" in error
