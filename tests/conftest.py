"""What holds for every test: property tests draw the same examples in every run and are not timed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="every strategy with every mask on the stage kernels"
    )
