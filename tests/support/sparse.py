"""Matrices of which `make test` runs a part and `make test-slow` the rest."""

import pytest


def marked(values, quick):
    """All of them, as parameters; those that are not at one of the places `quick` are slow."""
    return [
        value if at in quick else pytest.param(value, marks=pytest.mark.slow)
        for at, value in enumerate(values)
    ]


def sparse(values, every):
    """All of them, as parameters: the first one and each `every`-th behind it are quick, the others slow."""
    return marked(values, range(0, len(values), every))
