"""Mutated plans in decoder and verifier: typed errors only. `python -m tests.checks.fuzz_plans` tries many more."""

from __future__ import annotations

import random

import pytest

from apportion import DecodeError, Slice
from apportion.ir.bytes import codec
from apportion.ir.verify import check
from tests.checks import fuzz_plans
from tests.support.random_plans import random_plan
from tests.support.sparse import sparse


@pytest.mark.parametrize("seed", sparse(range(4), 4))
def test_mutated_plans_raise_only_typed_errors(seed: int) -> None:
    result = fuzz_plans.fuzz(fuzz_plans.golden_plans(), 500, seed)
    assert result.escaped == {}
    assert result.count == 500
    assert result.slowest_ms < 20_000  # no plan takes very long


def test_mutated_small_plans_raise_only_typed_errors() -> None:
    """Plans of kinds without pairs and ranks without tokens; mutations exchange programs, layouts and requests."""
    names = ("ring", "usp", "upipe")
    result = fuzz_plans.fuzz(list(fuzz_plans.planned(names)), 500, 11)
    assert result.escaped == {}
    assert result.outcomes["violations"] > 50


def test_mutations_reach_the_deep_checks() -> None:
    result = fuzz_plans.fuzz(fuzz_plans.golden_plans(), 300, 99)
    assert result.outcomes["DecodeError"] > 50
    assert result.outcomes["violations"] > 30
    assert len(result.rules) >= 3


def test_untyped_errors_are_counted_as_escapes() -> None:
    result = fuzz_plans.Result()

    def broken(plan: object) -> list[object]:
        raise KeyError("boom")

    fuzz_plans.try_plan(fuzz_plans.golden_plans()[0].encode(), result, broken)
    assert [name.split(" ")[0] for name in result.escaped] == ["KeyError"]
    assert result.outcomes["escaped"] == 1


def test_golden_plans_are_valid() -> None:
    assert [check(plan) for plan in fuzz_plans.golden_plans()] == [()] * len(fuzz_plans.golden_plans())


def test_random_plans_are_reported_as_invalid_without_an_exception() -> None:
    """Structurally valid plans of random numbers: the verifier reports violations and does not raise."""
    for seed in range(20):
        assert check(codec.decode(random_plan(seed).encode()))


def test_mutated_slices_raise_only_typed_errors() -> None:
    rng = random.Random(5)
    data = fuzz_plans.golden_plans()[-1].for_rank(1).encode()
    for _ in range(500):
        changed = rng.choice(fuzz_plans.RAW)(rng, data, data)
        if changed != data:
            with pytest.raises(DecodeError):
                Slice.decode(changed)
