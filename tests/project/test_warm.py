"""Hot loops are compiled once for each machine; who does so says it, and how long it took."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from apportion import cli
from apportion.cli import output
from apportion.ir.loops import jit, shelf
from apportion.planner import warm
from apportion.planner.recipe.recipes import entries, find_recipe

SORT = """
import numpy as np
from apportion.ir.loops.jit import compiling
from apportion.ir.loops.sorting import stable_order
stable_order(np.arange(5000))
print(compiling.loops, compiling.seconds)
"""


SHELF = """
import sys
from pathlib import Path
import numpy as np
from apportion.ir.loops.jit import compiling, shelf
root, how = Path(sys.argv[1]), sys.argv[2]
if how == "write":
    shelf.write_into(root)
elif how == "old CPU":
    shelf.level = None
elif how == "edited":
    shelf.sources = b"others"
shelf.root = root
from apportion.ir.loops.sorting import counting_order
counting_order(np.array([2, 0, 1]), 3)
print(compiling.loops)
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
def _adds(column: Any) -> int:
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


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_is_drawn_on_a_terminal(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(
        output, "Console", lambda stderr: Console(file=terminal, force_terminal=True, width=100)
    )
    with output.progress("compiling", 2, shown) as report:
        report("one node", detail="7 loops")
    said = terminal.getvalue()
    assert [word in said for word in ("compiling one node", "1/2", "7 loops")] == [shown] * 3


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


@pytest.mark.skipif(not jit.COMPILES, reason="needs numba")
@pytest.mark.parametrize(
    "broken", [b"capportion.ir.gone\nRows\n.", b"\x80\x04", b""], ids=["type gone", "cut", "empty"]
)
def test_a_cache_that_cannot_be_read_is_made_anew(broken: bytes, tmp_path: Path) -> None:
    def compiled() -> int:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", SORT]
        return int(
            subprocess.run(command, env=environment, capture_output=True, check=True).stdout.split()[0]
        )

    assert compiled() >= 1
    for index in tmp_path.rglob("*.nbi"):
        version = io.BytesIO(index.read_bytes())
        pickle.load(version)  # numba's own; what follows is the index
        index.write_bytes(index.read_bytes()[: version.tell()] + broken)
    assert [compiled(), compiled()] == [1, 0]


@pytest.mark.skipif(
    not jit.COMPILES or shelf.level_here() is None, reason="needs numba, and a CPU of a level"
)
def test_loops_of_a_wheel_are_taken_where_cpu_and_sources_are_those(tmp_path: Path) -> None:
    def compiled(how: str) -> int:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / how)}
        command = [sys.executable, "-c", SHELF, str(tmp_path / "shelf"), how]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    assert compiled("write") == 1
    assert {path.suffix for path in tmp_path.rglob("shelf/*/*")} == {".nbi", ".nbc"}
    assert not list(tmp_path.rglob("write/*/*.nbc"))
    assert [compiled(how) for how in ("read", "old CPU", "edited")] == [0, 1, 1]
    for suffix in (".nbc", ".nbi"):  # cut short: as where no wheel brought it
        (path,) = tmp_path.glob(f"shelf/*/*{suffix}")
        path.write_bytes(path.read_bytes()[:-40])
        assert compiled(f"without {suffix}") == 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
@pytest.mark.parametrize("lacks", ["", "avx2", "neon"])
def test_a_level_is_one_that_the_cpu_has(machine: str, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    known = frozenset[str]().union(*(level.needs for level in shelf.LEVELS.values())) | {"avx512f"}
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {name: name != lacks for name in known})
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = shelf.level_here()
    wanted = {"x86_64": "x86-64-v3", "aarch64": "generic"} if not lacks else {}
    wanted |= {"avx2": {"aarch64": "generic"}, "neon": {"x86_64": "x86-64-v3"}}.get(lacks, {})
    assert (found and found.cpu) == wanted.get(machine)


@pytest.mark.skipif(not jit.HAS_NUMBA, reason="needs numba")
def test_a_cpu_of_no_level_compiles_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(shelf, "level_here", lambda: None)
    monkeypatch.setattr(jit, "shelf", shelf.Shelf(tmp_path))
    assert cli.main(["warmup", "--into", str(tmp_path / "loops")]) == cli.BAD_INPUT
    assert "x86-64-v3" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_it_is_said_once_and_only_where_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    found = jit.Compiling()
    with caplog.at_level(logging.WARNING):
        found.begin()
        found.end()
        assert 0 <= found.seconds < 50
        found.begin()
        found._begun_s -= 60.0
        assert not caplog.records
        for _ in range(2):  # called by the one that is being compiled
            found.begin()
            found.end()
        assert 60 <= found.seconds < 110
        found.end()
    assert [record.name for record in caplog.records] == ["apportion.ir.loops.jit"]
    assert "apportion warmup" in caplog.text
    assert (found.loops, 60 <= found.seconds < 110) == (4, True)
