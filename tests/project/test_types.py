"""Public names as type checkers see them: mypy must report each wrong use below, since unused ignores are errors."""
# mypy: enable-error-code="call-arg, arg-type"

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, assert_type

import pytest

import apportion as ap
from apportion.trainer.loading.loader import LoaderOptions

if TYPE_CHECKING:
    from torch.nn import Linear

    from apportion.trainer import hf

    def types(layer: Linear, cluster: ap.Cluster, model: ap.Model) -> None:
        ap.plam()  # type: ignore[attr-defined]
        ap.masks.casual()  # type: ignore[attr-defined]
        assert_type(hf.enable(layer), Linear)
        hf.loader([], layer, cluster, 8192, lookahead=4)
        hf.loader([], layer, cluster, 8192, lookahed=4)  # type: ignore[call-arg]
        hf.loader([], layer, cluster, 8192, lookahead="4")  # type: ignore[arg-type]
        ap.StreamedLoader([], cluster, model, 8192, buffer=8, lookahed=4)  # type: ignore[call-arg]


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        ap.plam  # type: ignore[attr-defined]  # noqa: B018
    assert {"plan", "masks", "__version__"} <= set(dir(ap))


def test_loaders_of_trainers_have_the_options_of_the_planned_loader() -> None:
    own = signature(ap.PlannedLoader).parameters.values()
    stated = {one.name: one.annotation for one in own if one.kind == one.KEYWORD_ONLY}
    assert {name: hint.__forward_arg__ for name, hint in LoaderOptions.__annotations__.items()} == stated
