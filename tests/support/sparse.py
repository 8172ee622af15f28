"""Sparse test matrices: `make test` runs a part and `make test-slow` the rest."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def marked(values: list[Any] | range, quick: tuple[int, ...] | range | list[int]) -> list[Any]:
    """All values as parameters; those not at one of the indices `quick` are marked slow."""
    return [
        value if at in quick else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def sparse(values: list[Any] | range, every: int) -> list[Any]:
    """All values as parameters: the first and every `every`-th after it are quick, the others slow."""
    return marked(values, range(0, len(values), every))


def sparse_product(every: int, *axes: Any) -> list[Any]:
    """All combinations, as parameters of as many arguments; of the quick ones every axis has each value where `every`
    has no factor in common with the axes behind it."""
    return [
        pytest.param(*values, marks=[pytest.mark.slow] * (at % every > 0))
        for at, values in enumerate(product(*axes))
    ]
