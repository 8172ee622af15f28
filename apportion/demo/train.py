"""Trains the demo's model: with plans on several processes, or with plain attention in one.

    torchrun --nproc-per-node 4 -m apportion.demo.train http://127.0.0.1:8321 20 [WORKLOAD]

The source of plans may also be a folder, or `local`. Rank 0 prints a line of JSON after each step. APPORTION_TOKEN is
the server's token. This process ends when the process whose id is APPORTION_DEMO, by default its launcher, ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import apportion as ap
from apportion.demo import workload
from apportion.demo.decoder import Attention, Decoder
from apportion.trainer.step.loss import IGNORED
from apportion.trainer.step.plain import plain_attention

VOCABULARY = 256  # bytes


class Trainer:
    """The model and its optimizer, identical in every process."""

    def __init__(self) -> None:
        torch.manual_seed(workload.SEED)
        self.model = Decoder(workload.MODEL, VOCABULARY)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def step(self, rows: tuple[Tensor, Tensor, Tensor], valid_tokens: int, attention: Attention) -> Tensor:
        """Updates the weights and returns this process's share of the mean loss.

        rows: tokens, position ids and labels, each [rows].
        """
        tokens, positions, labels = rows
        self.optimizer.zero_grad()
        loss = ap.normalised_loss(self.model(tokens, positions, attention), labels, valid_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        ap.sum_gradients(self.model)
        self.optimizer.step()
        return loss.detach()


def train_planned(steps: list[list[workload.Document]], source: str) -> Iterator[dict[str, Any]]:
    """Yields each step's loss and plan id, the tokens per second, and the longest total wait of any rank."""
    trainer, data = Trainer(), ap.Samples([*chain(*steps)], mask=workload.KINDS)
    numbers = iter(range(len(data)))
    sampler = [[next(numbers) for _ in step] for step in steps]
    sizes = workload.CLUSTER, workload.MODEL, workload.TOKENS // workload.RANKS
    loader = ap.PlannedLoader(
        data, *sizes, source=source, recipe=workload.RECIPE, seed=workload.SEED, sampler=sampler
    )
    for batch in loader:
        attention = partial(ap.planned_attention, handle=batch.handle)
        loss = trainer.step((batch.tokens, batch.position_ids, batch.labels), batch.valid_tokens, attention)
        waited_s = torch.tensor(loader.metrics()["waited_s"])
        dist.all_reduce(loss)
        dist.all_reduce(waited_s, dist.ReduceOp.MAX)
        record = {"loss": loss.item(), "plan": batch.handle.id.hex(), "waited_s": waited_s.item()}
        yield record | {"tokens_per_s": loader.metrics()["tokens_per_s"]}


def train_plain(steps: list[list[workload.Document]]) -> Iterator[float]:
    """Yields the loss of each step, with all tokens in this process."""
    trainer = Trainer()
    for step in steps:
        batch, tokens = workload.batch_of(step), torch.from_numpy(np.concatenate(step).astype(np.int64))
        target = torch.from_numpy(batch.labels())
        labels = torch.where(target >= 0, tokens[target.clamp(min=0)], IGNORED)
        rows = tokens, torch.from_numpy(batch.positions()), labels
        yield trainer.step(rows, batch.labelled_tokens, partial(plain_attention, batch=batch)).item()


def _end_with_demo(demo: int) -> None:
    """Ends this process when the demo ends: torchrun leaves ranks behind if it is stopped during their start."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(demo, 0)
            time.sleep(1.0)
    os._exit(1)


def main(source: str, steps: str, *file: str) -> None:
    demo = int(os.environ.get("APPORTION_DEMO", os.getppid()))
    threading.Thread(target=_end_with_demo, args=(demo,), daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for record in train_planned(workload.documents(int(steps), *file), source):
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
