"""The examples of docs/how-to run as their pages describe, with the losses of their trainers' own attention."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


TITAN = ["examples/titan/train.py", "--module", "planned_llama", "--config", "planned_tiny"]
FEW = ["--training.steps", "2"]
WHOLE = [*FEW, "--training.global_batch_size", "2", "--dataloader.tokens_per_rank", "8192"]  # on one rank
PRINTED = 1.1e-5  # the last digit


def test_titan_learns(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    losses = steps_of(launch_example(tmp_path, *TITAN))
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1


def test_losses_equal_titans_attention(tmp_path: Path) -> None:
    """In one process, since Titan initialises weights by shard, so that they depend on the number of ranks."""
    pytest.importorskip("torchtitan")
    losses = steps_of(launch_example(tmp_path / "planned", *TITAN, *WHOLE, ranks=1))
    assert losses == pytest.approx(steps_of(alone(tmp_path / "own", "titan", *FEW)), abs=PRINTED)
    assert len(losses) == 2


def test_megatron_learns_like_its_own_attention(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    losses = steps_of(launch_example(tmp_path / "planned", "examples/megatron_train.py"))
    assert losses == pytest.approx(steps_of(alone(tmp_path / "own", "megatron")), abs=PRINTED)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1


def test_hugging_face_trainer_learns_like_its_own_attention_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = losses_of(launch_example(tmp_path / "whole", "examples/hf_train.py"))
    assert whole[-1] < whole[0] - 1.0
    alone(tmp_path / "own", "hf")
    first, own = (logged(tmp_path / name)[:2] for name in ("whole", "own"))
    # means over 5 steps with Adam, in the pass that both runs share
    assert first == pytest.approx(own, abs=1e-6)
    shutil.rmtree(newest(tmp_path / "whole"))  # as if the run had been killed before
    rest = losses_of(launch_example(tmp_path / "whole", "examples/hf_train.py", "--resume"))
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


def test_lightning_starts_its_ranks_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    output = run_in(tmp_path, sys.executable, REPOSITORY / "examples/lightning_train.py")
    losses = [float(loss) for loss in re.findall(r"val_loss: ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.1


def steps_of(output: str) -> Any:
    """The losses of the steps in order."""
    found = dict(re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", output))
    return [float(found[step]) for step in sorted(found)]


def newest(folder: Path) -> Any:
    return max((folder / "hf-checkpoints").glob("checkpoint-*"), key=lambda one: int(one.name[11:]))


def logged(folder: Path) -> Any:
    """Losses with all digits."""
    history = json.loads((newest(folder) / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def losses_of(output: str) -> Any:
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]


def alone(folder: Path, trainer: Any, *options: Any) -> Any:
    """Runs an example in one process without plans; returns its output."""
    return launch_example(folder, "tests/adapters/example_alone.py", trainer, *options, ranks=1)


def launch_example(folder: Path, script: Any, *options: Any, ranks: int = 2) -> Any:
    """Runs a script on `ranks` processes in a folder; returns its output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_in(folder, *launch, REPOSITORY / script, *options)


def run_in(folder: Path, *command: Any) -> Any:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    output = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
    assert run.returncode == 0, output
    return output
