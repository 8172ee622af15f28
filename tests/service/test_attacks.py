"""Each attack for a short time, and some of the requests of the fuzzer. `make soak` has them in full."""

from __future__ import annotations

import pytest

from tests.service.attacks import ATTACKS, attacked
from tests.service.request_fuzz import case


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_others_get_their_plans(name: str) -> None:
    attacked(1, name, seconds=2.0, timed=False)


@pytest.mark.slow
def test_no_request_is_the_servers_fault() -> None:
    case(1, requests=2000, timed=False)
