"""Images in a loader: a tiny vision-language model on several ranks trains as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion import Communicator, ConfigError
from tests.ranks import jobs_media
from tests.ranks.jobs_media import IMAGES
from tests.ranks.rank_pool import Pool

WHOLE = ap.Recipe("whole", {"shard": {"sequences": {}}, "place": {"whole": {}}, "schedule": {"gather": {}}})


def steps_of(batches: list[Any]) -> list[list[list[int]]]:
    steps: list[list[list[int]]] = [[]]
    for _, samples, is_last in batches:
        steps[-1].append(samples)
        steps += [[]] if is_last else []
    return steps[:-1]


@pytest.mark.parametrize(
    ("options", "of_media", "ranks"),
    [
        ({"microbatches": 2, "seed": 3}, {}, 2),
        pytest.param({}, {}, 4, marks=pytest.mark.slow),
        ({"rows_multiple": 8}, {}, 2),
        ({"sampler": [[1, 3], [4], [2, 0]], "recipe": "fcp"}, {"recipe": "mixed"}, 4),
        ({"sampler": [[7]]}, {"recipe": WHOLE}, 4),  # only one rank has an image, and rows of it
    ],
)
def test_training_equals_one_process(pool: Pool, options: Any, of_media: Any, ranks: int) -> None:
    found = pool.run(jobs_media.train, ranks, options, of_media)
    steps = steps_of(found[0][0])
    losses, parameters = jobs_media.alone(steps)
    summed = np.sum([[one[0] for one in losses_by_step] for losses_by_step, _ in found], axis=0)
    np.testing.assert_allclose(summed, losses, rtol=0, atol=1e-10)
    for _, own in found:
        for one, expected in zip(own, parameters, strict=True):
            np.testing.assert_allclose(one, expected, rtol=0, atol=1e-10)


def test_worker_processes_read_images() -> None:
    def read(**options: Any) -> list[Any]:
        loader = jobs_media.loader(
            Communicator.shared(), jobs_media.media(), sampler=[[1], [0, 2], [4]], **options
        )
        return [None if x.media is None else (x.media.fields["patches"], x.feed.places) for x in loader]

    for one, other in zip(read(), read(workers=1, source="local"), strict=True):
        assert (one is None) == (other is None)
        for own, expected in zip(one or (), other or (), strict=True):
            np.testing.assert_array_equal(own, expected)


def test_an_order_divides_the_rows_of_a_medium_between_runs_of_its_tokens() -> None:
    orders = [np.arange(count) for *_, count in IMAGES]
    orders[0] = np.roll(orders[0], -4)
    images = jobs_media.media(orders=orders)
    (batch,) = jobs_media.loader(Communicator.shared(), images, sampler=[[0]])
    assert batch.feed.places.tolist() == [[2, 20, 4], [6, 0, 5], [20, 36, 25]]
    assert batch.feed.rows.tolist() == [*range(2, 11), *range(20, 45)]
    assert batch.feed.to("meta").rows.device.type == "meta"  # rows of the other feed are kept


PLACES = [list(one[:2]) for one in IMAGES]
SHIFTED, SHARED, OUTSIDE = [*PLACES[:-1], [7, 41]], [PLACES[0], [0, 10], *PLACES[2:]], [*PLACES[:-1], [8, 0]]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other places": ({"places": [(0, 2)]}, {}, r"media.places.shape = \(1, 2\): must be \[6, 2\]"),
    "a row too many": ({"lengths": [36, 100, 64, 16, 121, 16]}, {}, "multiple of merge = 4"),
    "no room in the sample": ({"places": SHIFTED}, {}, r"media.places\[5\].*covers tokens up to 45"),
    "two images on a token": ({"places": SHARED}, {}, r"media.places\[0\].*the limit is 10"),
    "no such sample": ({"places": OUTSIDE}, {}, "media.places"),
    "a recipe that packs": ({}, {"recipe": "wlb"}, "recipe.pack = 'with media'"),
    "a sampler of one pass": ({}, {"sampler": iter([[0]])}, "sampler = 'with media'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inconsistent_media_are_refused(case: str) -> None:
    media_options, options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        jobs_media.loader(Communicator.shared(), jobs_media.media(**media_options), **options)


MISTAKES = {
    "ignored": "a batch has media, but the model",
    "of the decoder": "a batch has media, but the model",
    "of the first batch": "used the plan of an earlier batch",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_optimizer_steps_for_a_model_that_ignores_images_or_their_plan(pool: Pool, mistake: str) -> None:
    found = pool.errors(jobs_media.misled, 2, mistake)
    assert all(MISTAKES[mistake] in one for one in found), found


def test_resuming_with_a_changed_sampler_order_is_refused(pool: Pool) -> None:
    found = pool.errors(jobs_media.drawing_otherwise, 2)
    assert all("draws the same samples in every iteration over it" in one for one in found)


def test_a_pass_resumes_in_the_middle_of_an_iteration(pool: Pool) -> None:
    for whole, rest in pool.run(jobs_media.resumed, 2) or [([], [])]:
        assert len(whole) > 3
        assert rest == whole[3:]
