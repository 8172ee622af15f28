"""What a trainer says of its model and masks, against the job of a source."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.masks.windows import Full
from apportion.trainer.loading.sources.told import Told, check_kinds
from tests.ranks.loading import MODEL, job

KINDS = {"global": masks.causal(), "local": masks.sliding_window(4)}


def two_kinds() -> Job:
    held = job()
    return replace(held, model=replace(held.model, layers={"global": 1, "local": 2}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q_heads": 4 * MODEL.kv_heads},
            f"the trainer's model has {4 * MODEL.kv_heads}, the job's {MODEL.q_heads};",
        ),
        (
            {"kv_heads": MODEL.q_heads},
            f"the trainer's model has {MODEL.q_heads}, the job's {MODEL.kv_heads};",
        ),
        ({"head_dim": 5}, f"the trainer's model has 5, the job's {MODEL.head_dim};"),
        ({"v_head_dim": 5}, f"the trainer's model has 5, the job's {MODEL.value_dim};"),
        ({"dtype": "fp16"}, f"the trainer's model has 'fp16', the job's {MODEL.dtype!r};"),
    ],
)
def test_another_model_is_an_error_that_names_both(change: dict[str, str | int], message: str) -> None:
    ((name, value),) = change.items()
    assert getattr(MODEL, name) != value
    with pytest.raises(ConfigError, match=re.escape(f"model.{name} = {value!r}: {message}")):
        Told(model=replace(MODEL, **change)).check(job())


def test_what_only_prices_plans_may_differ() -> None:
    Told(model=replace(MODEL, hidden=8, ffn=8, layers=7)).check(job())
    Told(model=replace(MODEL, layers={"global": 5, "local": 1})).check(two_kinds())
    Told(model=replace(MODEL, layers={"global": 5})).check(job())


def test_other_kinds_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.layers = .*has \['global'\], the job's \['global', 'local'\]"
    ):
        Told(model=replace(MODEL, layers={"global": 3})).check(two_kinds())


@pytest.mark.parametrize("given", [None, masks.full(), {"global": masks.full()}, [None], [masks.full()], []])
def test_masks_must_be_of_the_job_s_kinds(given: dict[str, Full] | list[Full | None] | Full | None) -> None:
    check_kinds(job(), given)
    with pytest.raises(ConfigError, match=r"masks = .*the job's model has layers of \['global', 'local'\]"):
        check_kinds(two_kinds(), given)


def test_masks_of_the_job_s_kinds_pass() -> None:
    check_kinds(two_kinds(), KINDS)
    check_kinds(two_kinds(), [KINDS, KINDS])
    named = replace(MODEL, layers={"default": 2})
    check_kinds(replace(job(), model=named), None)
    with pytest.raises(ConfigError, match=r"kinds \['global', 'local'\], .* layers of \['default'\]"):
        check_kinds(replace(job(), model=named), KINDS)
