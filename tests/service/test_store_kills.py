"""A killed process loses and tears nothing (see `store_kills`; `make soak` runs 100 seeds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.store_kills import case
from tests.support.sparse import sparse


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_what_returned_survives_sigkill(seed: int, tmp_path: Path) -> None:
    case(seed, tmp_path, kills=3)
