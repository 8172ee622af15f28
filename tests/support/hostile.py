"""Data of any form, for readers that may raise only typed errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from apportion.ir.errors import ApportionError

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def check_refusal(call: Callable[[], Any]) -> None:
    """Any error other than a typed one passes through."""
    with contextlib.suppress(ApportionError):
        call()
