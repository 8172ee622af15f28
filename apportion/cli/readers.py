"""Tests a reader's command against the conformance suite; `schemas/conformance/README.md` has the protocol.

COMMAND read PLAN           prints the tables as JSON
COMMAND check PLAN          exits with 0 if the bytes are well formed, else with 1
COMMAND run CASE OUTPUTS    executes a plan on the case's inputs
COMMAND verify PLAN         exits with 0, or with 1 and the name of the rule that the plan breaks first
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError

#: level -> verbs of its questions; a level includes all lower levels
LEVELS = {
    "read": ("read", "check"),
    "run": ("read", "check", "run"),
    "verify": ("read", "check", "run", "verify"),
}
#: rules whose violation makes a reader refuse the bytes, since they are not a plan
_REFUSAL_RULES = ("digests",)
_QUOTED = 300  # characters quoted from a command's output
_INDEX = "suite.json"


@dataclass(frozen=True)
class Suite:
    """A folder of plans and their expected results. index: its `suite.json`."""

    folder: Path
    index: Mapping[str, Any]

    @staticmethod
    def open(folder: Path) -> Suite:
        """The suite in a folder; if there is no such folder, this release's suite is written there first. Raises
        ConfigError."""
        if not folder.exists():
            shutil.copytree(packaged_suite(), folder)
        return Suite(folder, _index_of(folder))

    @property
    def counts(self) -> dict[str, int]:
        """Number of entries in each group."""
        return {name: len(entries) for name, entries in self.index.items() if name != "version"}


def packaged_suite() -> Path:
    """The folder of this release's suite."""
    from apportion import schemas

    return Path(str(schemas.__file__)).parent / "conformance"


def _index_of(folder: Path) -> Mapping[str, Any]:
    remedy = "name a folder that does not exist, and the suite is written to it"
    if not (folder / _INDEX).is_file():
        raise ConfigError("PATH", str(folder), f"must hold a suite, which has a {_INDEX}", remedy)
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        expected = json.loads((packaged_suite() / _INDEX).read_text(encoding="utf-8"))
        is_known = index.keys() == expected.keys() and index["version"] == expected["version"]
    except (ValueError, AttributeError):
        is_known = False
    if not is_known:
        raise ConfigError("PATH", str(folder), f"its {_INDEX} is not of this release's format", remedy)
    return dict(index)


@dataclass(frozen=True)
class Question:
    """A question to a reader. name: group and name of its entry. path: the plan, or the folder of a case. expected: the
    exit code; rule: the rule that the plan breaks, which `verify` must print."""

    verb: str
    name: str
    path: Path
    expected: int = 0
    rule: str = ""
    tolerance: float = 0.0


@dataclass(frozen=True)
class Answer:
    """The result of a question. why: what is wrong, in one paragraph; empty if the answer is correct."""

    question: Question
    why: str = ""

    def to_data(self) -> dict[str, Any]:
        """The result as plain data, for `--json`."""
        return {"ask": self.question.verb, "of": self.question.name, "ok": not self.why, "why": self.why}


def questions(suite: Suite, level: str, only: str = "") -> list[Question]:
    """All questions of a level; only: text that the names of their entries must contain."""
    items = [*_case_questions(suite), *_byte_questions(suite, "malformed"), *_byte_questions(suite, "broken")]
    return [question for question in items if question.verb in LEVELS[level] and only in question.name]


def _case_questions(suite: Suite) -> Iterator[Question]:
    for group in ("cases", "reading", "slices"):
        for entry in suite.index[group]:
            name = f"{group}/{entry['name']}"
            folder = suite.folder / name
            plan = folder / "case.plan" if group == "cases" else folder.with_suffix(".plan")
            yield Question("read", name, plan)
            yield Question("check", name, plan)
            if group == "cases":
                yield Question("run", name, folder, tolerance=float(entry["tolerance"]))
                yield Question("verify", name, plan)


def _byte_questions(suite: Suite, group: str) -> Iterator[Question]:
    for entry in suite.index[group]:
        name, rule = f"{group}/{entry['name']}", entry["breaks"]
        path = suite.folder / f"{name}.plan"
        yield Question("check", name, path, int(group == "malformed" or rule in _REFUSAL_RULES), rule)
        if group == "broken":
            yield Question("verify", name, path, 1, rule)


