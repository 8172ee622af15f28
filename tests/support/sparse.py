"""Matrices of which `make test` runs a part and `make test-slow` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def marked(values: list[Any] | range, quick: tuple[int, ...] | range | list[int]) -> list[Any]:
    """All of them, as parameters; those that are not at one of the places `quick` are slow."""
    return [
        value if at in quick else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def sparse(values: list[Any] | range, every: int) -> list[Any]:
    """All of them, as parameters: the first one and each `every`-th behind it are quick, the others slow."""
    return marked(values, range(0, len(values), every))
