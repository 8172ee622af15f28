"""compare, simulate, recipes, solvers and profile as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

import apportion as ap
from apportion import Hardware, Recipe
from apportion.cli.commands import profile as profiling
from apportion.planner.recipe.recipes import entries, find_recipe
from tests.support.commands import Command
from tests.support.sparse import sparse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--ranks", 4, "--tokens-per-rank", 1024, "--batches", 2)
MINE = (EXAMPLES / "recipe.yaml").read_text(encoding="utf-8")


@pytest.fixture
def plan_file(run: Command, tmp_path: Path) -> Path:
    path, batch = tmp_path / "ring.plan", EXAMPLES / "batch.json"
    assert run("plan", "--batch", batch, "--recipe", "ring", "--ranks", 4, "-o", path).code == 0
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("2048", "256"))
    return path


# --- compare


def test_compare_has_one_row_per_recipe(run: Command, mine: Path) -> None:
    assert len(MINE.splitlines()) <= 10
    args = ("compare", "--workload", EXAMPLES / "doc_lengths.json", "--recipes", f"ring,fcp,{mine}", *SMALL)
    result = run(*args, "--json")
    record = result.json
    assert result.code == 0
    assert re.fullmatch("(warning: skipped .*\n)?", result.err)
    assert [row["recipe"] for row in record["rows"]] == ["ring", "fcp", "fcp_ring"]
    assert (record["baseline"], record["batches"]) == ("ring", 2)
    for row in record["rows"]:
        assert (row["status"], row["reason"], row["verified"]) == ("ok", None, True)
        assert set(row["speedup"]) == {"min", "median", "max"}
        assert set(row["imbalance"]) == {"compute", "tokens"}
        assert {"total", "max_rank", "inter_node"} <= set(row["bytes"])
        assert {"makespan", "kv_bytes", "slots"} <= set(row["bounds"])
        assert {"forward_ms", "backward_ms", "efficiency", "exposed_ms", "peak_rows", "rounds"} <= set(row)


def test_compare_rows_have_the_fields_and_values_of_plan(run: Command) -> None:
    batch = ("--batch", EXAMPLES / "batch.json", "--ranks", 4)
    row = run("compare", *batch, "--recipes", "ring", "--json").json["rows"][0]
    planned = run("plan", *batch, "--recipe", "ring", "--json").json
    assert set(planned) - set(row) == {"id", "file", "seed", "skipped_samples", "faster"}
    timed = {"planning_ms", "verify_ms", "bounds"}
    assert all(row[name] == planned[name] for name in set(planned) & set(row) - timed)


def test_compare_prints_a_table(run: Command, mine: Path) -> None:
    result = run("compare", "--recipes", f"ring,{mine}", *SMALL)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 110
    assert all(word in result.out for word in ("4 ranks, 2 batches of 4,096 tokens", "speed-up", "fcp_ring"))
    assert "slots" in run("compare", "--recipes", "ring", *SMALL, "--wide").out


def test_compare_fails_if_every_recipe_is_refused(run: Command, tmp_path: Path) -> None:
    batch = tmp_path / "homes.json"
    batch.write_text(json.dumps({"lengths": [100, 50], "home_ranks": [[0], None]}))
    args = ("compare", "--batch", batch, "--ranks", 2, "--recipes", "blend", "--baseline", "blend", "--json")
    result = run(*args)
    assert (result.code, result.json["rows"][0]["status"]) == (1, "refused")


def test_compare_gives_the_reason_why_a_recipe_is_refused(run: Command, tmp_path: Path) -> None:
    batch = tmp_path / "homes.json"
    homes = [{"length": 1000, "mask": {"causal": {}}} for _ in range(4)]
    batch.write_text(json.dumps({"sequences": [{**homes[0], "home_ranks": [1]}, *homes[1:]]}))
    args = ("compare", "--batch", batch, "--ranks", 4, "--recipes", "fcp,ring", "--baseline", "fcp")
    rows = {row["recipe"]: row for row in run(*args, "--json").json["rows"]}
    assert (rows["fcp"]["status"], rows["ring"]["status"]) == ("ok", "refused")
    assert "home_ranks" in rows["ring"]["reason"]
    printed = run(*args)
    assert printed.code == 0
    assert "ring: batch.home_ranks" in printed.out


def test_compare_all_has_every_recipe(run: Command) -> None:
    rows = run("compare", *SMALL[:-1], 1, "--json").json["rows"]
    assert [row["recipe"] for row in rows] == list(entries())


def test_compare_accepts_a_window_and_other_hardware(run: Command) -> None:
    args = ("compare", "--recipes", "ring", *SMALL, "--json")
    plain = run(*args).json["rows"][0]
    windowed = run(*args, "--mask", "{sliding_window: {window: 64}}").json["rows"][0]
    other = run(*args, "--hardware", "a100").json
    assert windowed["forward_ms"] < plain["forward_ms"] < other["rows"][0]["forward_ms"]
    assert other["hardware"]["name"] == "a100"
    assert other["cluster"]["intra_gbs"] == Hardware.load("a100").intra_gbs.value


def test_a_cluster_that_does_not_match_the_hardware_is_a_warning(run: Command) -> None:
    args = ("--batch", EXAMPLES / "batch.json", "--cluster", EXAMPLES / "cluster.yaml", "--hardware", "a800")
    for command in (("compare", "--recipes", "ring"), ("plan", "--recipe", "ring")):
        result = run(*command, *args, "--json")
        assert result.code == 0
        assert "warning: cluster.intra_gbs" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipes", "ring,nonesuch"], "nonesuch"),
        (["--recipes", "nowhere.yaml"], "nowhere.yaml"),
        (["--baseline", "nonesuch"], "nonesuch"),
        (["--recipes", "MINE,OTHER"], "two of the recipes have this name"),
        (["--workload", "W", "--lengths", "W"], "at most one of"),
        (["--batch", "BATCH", "--batches", "3"], "--batches"),
        (["--batch", "BATCH", "--workload", "BATCH"], "--workload"),
        (["--mask", "nonesuch"], "nonesuch"),
        (["--mask", "{"], "is not YAML"),
        (["--hardware", "nonesuch"], "nonesuch"),
        (["--batches", "0"], "--batches"),
    ],
)
def test_bad_input_is_refused_in_one_paragraph(
    run: Command, mine: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MINE.replace("2048", "512"))
    batch, workload = EXAMPLES / "batch.json", EXAMPLES / "doc_lengths.json"
    files = {"MINE": mine, "OTHER": other, "BATCH": batch, "W": workload}
    args = [",".join(str(files.get(part, part)) for part in arg.split(",")) for arg in args]
    result = run("compare", *args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("apportion: ")
    assert message in result.err
    assert run("compare", *args, "--json").json["error"]["message"]


# --- simulate


def test_simulate_prints_ranks_and_the_critical_path(run: Command, plan_file: Path) -> None:
    result = run("simulate", plan_file)
    assert result.code == 0
    assert all(f"default {phase}:" in result.out for phase in ("forward", "backward"))
    assert result.out.count("critical path: ") == 2
    assert re.search(r"the busiest rank, \d, starts \d+ kernels for \d+ instructions and posts", result.out)
    assert result.out.count("█") > 50
    one = run("simulate", plan_file, "--timelines", 1, "--path", 2).out
    assert "and 3 ranks that wait less" in one
    assert "the longest 2" in one


def test_simulate_json_has_every_run(run: Command, plan_file: Path) -> None:
    record = run("simulate", plan_file, "--json").json
    assert [item["kind"] for item in record["runs"]] == ["default", "default"]
    assert [item["phase"] for item in record["runs"]] == ["forward", "backward"]
    assert record["forward_ms"] > 0
    assert record["hardware"] == "h100"
    assert set(record["busiest"]) == {"rank", "instructions", "launches", "messages", "rounds"}
    assert all("spans" in item for item in record["runs"])
    lean = run("simulate", plan_file, "--json", "--no-spans").json
    assert not any("spans" in item for item in lean["runs"])


def test_simulate_writes_a_trace(run: Command, plan_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run("simulate", plan_file, "--trace", path, "--json").json["trace"] == str(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_simulate_refuses_a_trace_that_cannot_be_written(run: Command, plan_file: Path) -> None:
    result = run("simulate", plan_file, "--trace", "nowhere/t.json")
    assert (result.code, "there is no folder" in result.err) == (2, True)


# --- recipes, solvers, profile


def test_recipes_lists_all_recipes(run: Command) -> None:
    record = run("recipes", "--json").json
    assert [row["name"] for row in record["recipes"]] == list(entries())
    assert all(row["summary"] for row in record["recipes"])
    printed = run("recipes").out
    assert all(name in printed for name in entries())


@pytest.mark.parametrize("name", sparse(list(entries()), 4))
def test_a_printed_recipe_is_a_valid_recipe_file(run: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / "copy.yaml"
    path.write_text(run("recipes", name).out)
    assert Recipe.load(path) == find_recipe(name)
    record = run("recipes", name, "--json").json
    assert yaml.safe_load(path.read_text()) == {key: record[key] for key in ("name", "steps")}


@pytest.mark.parametrize(
    "command", [["recipes", "rign"], ["plan", "--recipe", "rign"], ["compare", "--recipes", "rign"]]
)
def test_an_unknown_recipe_is_refused_with_the_known_names(run: Command, command: list[str]) -> None:
    batch = [] if command[0] == "recipes" else ["--batch", str(EXAMPLES / "batch.json")]
    result = run(*command, *batch)
    assert result.code == 2
    assert "did you mean ring? Known: " in result.err
    listed = result.err.partition("Known: ")[2]
    assert all(len(re.findall(rf"\b{name}\b", listed)) == 1 for name in entries())


def test_recipes_prints_parameters_and_their_defaults(run: Command) -> None:
    out = run("recipes", "zeppelin").out
    assert "# schedule queues has these parameters:\n#   proxies: auto  # " in out
    record = run("recipes", "zeppelin", "--json").json
    assert record["section"] == "3"
    remap = record["parameters"]["remap"]
    assert remap["objective"] == {"default": "two_sided", "takes": "paper, sum or two_sided"}
    assert remap["solver"]["default"] == "flow"


def test_the_recipe_schema_accepts_what_the_planner_accepts(run: Command) -> None:
    schema = json.loads(run("recipes", "--schema").out)
    check = jsonschema.Draft202012Validator(schema)
    for entry in entries().values():
        check.validate(entry.recipe.to_data())
    steps = find_recipe("fcp").to_data()["steps"]
    for place in ({"lpt": {"solver": "ilp"}}, {"lpt": {"solver": {"ilp": {"steps": 9}}}}, {"lpt": None}):
        recipe = {"name": "mine", "steps": {**steps, "place": place}}
        check.validate(recipe)
        find_recipe(recipe)
    for wrong in (
        {"place": {"lpt": {"solver": "nope"}}},
        {"place": {"lpt": {"solver": {"ilp": {"nodes": 9}}}}},
        {"place": {"lpt": {"slover": "lpt"}}},
        {"place": {"lptt": {}}},
        {"plaice": {"lpt": {}}},
        {"schedule": {"matchings": {"buffers": 0}}},
        {"schedule": {"matchings": {"local": "never"}}},
    ):
        recipe = {"name": "mine", "steps": {**steps, **wrong}}
        assert not check.is_valid(recipe)
        with pytest.raises(ap.ConfigError):
            find_recipe(recipe)


@pytest.mark.slow
def test_solvers_are_compared_with_the_optimum(run: Command) -> None:
    rows = run("solvers", "compare", "--count", "8", "--json").json["solvers"]
    by_solver = {(row["kind"], row["solver"]): row for row in rows}
    exact = {"partition": ["ilp"], "colouring": ["flow", "matching"], "transport": ["flow"]}
    for key in ((kind, solver) for kind, solvers in exact.items() for solver in solvers):
        assert by_solver[key]["optimal"] == by_solver[key]["solved"] == by_solver[key]["problems"]
    assert by_solver["partition", "lpt"]["worst"] > 1


def test_solvers_of_one_kind_can_be_compared(run: Command) -> None:
    assert "partition" in run("solvers", "compare", "--count", "2", "--problem", "partition").out
    refused = run("solvers", "compare", "--problem", "nope")
    assert refused.code == 2
    assert "colouring" in refused.err


def test_solvers_lists_extras_sources_and_steps(run: Command) -> None:
    rows = {row["name"]: row for row in run("solvers", "--json").json["solvers"]}
    assert {"lpt", "matching", "flow", "ilp"} <= set(rows)
    assert rows["ilp"]["extra"] == "solvers"
    assert all(row["source"] for row in rows.values())
    assert "place lpt" in rows["lpt"]["steps"]
    assert "lpt" in run("solvers").out


def test_profile_needs_torch_and_an_output_file(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--output" in run("profile").err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("profile", "-o", "x.json")
    assert (result.code, "'.[torch]'" in result.err) == (2, True)


def test_profile_shows_the_source_of_each_figure(tmp_path: Path) -> None:
    record = profiling._record(Hardware.load("h100"), tmp_path / "mine.json")
    text = profiling._text(record)
    assert "engine flash" in text
    assert "linear_tflops" in text
    assert "(assumed)" in text
