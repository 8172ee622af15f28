"""Hot loops are compiled once for each machine; who does so says it, and how long it took."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apportion import cli
from apportion.ir import jit
from apportion.planner import warm
from apportion.planner.recipes import entries, find_recipe

SORT = """
import numpy as np
from apportion.ir.jit import compiling
from apportion.ir.sorting import stable_order
stable_order(np.arange(5000))
print(compiling.loops, compiling.seconds)
"""


def test_every_case_is_planned_read_and_simulated() -> None:
    cases = warm.cases_of(map(find_recipe, entries()))
    for case in cases:
        warm.through(case)
    done: list[str] = []
    found = warm.warm(cases, done.append)
    assert found == (0, 0.0, len(done), [], jit.COMPILES)
    assert done == ([*(case.name for case in cases[1:]), ""] if jit.COMPILES else [])


@jit.lean
def _plus(number: int, flag: bool) -> int:
    return number + 1 if flag else number


@jit.jit
def _adds(column: jit.Any) -> int:
    """Calls with literals, and with numbers of several widths."""
    total = _plus(3, True) + _plus(4, False)
    for row in range(len(column)):
        total += _plus(column[row], row > 1)
    return total


def test_a_loop_is_compiled_once_for_all_numbers_that_other_loops_pass() -> None:
    assert [_adds(np.arange(4, dtype=kind)) for kind in (np.int32, np.int64)] == [16, 16]
    assert not jit.COMPILES or len(_plus.nopython_signatures) <= 1  # type: ignore[attr-defined]  # 0: from the cache


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["jit"] is jit.COMPILES
    assert cli.main(["warmup", "--recipes", "fcp"]) == cli.OK
    said = capsys.readouterr().out
    assert said.startswith("all loops were compiled already" if jit.COMPILES else "nothing to compile")


def test_nothing_is_compiled_where_numba_must_not() -> None:
    command = [sys.executable, "-m", "apportion", "warmup", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {"loops": 0, "seconds": 0.0, "cases": 0, "missing": [], "jit": False}


@pytest.mark.skipif(not jit.COMPILES, reason="needs numba")
def test_compiling_is_counted_and_reading_the_cache_is_not(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    cold, loaded = (
        subprocess.run(
            [sys.executable, "-c", SORT], env=environment, capture_output=True, check=True
        ).stdout.split()
        for _ in range(2)
    )
    assert int(cold[0]) >= 1
    assert float(cold[1]) > 0.05
    assert [float(part) for part in loaded] == [0, 0]


def test_it_is_said_once_and_only_where_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    found = jit.Compiling()
    with caplog.at_level(logging.WARNING):
        found.begin()
        found.end()
        assert 0 <= found.seconds < 1
        found.begin()
        found._begun_s -= 60.0
        assert not caplog.records
        for _ in range(2):  # called by the one that is being compiled
            found.begin()
            found.end()
        assert 60 <= found.seconds < 70
        found.end()
    assert [record.name for record in caplog.records] == ["apportion.ir.jit"]
    assert "apportion warmup" in caplog.text
    assert (found.loops, 60 <= found.seconds < 70) == (4, True)
