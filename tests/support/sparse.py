"""Sparse test matrices: `make test` runs a part and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def marked(values: list[Any] | range, quick: tuple[int, ...] | range | list[int]) -> list[Any]:
    """All values as parameters; those at indices outside `quick` are marked slow."""
    return [
        value if at in quick else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def sparse(values: list[Any] | range, every: int) -> list[Any]:
    """All values as parameters; the first and every `every`-th after it are quick, the others slow."""
    return marked(values, range(0, len(values), every))


def sparse_rows(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """All rows as parameters, one argument per column; quick ones as in `sparse`."""
    return [pytest.param(*row, marks=[pytest.mark.slow] * (at % every > 0)) for at, row in enumerate(rows)]


def sparse_product(every: int, *axes: Any) -> list[Any]:
    """All combinations as parameters, one argument per axis. The quick ones cover every value of an axis if `every` has
    no factor in common with the lengths of the following axes."""
    return sparse_rows(product(*axes), every)
