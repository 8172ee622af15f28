"""The examples of docs/trainers.md run as their page says, on two processes."""

import os
import re
import shutil
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
    told = launched(tmp_path, *command)
    losses = dict(re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", told))
    assert sorted(losses) == ["1", "2", "3", "4", "5"]
    assert float(losses["5"]) < float(losses["1"]) - 0.1


def test_the_trainer_of_hugging_face_learns_and_goes_on(tmp_path):
    pytest.importorskip("transformers")
    whole = losses_of(launched(tmp_path / "whole", "examples/hf_train.py"))
    assert whole[-1] < whole[0] - 1.0
    newest = max(
        (tmp_path / "whole" / "hf-checkpoints").glob("checkpoint-*"), key=lambda one: int(one.name[11:])
    )
    shutil.rmtree(newest)  # as if the run had been killed before
    rest = losses_of(launched(tmp_path / "whole", "examples/hf_train.py", "--resume"))
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


def losses_of(told):
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", told)]


def launched(folder, script, *options):
    """What the script prints on two processes, started in a folder."""
    folder.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    run = subprocess.run(
        [*launch, REPOSITORY / script, *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    told = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
    assert run.returncode == 0, told
    return told
