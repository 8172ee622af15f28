"""Git hooks, hosted CI, containers and releases refer to existing files and commands of the repository."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from apportion.cli import app
from apportion.ir.version import __version__

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def commands_of(target: str) -> list[str]:
    """The lines of a Makefile target."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, target
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_the_pre_commit_hooks_run_the_checks_of_make_lint() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == commands_of("lint")
    assert not any(hook["pass_filenames"] for hook in local["hooks"])  # the tools select their own files


def test_hosted_ci_runs_the_local_ci_and_every_python_version() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert "bash .ci/run" in lines
    assert "make --no-print-directory ci " in (ROOT / ".ci/run").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = {name for line in lines for name in re.findall(r"\bmake ([a-z-]+)", line)}
    assert named == {"nightly", "test-plain"}
    assert named <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = jobs["plain"]["strategy"]["matrix"]
    assert matrix == {"python": versions}
    first, beyond = re.findall(r"3\.(\d+)", project["requires-python"])
    assert versions == [f"3.{minor}" for minor in range(int(first), int(beyond))]


def test_actions_are_pinned_by_version() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    pinned = r"actions/[a-z-]+@v\d+|pypa/cibuildwheel@v\d+\.\d+\.\d+"
    assert all(re.fullmatch(pinned, name) for name in used), used


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile in order, (name, arguments), with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, arguments) for name, arguments in lines]


def options_of(*command: str) -> set[str]:
    """The options of `apportion COMMAND`."""
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    return {option for parameter in found.params for option in parameter.opts if option.startswith("--")}


def test_the_image_installs_existing_files_and_serves_unprivileged() -> None:
    steps = instructions()
    last = dict(steps)
    for name, arguments in steps:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in arguments.split()[:-1])
    extras = re.findall(r"pip install \"\.\[([a-z,]+)\]\"", " ".join(arguments for _, arguments in steps))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras[0].split(",")) <= set(project["optional-dependencies"])
    assert last["USER"] == "apportion"
    program, serve, *arguments = json.loads(last["ENTRYPOINT"])
    assert (program, serve) == ("apportion", "serve")
    flags = [flag for flag in [*arguments, *json.loads(last["CMD"])] if flag.startswith("--")]
    assert set(flags) <= options_of("serve")
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    environment = " ".join(arguments for name, arguments in steps if name == "ENV")
    assert f"APPORTION_SERVE_STORE={last['VOLUME']}/" in environment
    port = arguments[arguments.index("--port") + 1]
    assert last["EXPOSE"] == port
    assert f"http://127.0.0.1:{port}/healthz" in last["HEALTHCHECK"]


def test_compose_runs_the_service_with_a_token_and_redis_as_its_cache() -> None:
    composed = read("compose.yaml")
    service, redis = composed["services"]["apportion"], composed["services"]["redis"]
    environment = service["environment"]
    options = {name.removeprefix("APPORTION_SERVE_") for name in environment if "_SERVE_" in name}
    assert {f"--{name.lower().replace('_', '-')}" for name in options} <= options_of("serve")
    assert environment["APPORTION_SERVE_STORE"] == "redis://redis:6379/0"
    assert "APPORTION_TOKEN" in environment
    assert "--maxmemory-policy allkeys-lru" in redis["command"]
    assert service["restart"] == redis["restart"] == "unless-stopped"
    assert redis["healthcheck"]["test"]
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"


def test_all_files_state_the_same_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__


def test_every_benchmark_result_is_in_its_table_with_an_existing_command() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.json)` \| `(.+?)` \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == sorted(
        path.name for path in (ROOT / "benchmarks/results").glob("*.json")
    )
    for _, command in rows:
        module = re.fullmatch(r"python (?:-m )?benchmarks[./](\w+?)(?:\.py)?(?: .*)?", command)
        if module:
            assert (ROOT / f"benchmarks/{module[1]}.py").exists(), command
        else:
            assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE), command
