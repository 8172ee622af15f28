"""Pool jobs with Lightning."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.trainer import hf
from apportion.trainer.lightning import Planned, PlannedBatches
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import normalised_loss
from tests.adapters import jobs_hf as hf_jobs
from tests.adapters.jobs_hf import LENGTHS, made, packed

TRAINED = LENGTHS * 3
EVALUATED = [33, 70, 5, 48, 90]

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Net(Planned, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = hf.enable(made("llama"))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, self.net(**hf.inputs(batch)).loss)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Manual(Net):
    """Net that runs backward and steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        self.manual_backward(super().training_step(batch, index))
        if batch.is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Deaf(Net):
    """Net that does not pass the plan to its model."""

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self.net(batch.tokens[None], position_ids=batch.position_ids[None]).logits
        return self.shared_loss(batch, normalised_loss(logits, batch.labels, batch.valid_tokens))

    validation_step = training_step


class Mean(Net):
    """Net whose loss is a mean over the rank's rows."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, cross_entropy(self.net(**hf.inputs(batch)).logits[0], batch.labels))


class Twice(Net):
    """Net that multiplies its loss by the number of ranks twice."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, super().training_step(batch, index))


class Half(Net):
    """Net with additional attention over the rank's rows, outside the planned model."""

    def training_step(self, batch: Any, index: int) -> Any:
        rows = self.net.model.embed_tokens(batch.tokens)[None, None]
        own = scaled_dot_product_attention(rows, rows, rows).mean()
        return self.shared_loss(batch, self.net(**hf.inputs(batch)).loss + own)

    validation_step = Net.training_step


class Plain(LightningModule):
    """The model alone, with its own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made("llama")

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss * self.trainer.accumulate_grad_batches

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(**batch).loss, batch_size=batch["num_items_in_batch"])

    configure_optimizers = Net.configure_optimizers


class Noting(Callback):
    """Records losses of steps and validations, and gradient norms; ends its process after step `dies`."""

    def __init__(self, dies: Any = None) -> None:
        self.dies, self.losses, self.validated, self.norms = dies, [], [], []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not isinstance(batch, PlannedBatch) or batch.is_last:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == self.dies:
            os._exit(1)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(float(trainer.callback_metrics["val_loss"]))


def trainer_of(
    folder: Path, noting: Any, accumulated: Any = 2, devices: Any = 1, overfit_batches: int = 0
) -> Any:
    saving = ModelCheckpoint(
        folder, "step-{step}", every_n_train_steps=2, save_top_k=-1, auto_insert_metric_name=False
    )
    return Trainer(
        accelerator="cpu",
        strategy="ddp" if devices > 1 else "auto",
        devices=devices,
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        overfit_batches=overfit_batches,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[noting, saving],
    )


def fit(
    comm: Communicator,
    folder: Path,
    shuffle: Any = False,
    resumed: Any = None,
    dies: Any = None,
    accumulated: Any = 2,
    kind: Any = Net,
    overfit_batches: int = 0,
) -> Any:
    """(losses, validation losses, gradient norms), samples of the microbatches, or the error."""
    os.environ.update(LOCAL_RANK=str(comm.rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    wiring.watch = wiring.Watch()
    net, noting = kind(), Noting(dies)
    common = {"shuffle": shuffle, "tokens": 60}
    loader = hf_jobs.loader(net.net, comm.ranks, lengths=TRAINED, microbatches=2, **common)
    tested = hf_jobs.loader(net.net, comm.ranks, lengths=EVALUATED, drop_last=False, **common)
    trainer = trainer_of(folder, noting, accumulated, comm.ranks, overfit_batches)
    try:
        batches = PlannedBatches(loader), PlannedBatches(tested, training=False)
        trainer.fit(net, *batches, ckpt_path=resumed)
    except ApportionError as error:
        return str(error)
    return (noting.losses, noting.validated, noting.norms), [
        group for pair in loader._draw() for group in pair
    ]


def fit_alone(comm: Communicator, folder: Path, samples: Any) -> Any:
    """Like `fit`, on these samples; validates one sample at a time."""
    documents, noting = hf_jobs.Documents(TRAINED), Noting()
    batches = [packed(documents, group, None) for group in samples]
    for pair in zip(batches[::2], batches[1::2], strict=True):
        valid = sum(int((one["labels"] >= 0).sum()) for one in pair)
        for one in pair:
            one["num_items_in_batch"] = valid
    tested = hf_jobs.Documents(EVALUATED)
    validated = [packed(tested, [i], length - 1) for i, length in enumerate(EVALUATED)]
    data = (DataLoader(rows, batch_size=None, shuffle=False) for rows in (batches, validated))
    trainer_of(folder, noting).fit(Plain(), *data)
    losses = [sum(pair) for pair in zip(noting.losses[::2], noting.losses[1::2], strict=True)]
    return losses, noting.validated, noting.norms
