"""Numbers of requests: the rule that an error states is the one that the value breaks."""

from __future__ import annotations

import math
import re

import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.fields import number


@pytest.mark.parametrize(
    ("value", "low", "above", "rule"),
    [
        (-1e300, 0.0, False, "must be at least 0"),
        (-1e300, 0.0, True, "must be greater than 0"),
        (1e300, 0.0, False, "must be at most 1e+15"),
        (-(10**400), -math.inf, False, "must be at least -1.79769e+308"),
        (1e-300, 0.0, True, "must be at least 1e-15"),
    ],
)
def test_an_error_states_the_broken_rule(value: float, low: float, above: bool, rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        number("field", value, low, above)
