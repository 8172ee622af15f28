"""The Python code of pages on training runs in one process; this file defines names that the pages omit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.programs import run

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

import apportion as ap


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(64, 128), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden, attention):
        q, k, v = self.qkv(hidden).view(-1, 8, 16).split((4, 2, 2), dim=1)
        if isinstance(attention, ap.PlanHandle):
            out = ap.planned_attention(q, k, v, attention)
        else:
            out = attention(q, k, v)
        return self.mlp(hidden + self.out(out.flatten(1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList([Layer()])

    def forward(self, tokens, position_ids, attention):
        return self.head(self.layers[0](self.embed(tokens), attention))


class Dataset(list):
    lengths = [300, 40, 9, 150, 25]


dataset = Dataset(torch.arange(length) % 64 for length in Dataset.lengths)
cluster, model = ap.Cluster(1, 1), ap.Model(q_heads=4, kv_heads=2, head_dim=16, dtype="fp32", layers=1)
net = Net()
loader = ap.PlannedLoader(dataset, cluster, model, 8192)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
tokens_per_rank, url, replicas, ranks = 8192, "local", 1, 1
rollouts = [np.array([1, 2, 3, *range(k, k + 6)]) for k in (5, 9, 5, 20)]
prompts, prompt_lengths = [0, 0, 0, 0], [3, 3, 3, 3]
samples = rollouts
old_log_probs = [torch.zeros(9) for _ in rollouts]
completion_masks = [torch.arange(9) >= 3 for _ in rollouts]
advantages, token_weights, reference, beta = torch.ones(4), torch.ones(4) / 24, torch.zeros(4), 0.1


def projections(batch):
    rows = len(batch.tokens)
    return (torch.randn(rows, 16, 128), *(torch.randn(rows, 128, requires_grad=True) for _ in range(2)))


def my_kernel(queries, latents, index_keys, first, end):
    assert len(first) == len(end) == len(queries)
    return latents.sum() + index_keys.sum()
"""
RUN = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
setup, *blocks = sys.argv[1:]
for number, block in enumerate(blocks):
    print("block", number, flush=True)
    exec(setup + block, {"__name__": "page"})
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["training-loop", "rl-trees", "own-kernel"])
def test_python_of_a_page_runs(page: str) -> None:
    """The blocks run one after another in one process, each with a new model and loader."""
    text = (ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text.replace('"cuda"', '"cpu"'), re.DOTALL)
    assert blocks
    run(sys.executable, "-c", RUN, SETUP, *blocks[: 1 if page == "own-kernel" else None])
