"""Runs the Python code of README and the trainer pages in one process; names that the pages omit are defined here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.programs import run

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import sys
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apportion as ap


class Dataset(list):
    lengths = [300, 40, 9, 150, 25]


my_data = types.ModuleType("my_data")
my_data.documents = lambda tokenizer, path: dataset
sys.modules["my_data"] = my_data
dataset = Dataset(torch.arange(length) % 64 for length in Dataset.lengths)
cluster = ap.Cluster(1, 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
args = TrainingArguments("outputs", use_cpu=True, report_to=[], max_steps=1, save_strategy="no", disable_tqdm=True)
"""
SAVED = """
import datasets
from apportion.trainer import hf

hf.enable(model)
ranks, tokens_per_rank = 1, 256
rows = [{"input_ids": tokens.tolist(), "text": "left out"} for tokens in dataset]
datasets.Dataset.from_list(rows).save_to_disk("tokenized")
"""
#: name -> (page, index of its Python block, code before it, code after it)
CASES = {
    "trainer of the README": ("README.md", 1, LLAMA, ""),
    "own loop with transformers": ("docs/how-to/transformers.md", 1, LLAMA, "loss.backward()"),
    "own dataset": (
        "docs/how-to/transformers.md",
        2,
        LLAMA + SAVED,
        "assert samples.cut == 1; next(iter(train))",
    ),
    "TorchTitan": (
        "docs/how-to/torchtitan.md",
        0,
        "",
        "assert llama3_planned().dataloader.tokens_per_rank == 8192",
    ),
    "ticks of TorchTitan": (
        "docs/how-to/torchtitan.md",
        1,
        "from torchtitan.models.llama3.config_registry import llama3_8b\n"
        "from apportion.trainer.torchtitan import planned",
        "assert llama3_ticks().dataloader.ticks == 2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_python_of_a_page_runs(case: str, tmp_path: Path) -> None:
    page, number, before, after = CASES[case]
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    run(sys.executable, "-c", "\n".join((SETUP, before, block, after)), cwd=tmp_path)


@pytest.mark.parametrize(
    "launch", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")]
)
def test_the_program_of_the_transformers_page_prints_its_output(
    launch: tuple[str, ...], tmp_path: Path
) -> None:
    text = (ROOT / "docs/how-to/transformers.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (expected,) = re.findall(r"<!-- output -->\n```\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    printed = run(sys.executable, *launch, "train.py", cwd=tmp_path)
    logged = [line for line in printed.splitlines(keepends=True) if line.startswith("{'loss'")]
    assert "".join(logged) == expected