@dataclass(frozen=True)
class Reader:
    """A command that implements the protocol. timeout_s: per question. tolerance: replaces the tolerances of cases."""

    command: Sequence[str]
    timeout_s: float = 60.0
    tolerance: float | None = None

    def ask(self, question: Question) -> Answer:
        """Asks one question in a separate process. Raises ConfigError if the command cannot be started."""
        with tempfile.TemporaryDirectory(prefix="apportion-") as folder:
            outputs = Path(folder) / "outputs.f64"
            words = [question.verb, str(question.path), *([str(outputs)] if question.verb == "run" else [])]
            try:
                process = self._start(words)
            except subprocess.TimeoutExpired:
                return Answer(question, f"no answer in {self.timeout_s:g} s")
            return Answer(question, _exit_fault(question, process) or self._fault(question, process, outputs))

    def _start(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [*self.command, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
        except OSError as error:
            rule = f"cannot be started: {error.strerror}"
            raise ConfigError("COMMAND", self.command[0], rule, "name a program, with its path") from None

    def _fault(self, question: Question, process: subprocess.CompletedProcess[bytes], outputs: Path) -> str:
        if question.verb == "read":
            return _read_fault(question.path, process.stdout)
        if question.verb == "run":
            return _run_fault(
                question, outputs, question.tolerance if self.tolerance is None else self.tolerance
            )
        if question.verb == "verify" and question.rule:
            rule = process.stdout.decode(errors="replace").split("\n")[0].strip()
            return (
                "" if rule == question.rule else f"expected the rule {question.rule}, got {rule[:_QUOTED]!r}"
            )
        return ""


def _exit_fault(question: Question, process: subprocess.CompletedProcess[bytes]) -> str:
    """Describes an exit status other than the expected one; empty if it is as expected."""
    if process.returncode == question.expected:
        return ""
    message = process.stderr.decode(errors="replace").strip()[-_QUOTED:]
    breaks = f" for a plan that breaks the rule {question.rule}" if question.rule else ""
    status = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return f"{status}{breaks}, expected exit code {question.expected}{': ' + message if message else ''}"


def _read_fault(plan: Path, output: bytes) -> str:
    path = plan.with_name("tables.json") if plan.name == "case.plan" else plan.with_suffix(".json")
    try:
        actual = json.loads(output)
    except ValueError as error:
        return f"stdout is not JSON: {error}"
    return difference(json.loads(path.read_text(encoding="utf-8")), actual)


def difference(expected: Any, actual: Any, path: str = "") -> str:
    """A description of the first difference between plain data; empty if there is none."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if list(expected) != list(actual) and set(expected) != set(actual):
            return f"{path or 'the map'}: expected the keys {list(expected)}, got {list(actual)}"
        inner = (difference(expected[key], actual[key], f"{path}.{key}".lstrip(".")) for key in expected)
        return next(filter(None, inner), "")
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return f"{path}: expected {len(expected)} items, got {len(actual)}"
        pairs = enumerate(zip(expected, actual, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    equal = type(expected) is type(actual) and expected == actual
    return "" if equal else f"{path}: expected {str(expected)[:_QUOTED]}, got {str(actual)[:_QUOTED]}"


def _run_fault(question: Question, outputs: Path, tolerance: float) -> str:
    import numpy as np

    if not outputs.is_file():
        return "the command wrote no outputs"
    expected = np.fromfile(question.path / "outputs.f64", "<f8")
    if outputs.stat().st_size != expected.nbytes:
        return f"outputs have {outputs.stat().st_size} bytes, expected {expected.nbytes}"
    actual = np.fromfile(outputs, "<f8")
    with np.errstate(invalid="ignore"):
        near = (actual == expected) | (np.abs(actual - expected) <= tolerance * (1 + np.abs(expected)))
    if near.all():
        return ""
    index = int(np.flatnonzero(~near)[0])
    arrays = json.loads((question.path / "arrays.json").read_text(encoding="utf-8"))["outputs"]
    return (
        f"{_locate(arrays, index)}: expected {expected[index]:.17g}, got {actual[index]:.17g}; {int((~near).sum())} of "
        f"{len(near)} numbers differ by more than {tolerance:g} * (1 + |expected|)"
    )


def _locate(arrays: list[dict[str, Any]], position: int) -> str:
    """Names the array and the index of the number at a position of the outputs: `dk of global, rank 1, [3, 0, 2]`."""
    array = [entry for entry in arrays if entry["offset"] <= position and entry["shape"].count(0) == 0][-1]
    index, remainder = [], position - array["offset"]
    for size in reversed(array["shape"]):
        index.append(remainder % size)
        remainder //= size
    source = array.get("kind") or array.get("move")
    rank = f", rank {array['rank']}" if "rank" in array else ""
    return f"{array['name']} of {source}{rank}, {index[::-1]}"
