"""A microbatch in two nano-batches: whole sequences, even in tokens and in work."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.sequences import Sequence
from apportion.planner.iteration.nano import nano_batches


def difference(sizes: list[NDArray[Any]], side: NDArray[Any]) -> float:
    """The larger of the differences between halves, as a part of the whole."""
    return max(abs(np.dot(size, side)) / size.sum() for size in sizes)


def best_of_all(sizes: list[NDArray[Any]]) -> float:
    sides = product((1, -1), repeat=len(sizes[0]) - 1)
    return min(difference(sizes, np.array((1, *side))) for side in sides)


@given(st.lists(st.integers(1, 4000), min_size=2, max_size=40))
def test_halves_are_a_partition_in_order(lengths: list[int]) -> None:
    halves = nano_batches(Batch.from_lengths(lengths))
    ping, pong = halves.indexes
    assert sorted([*ping, *pong]) == list(range(len(lengths)))
    assert ping[0] == 0
    assert len(pong) > 0
    for half, indexes in ((halves.ping, ping), (halves.pong, pong)):
        assert list(indexes) == sorted(indexes)
        assert half.lengths.tolist() == [lengths[i] for i in indexes]
    assert halves.token_share == pytest.approx(halves.ping.tokens / sum(lengths))
    areas = [half.area("default") for half in (halves.ping, halves.pong)]
    assert halves.work_share == pytest.approx(areas[0] / sum(areas))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=10))
def test_few_sequences_have_the_best_of_all_partitions(lengths: list[int]) -> None:
    length = np.array(lengths)
    sizes = [length, length * (length + 1) // 2]
    halves = nano_batches(Batch.from_lengths(lengths))
    found = 2 * max(abs(halves.token_share - 0.5), abs(halves.work_share - 0.5))
    assert found == pytest.approx(best_of_all(sizes), abs=1e-9)


def test_many_sequences_are_even_in_both() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(2048), 1.0, 500).astype(int) + 1
    halves = nano_batches(Batch.from_lengths(lengths))
    assert abs(halves.token_share - 0.5) < 1e-3
    assert abs(halves.work_share - 0.5) < 1e-3


def test_by_tokens_as_in_the_paper() -> None:
    """Three long sequences: equal work is impossible, equal tokens are not."""
    batch = Batch.from_lengths([1000] * 3 + [10] * 400)
    assert nano_batches(batch, by="tokens").token_share == pytest.approx(0.5, abs=2e-3)
    both = nano_batches(batch)
    assert abs(both.work_share - 0.5) < abs(nano_batches(batch, by="tokens").work_share - 0.5)


def test_sequences_keep_what_they_carry() -> None:
    rows = [
        Sequence(9, masks.full(), home_ranks=(1,)),
        Sequence(7, masks.causal(), positions=range(7, 14)),
        Sequence(4, masks.sliding_window(2)),
    ]
    batch = Batch.from_sequences(rows)
    halves = nano_batches(batch)
    for half, indexes in zip((halves.ping, halves.pong), halves.indexes, strict=True):
        for place, i in enumerate(indexes.tolist()):
            alone = Batch.from_sequences([rows[i]])
            assert half.take([place]) == alone
            assert half.home_ranks.get(place) == alone.home_ranks.get(0)


def test_layers_weigh_the_kinds() -> None:
    """Two sequences dense in one kind, two in the other: which pairs matter decides who is apart."""
    kinds = [
        {"a": masks.full(), "b": masks.sliding_window(1)},
        {"a": masks.sliding_window(1), "b": masks.full()},
    ]
    batch = Batch.from_sequences([Sequence(50, kinds[i]) for i in (0, 0, 1, 1)])
    apart = {}
    for kind, other in (("a", "b"), ("b", "a")):
        ping, _ = nano_batches(batch, {kind: 1, other: 0}).indexes
        apart[kind] = {i // 2 for i in ping.tolist()}
    assert apart == {"a": {0, 1}, "b": {0, 1}}


def test_equal_batches_give_equal_halves() -> None:
    lengths = [30, 30, 20, 20, 10, 10, 1]
    first, second = (nano_batches(Batch.from_lengths(lengths)) for _ in range(2))
    assert [i.tolist() for i in first.indexes] == [i.tolist() for i in second.indexes]


def test_one_sequence_has_no_halves() -> None:
    with pytest.raises(ConfigError, match=r"a sequence stays whole.*pack more sequences"):
        nano_batches(Batch.from_lengths([4096]))


def test_unknown_criterion() -> None:
    with pytest.raises(UnknownNameError, match="tokens"):
        nano_batches(Batch.from_lengths([2, 1]), by="flops")
