"""README and documents say what happens: code prints what they show, commands run, files and links are there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from apportion import cli
from apportion.backends import numpy as executor
from apportion.ir.masks import bands
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.api import plan as make_plan
from tests.support import oracle

ROOT = Path(__file__).resolve().parents[2]
#: whose commands are run, one document after another, in a folder with the examples
RUN = ("README.md", "docs/index.md", "docs/shell.md", "docs/gains.md")
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in RUN)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
LINES = TEXT.replace("\\\n", "")  # continued lines as one
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^    (apportion .*)$", LINES, re.MULTILINE)]
SERVED = re.compile(r"apportion (serve|job)\b")  # `tests/service/test_readme.py` runs these


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_the_python_of_the_readme_prints_what_it_shows() -> None:
    script = ROOT / "examples/quickstart.py"
    assert script.read_text(encoding="utf-8").endswith(blocks("python")[0])
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == blocks("")[0]


def test_the_batch_of_the_readme_is_a_batch() -> None:
    assert Batch.from_data(json.loads(blocks("json")[0])).tokens == 24576 + 9000 + 2700


def test_the_recipe_of_the_readme_plans_and_runs() -> None:
    recipe = Recipe.from_data(yaml.safe_load(blocks("yaml")[0]))
    assert recipe == Recipe.load(ROOT / "examples/recipe.yaml")
    assert len(blocks("yaml")[0].splitlines()) <= 10
    batch = Batch.from_lengths([3000, 1100, 50])
    plan = make_plan(batch, Cluster(1, 4), Model(2, 1, 4, dtype="fp64", layers=1), recipe)
    problem = oracle.Problem.random(0, batch.tokens, 2, 1, 4, 4, False, None)
    found = executor.run(plan, "default", problem.q, problem.k, problem.v, problem.do)
    expected = oracle.dense(problem, bands.dense(batch.bands("default"), batch.tokens, batch.tokens))
    np.testing.assert_allclose(found.o, expected.o, atol=1e-10)
    np.testing.assert_allclose(found.dk, expected.dk, atol=1e-10)


@pytest.mark.slow
def test_the_commands_of_the_documents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = [command for command in COMMANDS if not SERVED.match(command)]
    codes = {command: cli.main(shlex.split(command)[1:]) for command in dict.fromkeys(commands)}
    assert len(codes) >= 15
    assert codes == {command: int(command.startswith("apportion diff")) for command in commands}


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/performance.md",
        "docs/comparison.md",
        "docs/features.md",
        "docs/forecast.md",
        "docs/gains.md",
        "docs/index.md",
        "docs/release.md",
        "docs/shell.md",
        "benchmarks/README.md",
    ],
)
def test_files_that_the_documents_name_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:apportion|examples|docs|tests|benchmarks)/[\w./]+|[A-Z]+\.md)`", text)
    places = (ROOT, ROOT / "apportion/schemas")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing


def test_the_python_of_the_design_runs() -> None:
    code = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(code) == 1
    subprocess.run([sys.executable, "-W", "error", "-c", code[0]], check=True)


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of the site are checked by `make docs`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/performance.md", "docs/release.md"]
)
def test_make_has_the_targets_that_the_documents_name(document: str) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(
        r"(?:^ {4}|`)make ([a-z]+)", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(named) <= set(targets)


def test_the_examples_are_valid() -> None:
    assert Batch.load(ROOT / "examples/batch.json").tokens > 0
    assert Batch.load(ROOT / "examples/two_kinds.yaml").kinds == ("global", "local")
    assert Cluster.load(ROOT / "examples/cluster.yaml").ranks == 16
    assert Model.load(ROOT / "examples/model.yaml").layers_of("local") == 40


def _documents() -> list[Path]:
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def _commands(text: str) -> list[list[str]]:
    """The words behind `apportion` of each command line, options without their values' brackets."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^    (?:torchrun .* -m )?apportion ([^#\n]*)", joined, re.MULTILINE)
    return [
        line.split("#")[0].split(">")[0].split("|")[0].replace("[", " ").replace("]", " ").split()
        for line in lines
    ]


@pytest.mark.parametrize("document", _documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_every_document_have_the_options_that_they_use(document: Path) -> None:
    """Those of `RUN` are run; of the others, which need clusters or hours, the words are held to the command line."""
    import typer

    for words in _commands(document.read_text(encoding="utf-8")):
        found = typer.main.get_command(cli.app)
        for word in words:
            known = {name for option in found.params for name in (*option.opts, *option.secondary_opts)}
            if word.startswith("-") and not re.fullmatch(r"-[0-9.]+", word):
                assert word.split("=")[0] in {*known, "--help"}, (words, word)
            elif word in getattr(found, "commands", ()):
                found = found.commands[word]  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", _documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_of_every_document_compiles_and_names_what_there_is(document: Path) -> None:
    import apportion as ap

    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, str(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for name in re.findall(r"\bap\.([A-Za-z_]+)", block):
            assert name in ap.__all__, (name, block)
