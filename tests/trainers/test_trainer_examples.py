"""The examples of docs/trainers.md run as their page says, on two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torchtitan", ["examples/titan/train.py", "--module", "planned_llama", "--config", "planned_tiny"]),
        ("megatron.core", ["examples/megatron_train.py"]),
    ],
)
def test_an_example_learns(package, command, tmp_path):
    pytest.importorskip(package)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    run = subprocess.run(
        [*launch, *command], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600
    )
    told = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
    assert run.returncode == 0, told
    losses = dict(re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", told))
    assert sorted(losses) == ["1", "2", "3", "4", "5"]
    assert float(losses["5"]) < float(losses["1"]) - 0.1
