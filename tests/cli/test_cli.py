"""The command line as a user meets it: exit codes, one JSON object on stdout, errors with a remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apportion import Plan, bench, cli
from apportion.cli import files
from apportion.ir.plan import summary
from apportion.ir.plan.tables import ProgramSet, Table
from tests.support.commands import Command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROW = {
    *("recipe", "ranks", "tokens", "block_tokens", "heaviest_piece_over_mean", "imbalance_bound", "rounds"),
    *("planning_ms", "verify_ms", "imbalance", "bytes", "bounds", "slots", "max_degree", "plan_bytes"),
}
SMALL = ("--recipe", "fcp", "--ranks", "4", "--block", "256")


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"lengths": [3000, 700, 300, 1], "mask": {"causal": {}}}))
    return path


@pytest.fixture
def plan_file(run: Command, batch_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "good.plan"
    assert run("plan", "--batch", batch_file, *SMALL, "-o", path).code == 0
    return path


def broken(plan: Plan) -> Plan:
    """The plan with the band of one task cut shorter, and a fresh id."""
    (kind, phase), programs = next(item for item in plan.programs.items() if len(item[1]["tasks"]))
    tasks = programs["tasks"]
    dmin = tasks["dmin"].astype(np.int64)
    dmin[0] += 1
    cut = ProgramSet({**programs.tables, "tasks": Table.of(tasks.ptr, {**tasks.columns, "dmin": dmin})})
    return replace(plan, programs={**plan.programs, (kind, phase): cut}, sections=None)


# --- every command


@pytest.mark.parametrize(
    "command",
    [
        *((name,) for name in ("plan", "verify", "show", "diff", "demo", "selftest")),
        *((name,) for name in ("compare", "simulate", "profile", "recipes", "solvers")),
        *(("bench", name) for name in ("plan", "attention")),
    ],
    ids=" ".join,
)
def test_help_explains_and_shows_an_example(run: Command, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert f"apportion {' '.join(command)}" in result.out.split("Options")[0].split("Example")[1]


def test_help_is_printed_if_there_is_no_command(run: Command) -> None:
    groups = ["Plan", "Look at plans", "Measure", "Serve", "Extend"]
    assert re.findall("─ ([A-Z][a-z ]+) ─", run().out)[1:] == groups
    assert run("-h").out == run("--help").out


# --- plan


def test_plan_json_has_the_fields_of_a_benchmark_row(run: Command, batch_file: Path) -> None:
    assert "imbalance" in run("plan", "--batch", batch_file, *SMALL).out
    result = run("plan", "--batch", batch_file, *SMALL, "--json")
    record = result.json
    assert set(record) == ROW | {"seed", "id", "skipped_samples", "file", "faster"}
    assert (record["ranks"], record["tokens"], record["block_tokens"]) == (4, 4001, 256)
    assert record["slots"] == record["max_degree"]
    assert set(record["planning_ms"]) == {"p50", "p95", "steps"}
    assert result.err == ""


def test_two_attention_kinds_with_cluster_and_model_files(run: Command) -> None:
    files = [f"--{name}={EXAMPLES / name}.yaml" for name in ("cluster", "model")]
    record = run("plan", f"--batch={EXAMPLES / 'two_kinds.yaml'}", *files, "--json").json
    assert (record["ranks"], record["tokens"]) == (16, 26221)


def test_lengths_are_drawn_until_the_ranks_are_full(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("900\n50\n120\n100000\n")
    result = run("plan", "--lengths", path, "--tokens-per-rank", 1024, *SMALL, "--json")
    assert result.json["tokens"] == 4 * 1024
    assert result.json["skipped_samples"] > 0
    assert "warning: skipped" in result.err


@pytest.mark.parametrize(("rule", "longest"), [("drop", 900), ("cut", 4 * 1024), ("refuse", None)])
def test_overlong_documents_are_dropped_or_refused(
    run: Command, tmp_path: Path, rule: str, longest: int
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("name,tokens\na,900\nb,100000\n")
    options = ("--column", "tokens", "--tokens-per-rank", 1024, "--overlong", rule)
    result = run("plan", "--lengths", path, *options, "-o", tmp_path / "p.plan", *SMALL)
    assert result.code == (2 if longest is None else 0)
    if longest is None:
        assert "sample 1 has 100000 tokens" in result.err
    else:
        lengths = Plan.decode((tmp_path / "p.plan").read_bytes()).request.batch.lengths
        assert int(lengths.max()) == longest


def test_plan_output_names_the_model_and_a_faster_recipe(run: Command, batch_file: Path) -> None:
    batch = ("--batch", batch_file, "--ranks", 4)
    record = run("plan", *batch, "--recipe", "contiguous", "--json").json
    assert record["faster"]["ms"] < 0.98 * record["faster"]["own_ms"]
    out = run("plan", *batch, "--recipe", "contiguous").out
    assert re.search(r"the default: heads 32 query, 8 KV, of 128; layers 32", " ".join(out.split()))
    assert "times as fast by forecast" in " ".join(out.split())
    assert "by forecast" not in run("plan", *batch).out


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (6, 6), (8, 8), (9, 3), (12, 6), (64, 8), (13, 1)])
def test_ranks_per_node_is_8_or_the_largest_divisor_below(ranks: int, per_node: int) -> None:
    assert bench.cluster_of(ranks).ranks_per_node == per_node
    assert bench.cluster_of(ranks).ranks == ranks


# --- errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan"], "documents = 'none': must come from exactly one of --batch, --lengths, --workload"),
        (["plan", "--batch", "BATCH", "--workload", "BATCH"], "exactly one of"),
        (["plan", "--batch", "nowhere.json"], "nowhere.json"),
        (["plan", "--batch", "BATCH", "--ranks", "0"], "--ranks"),
        (["plan", "--batch", "BATCH", "--ranks", "70000"], "65535"),
        (["plan", "--batch", "BATCH", "--ranks", "4", "--ranks-per-node", "3"], "--ranks-per-node"),
        (["plan", "--batch", "BATCH", "--cluster", "CLUSTER", "--ranks", "4"], "--ranks"),
        (["plan", "--batch", "BATCH", "--recipe", "nonesuch"], "--recipe = 'nonesuch'"),
        (["plan", "--batch", "BATCH", "--ranks", "4", "--hardware", "h1000"], "--hardware = 'h1000'"),
        (["plan", "--batch", "BATCH", "--column", "n"], "--column"),
        (["plan", "--workload", "BATCH", "--column", "n"], "add --lengths"),
        (["plan", "--lengths", "BATCH", "--column", "n"], "must be a list"),
        (["plan", "--batch", "BATCH", "--block", "big"], "--block"),
        (["plan", "--batch", "BATCH", "--block", "8,64"], "or auto"),
        (["plan", "--batch", "BATCH", "--block", "0"], "or auto"),
        (["plan", "--batch", "BATCH", "--tokens-per-rank", "32768"], "--tokens-per-rank"),
        (["plan", "--batch", "BATCH", "-o", "nowhere/x.plan"], "there is no folder"),
        (["plan", "--batch", "BATCH", "-o", "BATCH/x.plan"], "there is no folder"),
        (["plan", "--batch", "BATCH", "-o", "."], "it is a folder"),
        (["plan", "--batch", "CLUSTER"], "nodes"),
        (["plan", "--workload", "BATCH", "--batch"], "--batch"),
        (["plan", "--frobnicate"], "--frobnicate"),
        (["verify", "BATCH"], "is not a plan"),
        (["verify", "nowhere.plan"], "nowhere.plan"),
        (["verify", "/proc/self/mem"], "Input/output error"),
        (["report", ".", "-o", "r.html"], "Is a directory"),
        (["show", "nowhere.plan"], "nowhere.plan"),
        (["plan", "--batch", "BINARY"], "binary.json"),
        (["forecast", "--ranks", "8", "--recipes", "fcp", "--batches", "0"], "--batches"),
        (["show", "PLAN", "--rank", "4"], "ranks 0 to 3"),
        (["bench", "plan", "--ranks", "8,x"], "--ranks"),
        (["bench", "plan", "--ranks", "8,0"], "--ranks = 0"),
        (["bench", "plan", "--seeds", "-1"], "--seeds = -1"),
        (["bench", "plan", "--repeats", "2"], "--repeats"),
        (["frobnicate"], "frobnicate"),
        (["plam"], "Did you mean 'plan'"),
        (["plan", "--batch", "BATCH", "--recipe", "zepelin"], "did you mean zeppelin?"),
    ],
)
def test_bad_input_is_refused_in_one_paragraph(
    run: Command, batch_file: Path, plan_file: Path, args: list[str], message: str
) -> None:
    binary = batch_file.with_name("binary.json")
    binary.write_bytes(bytes(range(256)))
    cluster = EXAMPLES / "cluster.yaml"
    files = {"BATCH": batch_file, "PLAN": plan_file, "CLUSTER": cluster, "BINARY": binary}
    args = [re.sub("^[A-Z]+", lambda name: str(files[name[0]]), arg) for arg in args]
    result = run(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("apportion: ")
    assert message in result.err
    assert "Traceback" not in result.err
    as_json = run(*args[:1], "--json", *args[1:]) if args[0] != "bench" else run(*args, "--json")
    assert as_json.code == 2
    assert message in as_json.json["error"]["message"]


def test_json_of_a_config_error_has_its_parts(run: Command, batch_file: Path) -> None:
    error = run("plan", "--batch", batch_file, "--recipe", "nonesuch", "--json").json["error"]
    assert error["type"] == "UnknownNameError"
    assert {"field", "value", "rule", "remedy"} <= set(error)


def test_a_parse_error_names_the_file_and_the_line(run: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{\n"lengths": [1,,2]}')
    (tmp_path / "bad.yaml").write_text("lengths: [1, 2\nmask: x")
    err = run("plan", "--batch", tmp_path / "bad.json").err
    assert f"{tmp_path / 'bad.json'} = '\"lengths\": [1,,2]}}'" in err
    assert "at line 2, column 15 (Expecting value)" in err
    err = run("plan", "--batch", tmp_path / "bad.yaml").err
    assert f"{tmp_path / 'bad.yaml'} = 'mask: x': does not parse at line 2, column" in err


def test_a_folder_that_cannot_be_written_is_refused_before_planning(
    run: Command, batch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    monkeypatch.setattr(bench, "measure", lambda job: pytest.fail("planned"))
    result = run("plan", "--batch", batch_file, "-o", batch_file.with_name("x.plan"))
    assert (result.code, "cannot be written" in result.err) == (2, True)


def test_a_failed_write_leaves_no_partial_plan(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_partially(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device", str(path))

    before = plan_file.read_bytes()
    files_before = set(plan_file.parent.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_partially)
        with pytest.raises(OSError, match="No space"):
            files.write(plan_file, b"other bytes")
    assert plan_file.read_bytes() == before
    link = plan_file.with_name("link.plan")
    link.symlink_to(plan_file)
    files.write(link, b"other bytes")
    assert (link.is_symlink(), plan_file.read_bytes()) == (True, b"other bytes")
    assert set(plan_file.parent.iterdir()) == {*files_before, link}
    files.write(Path(os.devnull), b"gone")
    assert not Path(os.devnull).is_file()


def test_an_os_error_without_a_file_is_printed(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(cli, "app", fail)
    result = run("--version")
    assert (result.code, result.err) == (2, "apportion: the disk is gone\n")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(("args", "code"), [(["verify", "nowhere.plan"], 2), (["recipes"], 0)])
def test_a_closed_stdout_does_not_change_the_status(args: list[str], code: int, as_json: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "apportion", *args, *as_json]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert code or not done.stderr


@pytest.mark.parametrize("command", ["demo", "selftest", "bench attention"])
def test_a_missing_package_is_reported_with_the_extra_to_install(
    run: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*command.split())
    assert result.code == 2
    assert "pip install '.[torch]'" in result.err


# --- verify, show, diff


def test_a_good_plan_verifies(run: Command, plan_file: Path) -> None:
    assert run("verify", plan_file).code == 0
    assert run("verify", plan_file, "--json").json["violations"] == []


def test_verify_lists_violations_of_a_broken_plan_by_rule(
    run: Command, plan_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.plan"
    path.write_bytes(broken(Plan.decode(plan_file.read_bytes())).encode())
    result = run("verify", path)
    assert result.code == 1
    assert "violation" in result.out
    record = run("verify", path, "--json").json
    assert record["ok"] is False
    assert {"rule", "rank", "message", "excerpt"} <= set(record["violations"][0])


def test_an_id_of_other_bytes_violates_the_digests_rule(
    run: Command, plan_file: Path, tmp_path: Path
) -> None:
    plan = Plan.decode(plan_file.read_bytes())
    path = tmp_path / "flipped.plan"
    path.write_bytes(plan.encode().replace(plan.id, bytes([plan.id[0] ^ 1]) + plan.id[1:]))
    result = run("verify", path, "--json")
    assert (result.code, result.json["violations"][0]["rule"]) == (1, "digests")
    assert run("show", path).code == 2


def test_show_draws_every_rank(run: Command, plan_file: Path) -> None:
    result = run("show", plan_file)
    assert result.code == 0
    assert result.out.count("█ ") >= 4
    record = run("show", plan_file, "--json").json
    assert len(record["load"]) == len(record["tokens"]) == 4
    assert sum(record["tokens"]) == 4001


def test_loads_drawn_by_show_add_up_to_the_area_of_the_mask(plan_file: Path) -> None:
    plan = Plan.decode(plan_file.read_bytes())
    heads = plan.request.model.q_heads * plan.request.model.layers_of("default")
    assert summary.loads(plan).sum() == plan.request.batch.area("default") * heads


def test_large_plans_are_drawn_by_node(run: Command, batch_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "wide.plan"
    run("plan", "--batch", batch_file, "--recipe", "fcp", "--ranks", 128, "--block", 64, "-o", path)
    assert "busiest of its 8 ranks" in run("show", path).out


def test_show_of_a_rank_prints_its_program(run: Command, plan_file: Path) -> None:
    result = run("show", plan_file, "--rank", 1)
    assert "attend" in result.out
    record = run("show", plan_file, "--rank", 1, "--json").json
    assert record["text"] == result.out.rstrip("\n")
    assert {item["phase"] for item in record["programs"]} == {"forward", "backward"}


def test_diff_lists_differing_fields(run: Command, batch_file: Path, plan_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.plan"
    run("plan", "--batch", batch_file, *SMALL[:2], "--ranks", 4, "--block", 512, "-o", other)
    assert run("diff", plan_file, plan_file).code == 0
    assert run("diff", plan_file, other).code == 1
    record = run("diff", plan_file, other, "--json").json
    assert record["equal"] is False
    assert any(change["field"] == "report.block_tokens" for change in record["values"])


# --- bench, version


def test_bench_prints_a_row_for_each_rank_count_and_seed(run: Command) -> None:
    args = ("bench", "plan", "--ranks", "2,4", "--seeds", "0,1", "--tokens-per-rank", 512, "--block", 128)
    record = run(*args, "--json").json
    assert [(row["ranks"], row["seed"]) for row in record["rows"]] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert all(set(row) >= ROW and row["repeats"] >= 5 for row in record["rows"])
    assert all(set(row["calls"]) >= set(row["planning_ms"]["steps"]) for row in record["rows"])
    assert all(row["tokens"] == row["ranks"] * 512 for row in record["rows"])


def test_bench_prints_a_table(run: Command) -> None:
    result = run("bench", "plan", "--ranks", "2", "--tokens-per-rank", 512, "--block", 128)
    assert result.code == 0
    assert "largest rank" in result.out


def test_version_prints_the_package_version(run: Command) -> None:
    result = run("--version")
    assert (result.code, result.out.splitlines()[1]) == (0, "format    apportion.plan 3.0")
    assert "numpy" in result.out
