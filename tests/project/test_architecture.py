"""Import rules between packages; modules that planning must not import; the code map of docs/design.md."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]

PLAN = """
import json, sys
import apportion as ap
kinds = {"global": ap.masks.causal(), "local": ap.masks.sliding_window(64)}
batch = ap.Batch.from_lengths([5000, 800, 1, 3000, 77], mask=kinds)
cluster, model = ap.Cluster(nodes=1, ranks_per_node=4), ap.Model(layers={"global": 1, "local": 5})
plan = ap.plan(batch, cluster, model, recipe="fcp", seed=3)
loaded = sorted({name.split(".")[0] for name, module in sys.modules.items() if module is not None})
print(json.dumps({"id": plan.id.hex(), "bytes": len(plan.encode()), "loaded": loaded}))
"""


def run(code: str, hash_seed: str = "0") -> dict[str, object]:
    """Runs `code` in a new process; returns the JSON object that it prints."""
    return dict(json.loads(run_python("-c", code, env={"PYTHONHASHSEED": hash_seed})))


@pytest.fixture(scope="module")
def plan_facts() -> dict[str, object]:
    """Facts of a plan that a new process made."""
    return run(PLAN)


def test_the_code_map_in_the_design_has_every_folder() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    block = text.split("## Layout of the code")[1].split("\n    apportion/\n")[1].split("\n\n")[0]
    listed, parents = set[str](), list[str]()
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip()) - 6) // 2
        parents[depth:] = [line.split()[0].rstrip("/")]
        listed.add("/".join(parents))
    package = ROOT / "apportion"
    parts = {path.parent.relative_to(package).as_posix() for path in package.glob("*/__init__.py")}
    inside = {
        path.parent.relative_to(package).as_posix()
        for part in ("ir", "planner", "backends", "service", "trainer", "cli")
        for path in package.glob(f"{part}/**/__init__.py")
    }
    assert listed == parts | inside


def test_the_walk_in_the_design_names_existing_functions() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| [^|]+ \| `([\w/.]+)` \| ([^|]+) \|$", text.split("### One batch")[1], re.MULTILINE
    )
    assert len(rows) > 10
    for file, names in rows:
        tree = ast.parse((ROOT / "apportion" / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(re.findall(r"`(\w+)`", names)) <= defined, file


def test_planning_needs_no_torch(plan_facts: dict[str, object]) -> None:
    assert not {"torch", "rich", "typer"} & set(plan_facts["loaded"])


def test_plan_bytes_do_not_depend_on_the_hash_seed(plan_facts: dict[str, object]) -> None:
    other = run(PLAN, hash_seed="77")
    assert (other["id"], other["bytes"]) == (plan_facts["id"], plan_facts["bytes"])


def test_execution_imports_no_planner_and_no_solver() -> None:
    code = "import json, sys, apportion.backends.numpy; print(json.dumps({'loaded': sorted(sys.modules)}))"
    loaded = run(code)["loaded"]
    assert not {"apportion.planner.api", "scipy", "torch"} & set(loaded)


@pytest.mark.parametrize("name", ["PlannedLoader", "PlanHandle"])
def test_policies_of_selective_checkpointing_can_name_ops_that_have_not_run(name: str) -> None:
    code = f"import torch, apportion as ap; ap.{name}; ops = torch.ops.apportion; print(ops.attend, ops.fold, ops.halo)"
    assert run_python("-c", code) == "apportion.attend apportion.fold apportion.halo\n"


def test_help_imports_few_modules() -> None:
    loaded = run("import json, sys, apportion.cli; print(json.dumps({'loaded': sorted(sys.modules)}))")[
        "loaded"
    ]
    assert not {"numpy", "torch"} & set(loaded)


def test_missing_torch_is_named_with_its_extra() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import apportion as ap\n"
        "for name in ('planned_attention', 'trees'):\n"
        "    try:\n        getattr(ap, name)\n"
        "    except ap.MissingDependencyError as error:\n        print(error)\n"
    )
    assert run_python("-c", program).count("pip install '.[torch]'") == 2
