"""Configuration of all tests: property tests use the same examples in every run, without time limits; planning in the
test process is checked after each step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from apportion.planner.pipeline.checks import checked_steps
from tests.ranks.rank_pool import Pool
from tests.support.commands import Command, CommandResult

settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def steps_are_checked() -> Iterator[None]:
    with checked_steps():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's rank pool; torch is imported only if a test uses it."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; returns its exit code and output."""

    def call(*args: object) -> CommandResult:
        from apportion import cli

        code = cli.main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return CommandResult(code, printed.out, printed.err)

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="test every strategy with every mask on the stage kernels"
    )
    parser.addoption("--gpu", action="store_true", help="run the stage kernels' tests on this machine's GPU")
