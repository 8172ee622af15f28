"""Invalid places of an encoder's rows in a decoder; tests/trainer/test_media.py trains with valid ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

import apportion as ap
from tests.ranks import jobs_media
from tests.ranks.jobs_media import MERGE, MODEL
from tests.ranks.rank_pool import Pool


@pytest.mark.parametrize(
    ("places", "merge", "more", "error"),
    [
        ([[[31, 0, 5]], [[32, 0, 5]]], MERGE, 0, "ExecutionError: ranks feed plan .* at different places"),
        (
            [[[31, 0, 4]]],
            MERGE,
            0,
            "ConfigError: .*must name each of the encoder's 20 rows once, 4 per token",
        ),
        ([[[31, 0, 5]]], 5, 0, "ConfigError: .*must name each of the encoder's 20 rows once, 5 per token"),
        ([[[31, 0, 3], [33, 12, 2]]], MERGE, 0, "ConfigError: .*the decoder's 70 tokens, without overlap"),
        ([[[66, 0, 5]]], MERGE, 0, "ConfigError: .*runs of the decoder's 70 tokens"),
        ([[[31, 0]]], MERGE, 0, r"ConfigError: places.shape = \(1, 2\): must be \[n, 3\]"),
        ([[[31, 0, 5]]], 0, 0, "ConfigError: merge = 0"),
        ([[[7, 0, 5]]], MERGE, 1, "ExecutionError: this rank holds 10 rows of the encoder, got 11"),
    ],
)
def test_invalid_places_and_numbers_of_rows_are_refused_on_every_rank(
    pool: Pool, places: Any, merge: int, more: int, error: str
) -> None:
    batches = ap.Batch.from_lengths([20], ap.masks.full()), ap.Batch.from_lengths([30, 40])
    encoder, decoder = (ap.plan(batch, ap.Cluster(1, 2), MODEL, "blend") for batch in batches)
    pieces = [(encoder.for_rank(i).encode(), decoder.for_rank(i).encode()) for i in range(2)]
    for found in pool.errors(jobs_media.fed, 2, places, merge, more, each=pieces):
        assert re.match(error, found, re.DOTALL)
