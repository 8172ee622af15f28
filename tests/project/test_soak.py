"""The cases of `benchmarks/soak.py` are functions of the tests."""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks import soak


@pytest.mark.parametrize("name", soak.CASES)
def test_a_case_is_there(name: str) -> None:
    module, function = soak.CASES[name].function.split(":")
    if module.endswith("ray_cases"):
        pytest.importorskip("ray")
    assert callable(getattr(import_module(f"tests.{module}"), function))
