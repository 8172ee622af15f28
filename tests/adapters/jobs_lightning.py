"""Rank pool jobs with Lightning."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.trainer import hf
from apportion.trainer.lightning import PlannedBatches, PlannedModule
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.shared import communicator_of
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import normalised_loss
from tests.adapters import jobs_hf as hf_jobs
from tests.adapters.jobs_hf import LENGTHS, new_model, packed

TRAIN_LENGTHS = LENGTHS * 3
EVAL_LENGTHS = [33, 70, 5, 48, 90]

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Net(PlannedModule, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = hf.enable(new_model("llama"))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, self.net(**hf.inputs(batch)).loss)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ManualNet(Net):
    """Net with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        self.manual_backward(super().training_step(batch, index))
        if batch.is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()


class TermsNet(Net):
    """Net with a compiled head, whose loss is the sum of two weighted terms."""

    def __init__(self) -> None:
        super().__init__()
        self.net.lm_head.compile(backend="aot_eager")

    def training_step(self, batch: Any, index: int) -> Any:
        share = normalised_loss(self.net(**hf.inputs(batch)).logits, batch.labels, batch.valid_tokens)
        return self.shared_loss(batch, 0.25 * share + 0.75 * share)

    validation_step = training_step


class FinderNet(Net):
    """Net with a learning-rate finder, whose trial steps are undone."""

    def configure_callbacks(self) -> Any:
        return [LearningRateFinder(num_training_steps=3, update_attr=False)]


class AveragedNet(Net):
    """Net that compensates for averaged gradients twice."""

    def training_step(self, batch: Any, index: int) -> Any:
        logits, ranks = self.net(**hf.inputs(batch)).logits, self.trainer.world_size
        return self.shared_loss(batch, normalised_loss(logits, batch.labels, batch.valid_tokens, ranks))

    validation_step = training_step


class OverriddenNet(Net):
    """Net with a hook in place of the mixin's."""

    def on_train_start(self) -> None:
        pass


class EvaluatedByGroupNet(Net):
    """Net that two groups of ranks evaluate, each on all samples."""


class PlanDroppingNet(Net):
    """Net that does not pass the plan to its model."""

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self.net(batch.tokens[None], position_ids=batch.position_ids[None]).logits
        return self.shared_loss(batch, normalised_loss(logits, batch.labels, batch.valid_tokens))

    validation_step = training_step


class ShardedNet(Net):
    """Net that FSDP2 shards over all ranks, whatever the mesh of Lightning's strategy."""

    def configure_model(self) -> None:
        for layer in self.net.model.layers:
            fully_shard(layer)
        fully_shard(self.net)


class LocalMeanNet(Net):
    """Net whose loss is a mean over the rank's rows."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, cross_entropy(self.net(**hf.inputs(batch)).logits[0], batch.labels))


class DoublyScaledNet(Net):
    """Net that multiplies its loss by the number of ranks twice."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.shared_loss(batch, super().training_step(batch, index))


class ExtraAttentionNet(Net):
    """Net with extra attention over the rank's rows, outside the planned model."""

    def training_step(self, batch: Any, index: int) -> Any:
        rows = self.net.model.embed_tokens(batch.tokens)[None, None]
        own = scaled_dot_product_attention(rows, rows, rows).mean()
        return self.shared_loss(batch, self.net(**hf.inputs(batch)).loss + own)

    validation_step = Net.training_step


class ReferenceNet(LightningModule):
    """The model with its own attention, for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_model("llama")

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss * self.trainer.accumulate_grad_batches

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(**batch).loss, batch_size=batch["num_items_in_batch"])

    configure_optimizers = Net.configure_optimizers


class Recorder(Callback):
    """Records losses of steps and validations, and gradient norms; ends its process after `last_step`."""

    def __init__(self, last_step: Any = None) -> None:
        self.last_step, self.losses, self.validations, self.norms = last_step, [], [], []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not isinstance(batch, PlannedBatch) or batch.is_last:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == self.last_step:
            os._exit(1)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(float(trainer.callback_metrics["val_loss"]))


def trainer_of(
    folder: Path,
    recorder: Any,
    accumulation: Any = 2,
    devices: Any = 1,
    overfit_batches: int = 0,
    strategy: Any = "ddp",
) -> Any:
    common: Any = {"save_top_k": -1, "auto_insert_metric_name": False}
    saving = [
        ModelCheckpoint(folder, "step-{step}", every_n_train_steps=2, **common),
        ModelCheckpoint(folder, "epoch-{epoch}", every_n_epochs=1, **common),
    ]
    return Trainer(
        accelerator="cpu",
        strategy=strategy if devices > 1 else "auto",
        devices=devices,
        max_epochs=2,
        accumulate_grad_batches=accumulation,
        overfit_batches=overfit_batches,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder, *saving],
    )


def fit(
    comm: Communicator,
    folder: Path,
    shuffle: Any = False,
    checkpoint: Any = None,
    last_step: Any = None,
    accumulation: Any = 2,
    kind: Any = Net,
    overfit_batches: int = 0,
) -> Any:
    """Trains; returns (losses, validation losses, gradient norms) and the samples of each microbatch, or the error."""
    os.environ.update(LOCAL_RANK=str(comm.rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    wiring.watch = wiring.Watch()
    net, recorder = kind(), Recorder(last_step)
    common = {"shuffle": shuffle, "tokens": 60}
    loader = hf_jobs.loader(net.net, comm.ranks, lengths=TRAIN_LENGTHS, microbatches=2, **common)
    groups = communicator_of([[0, 1], [2, 3]]) if kind is EvaluatedByGroupNet else comm
    evaluation = hf_jobs.loader(
        net.net, groups.ranks, groups, lengths=EVAL_LENGTHS, drop_last=False, **common
    )
    strategy = ModelParallelStrategy() if kind is ShardedNet else "ddp"
    trainer = trainer_of(folder, recorder, accumulation, comm.ranks, overfit_batches, strategy)
    try:
        batches = PlannedBatches(loader), PlannedBatches(evaluation, training=False)
        trainer.fit(net, *batches, ckpt_path=checkpoint)
    except ApportionError as error:
        return str(error)
    return (recorder.losses, recorder.validations, recorder.norms), [
        group for pair in loader._draw() for group in pair
    ]


def fit_alone(comm: Communicator, folder: Path, samples: Any) -> Any:
    """Like `fit`, but in one process on these samples; validates one sample at a time."""
    documents, recorder = hf_jobs.Documents(TRAIN_LENGTHS), Recorder()
    batches = [packed(documents, group, None) for group in samples]
    for pair in zip(batches[::2], batches[1::2], strict=True):
        valid = sum(int((one["labels"] >= 0).sum()) for one in pair)
        for one in pair:
            one["num_items_in_batch"] = valid
    evaluation = hf_jobs.Documents(EVAL_LENGTHS)
    validations = [packed(evaluation, [i], length - 1) for i, length in enumerate(EVAL_LENGTHS)]
    data = (DataLoader(rows, batch_size=None, shuffle=False) for rows in (batches, validations))
    trainer_of(folder, recorder).fit(ReferenceNet(), *data)
    losses = [sum(pair) for pair in zip(recorder.losses[::2], recorder.losses[1::2], strict=True)]
    return losses, recorder.validations, recorder.norms
