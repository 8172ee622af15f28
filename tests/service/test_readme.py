"""The README's service: its commands serve, and its loop trains."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import apportion as ap

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVE, CREATE = re.findall(r"^    (apportion (?:serve|job).*?)(?: #.*)?$", README, re.MULTILINE)
LOOP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
URL = "http://127.0.0.1:8321"
HEADS, DIM, VOCABULARY = 2, 8, 32


class Documents:
    """Token ids drawn at random."""

    lengths = [100, 30, 250, 8, 512, 77]  # noqa: RUF012

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.random.default_rng(sample).integers(0, VOCABULARY, self.lengths[sample])


class Tiny(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.project = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        rows = len(tokens)
        q, k, v = self.project(self.embed(tokens)).view(rows, 3, HEADS, DIM).unbind(1)
        return self.head(attention(q, k, v).reshape(rows, -1))


def command(text: str, *more: str) -> list[str]:
    return [sys.executable, "-m", *shlex.split(text), *more]


def test_the_service_of_the_readme_trains(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        f"{{q_heads: {HEADS}, kv_heads: {HEADS}, head_dim: {DIM}, dtype: fp32, layers: 1}}"
    )
    serve = command(SERVE, "--port", "0", "--json")
    with subprocess.Popen(serve, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            more = (
                "--ranks",
                "1",
                "--tokens-per-rank",
                "512",
                "--model",
                "model.yaml",
                "--server",
                url,
                "--json",
            )
            create = command(CREATE, *more)
            made = json.loads(subprocess.run(create, cwd=tmp_path, capture_output=True, check=True).stdout)
            assert made["url"] == f"{url}/v1/jobs/run1"
            losses = trained(LOOP.replace(URL, url), made["key"])
        finally:
            server.terminate()
    assert server.returncode == 0
    assert losses[-1] < losses[0]


def trained(loop: str, key: str) -> list[float]:
    """The loss before and after the loop."""
    torch.manual_seed(0)
    model = Tiny()
    names = {"ap": ap, "dataset": Documents(), "rank": 0, "key": key, "model": model}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    before = loss_of(model)
    for _ in range(3):
        exec(compile(loop, "README.md", "exec"), names)
    return [before, loss_of(model)]


def loss_of(model: Tiny) -> float:
    """Over all documents, planned here."""
    cluster, dims = ap.Cluster(1, 1), ap.Model(HEADS, HEADS, DIM, dtype="fp32", layers=1)
    with (
        torch.no_grad(),
        closing(iter(ap.PlannedLoader(Documents(), cluster, dims, 1024, shuffle=False))) as batches,
    ):
        return sum(
            float(
                ap.normalised_loss(
                    model(
                        b.tokens, b.position_ids, lambda q, k, v, b=b: ap.planned_attention(q, k, v, b.handle)
                    ),
                    b.labels,
                    b.valid_tokens,
                )
            )
            for b in batches
        )
