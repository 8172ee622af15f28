"""README and documents: code prints the output shown, commands run, and files, links and generated pages are
current."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

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
from tests.support.programs import run, run_python

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if not path.is_symlink()
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
#: documents whose commands are run, one document after another, in a folder with the examples
RUN = (
    "README.md",
    "docs/start.md",
    "docs/how-to/own-mask.md",
    "docs/how-to/own-recipe.md",
    "docs/how-to/precompute.md",
    "docs/reference/recipes.md",
)
#: documents whose Python runs unchanged
WHOLE = (
    "docs/design.md",
    "docs/papers.md",
    "docs/how-to/forecast.md",
    "docs/how-to/hybrid-models.md",
    "docs/how-to/overlap.md",
    "docs/how-to/own-mask.md",
    "docs/how-to/own-recipe.md",
    "docs/start.md",
)


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[document], re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme_prints_its_output() -> None:
    script = ROOT / "examples/quickstart.py"
    assert script.read_text(encoding="utf-8").endswith(blocks("README.md", "python")[0])
    assert run_python(script) == TEXTS["README.md"].split("prints\n\n```\n")[1].split("```")[0]


@pytest.mark.slow
def test_the_programs_of_the_start_page_print_their_output() -> None:
    first, second = re.findall(r"<!-- output -->\n```\n(.*?)```", TEXTS["docs/start.md"], re.DOTALL)
    code, loop = blocks("docs/start.md", "python")
    assert run_python("-c", code) == first
    assert loop in (ROOT / "examples/first_step.py").read_text(encoding="utf-8")
    assert run_python("examples/first_step.py") == second


@pytest.mark.slow
def test_the_first_step_is_the_same_on_four_processes() -> None:
    expected = TEXTS["docs/start.md"].split("<!-- output -->\n```\n")[2].split("```")[0]
    assert (
        run_python("-m", "torch.distributed.run", "--nproc-per-node", 4, "examples/first_step.py") == expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("document", [name for name in WHOLE if name != "docs/start.md"])
def test_python_of_a_document_runs(document: str) -> None:
    """Skips code that follows a diff, which `test_newcomers.py` runs."""
    text = re.sub(r"```diff\n.*?```\n\n```python\n.*?```", "", TEXTS[document], flags=re.DOTALL)
    run_python("-c", "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)))


def test_the_batch_in_the_documents_is_valid() -> None:
    (batch,) = blocks("docs/how-to/own-mask.md", "json")
    assert Batch.from_data(json.loads(batch)).tokens == 24576 + 9000 + 2700


@pytest.mark.slow
def test_the_recipe_in_the_documents_plans_and_runs() -> None:
    (text,) = blocks("docs/how-to/own-recipe.md", "yaml")
    recipe = Recipe.from_data(yaml.safe_load(text))
    assert recipe == Recipe.load(ROOT / "examples/recipe.yaml")
    batch = Batch.from_lengths([3000, 1100, 50])
    plan = make_plan(batch, Cluster(1, 4), Model(2, 1, 4, dtype="fp64", layers=1), recipe)
    problem = oracle.Problem.random(0, batch.tokens, 2, 1, 4, 4, False, None)
    result = executor.run(plan, "default", problem.q, problem.k, problem.v, problem.do)
    expected = oracle.dense(problem, bands.dense(batch.bands("default"), batch.tokens, batch.tokens))
    np.testing.assert_allclose(result.o, expected.o, atol=1e-10)
    np.testing.assert_allclose(result.dk, expected.dk, atol=1e-10)


def commands(document: str) -> list[str]:
    text = re.sub(r"\\\n\s*", " ", TEXTS[document])
    lines = re.findall(r"^ {4}(?:\S* ?torchrun .* -m )?(apportion [^#\n]*)", text, re.MULTILINE)
    return [re.split(r"[|>;] | {3,}", line)[0].strip() for line in lines]


@pytest.mark.slow
def test_commands_of_the_documents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    codes = {line: cli.main(shlex.split(line)[1:]) for name in RUN for line in commands(name)}
    assert len(codes) >= 12
    assert codes == dict.fromkeys(codes, 0)


@cache
def command_line() -> Any:
    import typer

    return typer.main.get_command(cli.app)


@pytest.mark.parametrize("document", TEXTS)
def test_commands_of_every_document_use_existing_options(document: str) -> None:
    """Commands of documents outside `RUN` are not run, since some need clusters or hours."""
    for line in commands(document):
        command = command_line()
        for word in line.replace("[", " ").replace("]", " ").split()[1:]:
            option_names = {
                name for option in command.params for name in (*option.opts, *option.secondary_opts)
            }
            if word == "--":
                break
            if word.startswith("-") and not re.fullmatch(r"-[0-9.]+", word):
                assert word.split("=")[0] in {*option_names, "--help"}, (line, word)
            elif word in getattr(command, "commands", ()):
                command = command.commands[word]


@pytest.mark.parametrize("document", TEXTS)
def test_python_of_every_document_compiles_and_uses_existing_members(document: str) -> None:
    import apportion as ap

    for block in blocks(document, "python"):
        compile(block, document, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for name in re.findall(r"\bap\.([A-Za-z_]+)", block):
            assert name in ap.__all__, (name, block)


@pytest.mark.parametrize("document", [*TEXTS, "benchmarks/README.md"])
def test_files_that_the_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:apportion|core|deploy|examples|docs|tests|benchmarks)/[\w./-]+\w)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", TEXTS)
def test_the_tests_that_a_document_names_exist(document: str) -> None:
    for line in re.findall(r"`pytest ([^`]+)`", TEXTS[document]):
        paths, _, selected = line.partition(" -k ")
        texts = "".join(
            (ROOT / path).read_text(encoding="utf-8") for path in paths.split() if path.endswith(".py")
        )
        assert [
            word for word in re.findall(r"\w+", selected) if word not in {"and", "or"} and word not in texts
        ] == []


def test_links_of_the_readme_and_of_contributing_lead_to_files() -> None:
    """`make docs` checks the other links."""
    links = re.findall(r"\]\(([^)#:]+)", TEXTS["README.md"] + TEXTS["CONTRIBUTING.md"])
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_site_has_every_page_once() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]

    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(nav)) == sorted(page for page in documents if not page.startswith("decisions/0"))


def test_make_has_the_targets_that_the_documents_name() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for text in TEXTS.values() for name in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.M)}
    assert named <= targets


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for name, page in reference.PAGES.items():
        assert page() == TEXTS[f"docs/reference/{name}.md"], "run `make reference`"
    named = {name for names in reference.VARIABLES for name in names.split(", ")}
    for path in (ROOT / "apportion").rglob("*.py"):
        read = re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", path.read_text(encoding="utf-8"))
        assert set(read) - {"APPORTION_DEMO"} <= named, path


def test_the_python_reference_has_every_public_name() -> None:
    import apportion as ap

    page = TEXTS["docs/reference/python.md"]
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    listed |= {name for names in re.findall(r"members: \[(.*?)\]", page) for name in names.split(", ")}
    listed |= set(re.findall(r"`ap\.(\w+)`", page)) | {"__version__", "memory"}
    assert set(ap.__all__) | set(ap.masks.__all__) - {"Mask"} <= listed
    plugin = (ROOT / "tests/plugin/apportion_plugin_example.py").read_text(encoding="utf-8")
    imported = re.findall(r"^from apportion\S* import (.*)$", plugin, re.MULTILINE)
    assert set(", ".join(imported).split(", ")) <= listed | set(re.findall(r"`(\w+)`", page))
    adapters = {
        path.stem
        for path in (ROOT / "apportion/trainer").glob("*.py")
        if "apportion.trainer." + path.stem in page
    }
    assert {"hf", "hf_trainer", "hf_sparse", "lightning", "torchtitan", "megatron", "automodel"} <= adapters


def test_error_texts_of_the_troubleshooting_page_are_in_the_code() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "apportion").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    quoted = re.findall(
        r"`([^`]+)`", "\n".join(re.findall(r"^### (.*)$", TEXTS["docs/troubleshooting.md"], re.M))
    )
    parts = [part.strip(" :,") for text in quoted for part in text.split("…")]
    assert len(parts) > 20
    assert [part for part in parts if part not in sources] == []


def test_the_table_of_the_cluster_file_has_every_field_and_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", TEXTS["docs/how-to/profile.md"], re.MULTILINE)
    assert dict(rows) == {field.name: str(field.default) for field in fields(Cluster)}


def test_every_alert_has_a_section() -> None:
    rules = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert alerts == set(re.findall(r"^### (Apportion\w+)$", TEXTS["docs/how-to/service.md"], re.MULTILINE))


def test_nothing_installs_the_package_from_an_index() -> None:
    for name in filter(None, run("git", "ls-files", "-z").split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in {
            ".md",
            ".py",
            ".service",
            ".yaml",
            ".yml",
            ".ipynb",
            ".toml",
            "",
        }:
            text = path.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"pip install [^\n`]*['\" ]apportion\b(?!/)", text)
            assert found is None, (name, found)


def test_the_examples_are_valid() -> None:
    assert Batch.load(ROOT / "examples/batch.json").tokens > 0
    assert Batch.load(ROOT / "examples/two_kinds.yaml").kinds == ("global", "local")
    assert Cluster.load(ROOT / "examples/cluster.yaml").ranks == 16
    assert Model.load(ROOT / "examples/model.yaml").layers_of("local") == 40
