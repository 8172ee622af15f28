"""The conformance suite: its plans reproduce its files; the package and the Python and C examples pass it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion import ConfigError, Plan, cli
from apportion.cli import readers
from apportion.cli.readers import Answer, Question, Reader, Suite, difference, questions
from apportion.ir import verify
from apportion.ir.bytes import codec
from apportion.ir.bytes.sections import sections_id
from apportion.ir.isa import Op
from apportion.ir.tensors import PHASES
from tests.support import broken_plans, conformance_reader, conformance_suite
from tests.support.parse import parse
from tests.support.programs import run

ROOT = Path(__file__).parents[2]
FOLDER = conformance_suite.SUITE
SUITE = Suite.open(FOLDER)
READ_PLAN = [sys.executable, str(ROOT / "examples/read_plan.py")]


def wrong(answers: list[Answer]) -> list[str]:
    return [f"{a.question.verb} {a.question.name}: {a.why}" for a in answers if a.why]


# ---------------------------------------------------------------------------------------------- the files


def test_the_suite_files_can_be_regenerated_from_the_plans() -> None:
    made = conformance_suite.suite(conformance_suite.plans_of(FOLDER, replan=False))
    stored = {str(p.relative_to(FOLDER)): p.read_bytes() for p in FOLDER.rglob("*") if p.is_file()}
    assert sorted(stored) == sorted([*made, "README.md"])
    stale = [name for name, data in made.items() if data != stored[name] and not name.endswith("outputs.f64")]
    assert not stale, "`make suite` writes them"
    for name in (name for name in made if name.endswith("outputs.f64")):
        actual, expected = (np.frombuffer(data, "<f8") for data in (made[name], stored[name]))
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12, err_msg=name)
    assert sum(map(len, stored.values())) < 1_500_000


def test_the_cases_cover_the_format() -> None:
    plans = [Plan.decode(path.read_bytes()) for path in FOLDER.glob("cases/*/case.plan")]
    used = Counter(
        int(op) for p in plans for program in p.programs.values() for op in program["instructions"]["op"]
    )
    assert used.keys() == set(Op)
    assert {plan.header.dtype for plan in plans} == {"bf16", "fp16", "fp32", "fp64"}
    assert {plan.header.sent_gradients for plan in plans} == {"wide", "model"}
    assert any(plan.moves for plan in plans)
    assert any(len(plan.header.kinds) > 1 for plan in plans)
    kinds = [kind for plan in plans for kind in plan.header.recurrent.values()]
    scalar_and_diagonal = {("scalar", True), ("scalar", False), ("diagonal", True)}
    assert {(kind.gate, kind.delta) for kind in kinds} >= scalar_and_diagonal
    assert any(0 in plan.layout(plan.header.home_layout).rows_per_rank for plan in plans)
    assert {plan.header.home_layout for plan in plans} == {"attention", "loader"}
    assert {phase for plan in plans for _, phase in plan.programs} == set(PHASES)


def test_every_rule_is_broken_by_some_plan() -> None:
    broken = {entry["breaks"] for entry in SUITE.index["broken"]}
    # which violates only the coverage rule
    assert broken == {rule.name for rule in verify.RULES} - {"samples"}


# ---------------------------------------------------------------------------------------------- readers that pass


class InProcessReader(Reader):
    """The package as a reader, without a process for each question."""

    def _start(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        self.capture.readouterr()  # type: ignore[attr-defined]
        code = conformance_reader.main(*words)
        output = self.capture.readouterr()  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(words, code, output.out.encode(), output.err.encode())


def test_the_package_passes_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    InProcessReader.capture = capsys  # type: ignore[attr-defined]
    all_questions = questions(SUITE, "verify")
    assert Counter(q.verb for q in all_questions).keys() == set(readers.LEVELS["verify"])
    assert wrong([InProcessReader(["apportion"]).ask(question) for question in all_questions]) == []


@pytest.mark.slow
def test_the_python_example_passes_level_read() -> None:
    assert wrong([Reader(READ_PLAN).ask(question) for question in questions(SUITE, "read")]) == []


def compiled(folder: Path, *options: str) -> str:
    """Compiles the executor in C; skips the test if no compiler has these options."""
    program, compiler = folder / "execute_plan", shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    strict = ["-Wall", "-Wextra", "-Werror", "-std=c99"]
    sources = sorted(map(str, (ROOT / "examples/c").glob("*.c")))
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    probe = [compiler, *options, str(folder / "empty.c"), "-o", str(folder / "empty")]
    if options and subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"the C compiler has no {' '.join(options)}")
    run(compiler, "-O2", *strict, *options, *sources, "-o", program, "-lm")
    return str(program)


def test_the_c_example_passes_level_run(tmp_path: Path) -> None:
    program = compiled(tmp_path)
    assert wrong([Reader([program]).ask(question) for question in questions(SUITE, "run")]) == []


SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
def test_the_c_example_has_no_memory_errors(tmp_path: Path) -> None:
    """Runs broken and damaged plans under sanitizers."""
    program = compiled(tmp_path, *SANITIZERS)
    folder = tmp_path / "case"
    folder.mkdir()
    good = parse(broken_plans.GOOD)
    inputs = conformance_suite.inputs_of(good, conformance_suite.Case("broken"))
    plain_inputs = conformance_suite.packed(inputs)
    recurrent_inputs = (FOLDER / "cases/recurrent/inputs.f64").read_bytes()
    paths = sorted((FOLDER / "broken").glob("*.plan")) + sorted((FOLDER / "malformed").glob("*.plan"))
    for data in [*(path.read_bytes() for path in paths), *damaged_plans(60)]:
        (folder / "case.plan").write_bytes(data)
        (folder / "inputs.f64").write_bytes(recurrent_inputs if b"gated_delta" in data else plain_inputs)
        command = [program, "run", folder, folder / "outputs.f64"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Sanitizer" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), done.stderr


def damaged_plans(count: int) -> list[bytes]:
    """Plans with some changed bytes in a part, and the matching id."""
    rng, encoded = random.Random(7), []
    plans = [Plan.decode(path.read_bytes()).sealed() for path in sorted(FOLDER.glob("cases/*/case.plan"))]
    for _ in range(count):
        sealed = rng.choice(plans)
        number, parts = rng.randrange(len(sealed.parts)), [*sealed.parts]
        part = bytearray(parts[number])
        for _ in range(rng.randint(1, 3)):
            part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        parts[number] = bytes(part)
        changed = replace(sealed, parts=parts)
        encoded.append(codec.encode_wire(changed.with_id(sections_id(changed))))
    return encoded


# ---------------------------------------------------------------------------------------------- the command


def reader_of(tmp_path: Path, body: str) -> list[str]:
    """A reader command with this body, which may use `verb`, `path` and `words`."""
    script = tmp_path / "reader.py"
    script.write_text(f"import sys, os, json\nverb, path, *words = sys.argv[1:]\n{body}\n")
    return [sys.executable, str(script)]


def question_of(name: str, verb: str) -> Question:
    return next(q for q in questions(SUITE, "verify") if (q.name, q.verb) == (name, verb))


@pytest.mark.parametrize(
    ("verb", "name", "body", "why"),
    [
        ("check", "cases/fcp", "sys.exit('no')", "exit code 1, expected exit code 0: no"),
        ("check", "malformed/empty", "", "0 for a plan that breaks the rule envelope, expected exit code 1"),
        ("check", "malformed/empty", "os.abort()", "signal 6 for a plan that breaks the rule envelope"),
        ("check", "broken/id_of_zeros", "", "exit code 0 for a plan that breaks the rule digests"),
        ("read", "cases/fcp", "print('{')", "stdout is not JSON"),
        ("read", "cases/fcp", "print('[]')", "expected {"),
        ("run", "cases/fcp", "", "the command wrote no outputs"),
        ("run", "cases/fcp", "open(words[0], 'w').write('x')", "outputs have 1 bytes, expected 5776"),
        ("verify", "broken/merge_twice", "print('heads'); sys.exit(1)", "the rule delivery, got 'heads'"),
        ("verify", "cases/fcp", "sys.exit(1)", "exit code 1, expected exit code 0"),
        ("check", "cases/fcp", "import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_wrong_answers_are_described(tmp_path: Path, verb: str, name: str, body: str, why: str) -> None:
    timeout_s = 2.0 if "2 s" in why else 300.0
    answer = Reader(reader_of(tmp_path, body), timeout_s=timeout_s).ask(question_of(name, verb))
    assert why in answer.why
    assert answer.to_data() == {"ask": verb, "of": name, "ok": False, "why": answer.why}


def test_a_wrong_number_is_reported_with_its_position(tmp_path: Path) -> None:
    body = (
        "data = bytearray(open(path + '/outputs.f64', 'rb').read())\n"
        "listed = json.load(open(path + '/arrays.json'))['outputs']\n"
        "dk = next(a for a in listed if a['name'] == 'dk' and a['rank'] == 1)\n"
        "at = 8 * (dk['offset'] + 4 * 3 + 2)\n"
        "data[at:at + 8] = bytes(8)\n"
        "open(words[0], 'wb').write(data)\n"
    )
    command = reader_of(tmp_path, body)
    answer = Reader(command).ask(question_of("cases/fcp", "run"))
    assert answer.why.startswith("dk of default, rank 1, [3, 0, 2]: expected ")
    assert "got 0; 1 of 722 numbers differ by more than 1e-09 * (1 + |expected|)" in answer.why
    assert Reader(command, tolerance=100.0).ask(question_of("cases/fcp", "run")).why == ""


@pytest.mark.parametrize(
    ("actual", "why"),
    [
        ({"a": [1, {"b": 2}]}, ""),
        ({"a": [1, {"b": 3}]}, "a[1].b: expected 2, got 3"),
        ({"a": [1, {"b": True}]}, "a[1].b: expected 2, got True"),
        ({"a": [1]}, "a: expected 2 items, got 1"),
        ({"c": 1}, "the map: expected the keys ['a'], got ['c']"),
    ],
)
def test_differences_of_plain_data_are_described(actual: object, why: str) -> None:
    assert difference({"a": [1, {"b": 2}]}, actual) == why


def test_the_command_writes_the_suite_and_runs_a_reader(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "suite"
    assert cli.main(["conformance", str(folder)]) == 0
    assert "the suite of format 3.0: 31 cases, 5 reading, 7 slices" in capsys.readouterr().out
    assert (folder / "README.md").read_text() == (FOLDER / "README.md").read_text()
    options = [str(folder), "--level", "read", "--only", "malformed/cut", "--json", "--", *READ_PLAN]
    assert cli.main(["conformance", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["asked"], record["failed"]) == (True, 2, [])
    assert cli.main(["conformance", str(folder), "--only", "cases/fcp", "--", *reader_of(tmp_path, "")]) == 1
    assert "level run, 6 answers, 4 wrong\n  read cases/fcp: stdout is not JSON" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--level", "write"], "--level = 'write': must be one of read, run, verify"),
        (["--only", "no such name", "--", "true"], "no entry of the suite has such a name"),
        (["--", "/no/such/reader"], "cannot be started: No such file or directory"),
    ],
)
def test_invalid_options_of_the_command_are_refused(words: list[str], why: str, capsys: Any) -> None:
    assert cli.main(["conformance", str(FOLDER), *words]) == 2
    assert why in capsys.readouterr().err


def test_a_folder_without_a_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold a suite, which has a suite\.json"):
        Suite.open(tmp_path)
    for index in ("{", "[]", json.dumps({**SUITE.index, "version": [9, 0]})):
        (tmp_path / "suite.json").write_text(index)
        with pytest.raises(ConfigError, match="is not of this release's format"):
            Suite.open(tmp_path)
