"""What may import what, and what planning must not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PLAN = """
import json, sys
{before}
import apportion as ap
kinds = {{"global": ap.masks.causal(), "local": ap.masks.sliding_window(64)}}
batch = ap.Batch.from_lengths([5000, 800, 1, 3000, 77], mask=kinds)
cluster, model = ap.Cluster(nodes=1, ranks_per_node=4), ap.Model(layers={{"global": 1, "local": 5}})
plan = ap.plan(batch, cluster, model, recipe="fcp", seed=3)
loaded = sorted({{name.split(".")[0] for name, module in sys.modules.items() if module is not None}})
print(json.dumps({{"id": plan.id.hex(), "bytes": len(plan.encode()), "loaded": loaded}}))
"""


def run(code: str, hash_seed: str = "0") -> dict[str, object]:
    """The JSON that `code` prints in a process of its own."""
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def planned() -> dict[str, object]:
    """A plan made in a fresh process."""
    return run(PLAN.format(before=""))


def test_import_contract() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planning_needs_no_torch(planned: dict[str, object]) -> None:
    assert not {"torch", "rich", "typer"} & set(planned["loaded"])  # type: ignore[call-overload]


def test_bytes_are_the_same_without_numba_and_under_another_hash_seed(planned: dict[str, object]) -> None:
    plain = run(PLAN.format(before="sys.modules['numba'] = None"), hash_seed="77")
    assert "numba" not in plain["loaded"]  # type: ignore[operator]
    assert (plain["id"], plain["bytes"]) == (planned["id"], planned["bytes"])


def test_executing_needs_no_planner_and_no_solver() -> None:
    code = (
        "import json, sys, apportion.backends.reference; print(json.dumps({'loaded': sorted(sys.modules)}))"
    )
    loaded = run(code)["loaded"]
    assert not {"apportion.planner.api", "scipy", "numba", "torch"} & set(loaded)  # type: ignore[call-overload]


def test_help_is_quick_to_load() -> None:
    loaded = run("import json, sys, apportion.cli; print(json.dumps({'loaded': sorted(sys.modules)}))")[
        "loaded"
    ]
    assert not {"numpy", "torch", "numba"} & set(loaded)  # type: ignore[call-overload]


def test_missing_torch_is_named_with_its_extra() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import apportion as ap\n"
        "for name in ('planned_attention', 'trees'):\n"
        "    try:\n        getattr(ap, name)\n"
        "    except ap.MissingDependencyError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'apportion[torch]'") == 2
