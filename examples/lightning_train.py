"""Trains a small decoder with Lightning on planned batches, on two CPU processes that Lightning starts itself.

python examples/lightning_train.py
"""

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn

import apportion as ap
from apportion.trainer.lightning import PlannedBatches, PlannedModule

RANKS, MICROBATCHES, HEADS, DIM = 2, 2, 4, 16


class Documents:
    """Documents that count up from different starts, so that the next token can be learnt."""

    def __init__(self, count: int, seed: int) -> None:
        self.lengths = np.random.default_rng(seed).geometric(0.01, count).clip(2, 500)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return (7 * index + np.arange(self.lengths[index])) % 256


class Decoder(nn.Module):
    """One layer of attention, with learned positions."""

    def __init__(self, width: int = HEADS * DIM) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(512, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 256)

    def forward(self, tokens, position_ids, handle):
        hidden = self.tokens(tokens) + self.positions(position_ids)
        q, k, v = self.qkv(hidden).view(-1, 3, HEADS, DIM).unbind(1)
        return self.head(hidden + ap.planned_attention(q, k, v, handle).flatten(1))


class Net(PlannedModule, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder()

    def training_step(self, batch, index):
        logits = self.net(batch.tokens, batch.position_ids, batch.handle)
        return self.shared_loss(batch, ap.normalised_loss(logits, batch.labels, batch.valid_tokens))

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class PrintLoss(Callback):
    def on_validation_epoch_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"epoch: {trainer.current_epoch}  val_loss: {trainer.callback_metrics['val_loss']:.5f}")


def loader(documents: Documents, **options) -> ap.PlannedLoader:
    cluster, model = ap.Cluster(1, RANKS), ap.Model(HEADS, HEADS, DIM, dtype="fp32")
    return ap.PlannedLoader(documents, cluster, model, tokens_per_rank=512, **options)


def main() -> None:
    seed_everything(0)
    options = {"microbatches": MICROBATCHES, "drop_last": True}
    train = PlannedBatches(lambda: loader(Documents(240, seed=0), **options))
    validation = PlannedBatches(lambda: loader(Documents(20, seed=1)), training=False)
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=RANKS,
        accumulate_grad_batches=MICROBATCHES,
        max_epochs=3,
        callbacks=[PrintLoss()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), train, validation)


if __name__ == "__main__":
    main()
