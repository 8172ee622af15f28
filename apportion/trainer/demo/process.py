"""One process of the demo: its share of a training run whose plans come from the service.

`python -m apportion.trainer.demo.process PIPE RANK RANKS`: PIPE is the descriptor of its end of a pipe.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from apportion.ir.arrays import Ints
from apportion.ir.masks import specs as masks
from apportion.trainer.demo.decoder import Decoder, DecoderConfig
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.step.attention import planned_attention
from apportion.trainer.step.gradients import sum_gradients
from apportion.trainer.step.loss import normalised_loss

SEED = 0
LEARNING_RATE = 2e-3
WINDOW = 512
KINDS = {"global": masks.causal(), "local": masks.sliding_window(WINDOW)}


@dataclass(frozen=True)
class DemoDocuments:
    """Texts, byte by byte, and which of them each optimizer step has: a dataset of tokens and its sampler.

    text: uint8 [tokens]; lengths: int64 [n]; counts: int64 [steps], how many documents one after another.
    """

    text: NDArray[np.uint8]
    lengths: Ints
    counts: Ints
    masks = KINDS

    @staticmethod
    def load(folder: Path) -> DemoDocuments:
        """Those in a folder; the text is read as far as it is used."""
        return DemoDocuments(
            np.load(folder / "text.npy", mmap_mode="r"), *np.load(folder / "sizes.npz").values()
        )

    def save(self, folder: Path) -> None:
        np.save(folder / "text.npy", self.text)
        np.savez(folder / "sizes.npz", lengths=self.lengths, counts=self.counts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        end = int(self.lengths[: index + 1].sum())
        return self.text[end - int(self.lengths[index]) : end]

    def steps(self) -> list[list[int]]:
        """The documents of each step."""
        stops = np.cumsum(self.counts).tolist()
        return [
            list(range(stop - count, stop)) for stop, count in zip(stops, self.counts.tolist(), strict=True)
        ]


class Begin(msgspec.Struct, frozen=True):
    """What a process is told. url, key: of the job at the service."""

    folder: str
    url: str
    key: str


class StepResult(msgspec.Struct, frozen=True, tag="step"):
    """What a process tells after each step. loss: of all processes; plan: the id of its plan; waited_ms: for plans, in
    all."""

    loss: float
    plan: bytes
    waited_ms: float


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    text: str


def work(pipe: Connection, rank: int, ranks: int) -> None:
    """Trains, and reports each step; ends with the process that started it, however that ends."""
    torch.set_num_threads(1)
    try:
        begin = msgspec.msgpack.decode(pipe.recv_bytes(), type=Begin)
        threading.Thread(target=_follow, args=(pipe,), daemon=True).start()
        place = (Path(begin.folder) / "group").as_uri()
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
        for step in _train(begin, rank):
            pipe.send_bytes(msgspec.msgpack.encode(step))
        dist.barrier()  # no process hangs up on another one's last collective
        dist.destroy_process_group()
    except Exception:
        pipe.send_bytes(msgspec.msgpack.encode(Failure(traceback.format_exc())))


def _follow(pipe: Connection) -> None:
    wait([pipe])  # nothing else comes: the other end is gone
    os._exit(1)


def _train(begin: Begin, rank: int) -> Iterator[StepResult]:
    documents = DemoDocuments.load(Path(begin.folder))
    loader = PlannedLoader(documents, source=begin.url, rank=rank, key=begin.key, sampler=documents.steps())
    model, optimizer = trainer()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(model)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        yield StepResult(total.item(), batch.handle.id, 1e3 * loader.waited_s)


def loss_of(model: Decoder, batch: PlannedBatch) -> Tensor:
    """This rank's share of the mean token loss of a step."""

    def attention(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        return planned_attention(q, k, v, batch.handle, kind)

    return normalised_loss(
        model(batch.tokens, batch.position_ids, attention), batch.labels, batch.valid_tokens
    )


def trainer() -> tuple[Decoder, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.manual_seed(SEED)
    model = Decoder(DecoderConfig())
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
