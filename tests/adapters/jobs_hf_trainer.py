"""Rank pool jobs with transformers' Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError
from apportion.ir.request.cluster import Cluster
from apportion.trainer import hf
from apportion.trainer.hf_trainer import PlannedTrainer
from tests.adapters import jobs_hf as hf_jobs
from tests.adapters.jobs_hf import LENGTHS, new_model, packed

TRAIN_LENGTHS = LENGTHS * 3
EVAL_LENGTHS = [33, 70, 5, 48, 90]


def arguments(folder: Path, accumulation: Any = 2, **options: Any) -> Any:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=0.5,
        optim="sgd",  # Adam would amplify rounding errors of gradients
        num_train_epochs=2,
        save_strategy=options.pop("save_strategy", "no"),
        gradient_accumulation_steps=accumulation,
        **options,
    )


class DiesAtStep(TrainerCallback):
    """Ends its process after a step, as if it were killed."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os._exit(1)


def train(
    comm: Communicator,
    folder: Path,
    options: Any = (),
    evaluates: Any = False,
    checkpoint: Any = None,
    last_step: Any = None,
    shuffle: Any = False,
    name: str = "llama",
    **changes: Any,
) -> Any:
    """Trains; returns the logs, by name, and the samples of each microbatch."""
    set_rank_environment(comm)
    model, options = hf.enable(new_model(name, **changes)), dict(options)
    common = {"shuffle": shuffle, "tokens": 60, "dtype": "bf16" if options.get("bf16") else "fp32"}
    train_loader = SampleRecorder(
        hf_jobs.loader(model, comm.ranks, lengths=TRAIN_LENGTHS, microbatches=2, **common)
    )
    tested = train_loader.loader
    if evaluates != "training":
        tested = hf_jobs.loader(model, comm.ranks, drop_last=False, **{**common, "lengths": EVAL_LENGTHS})
    trainer = PlannedTrainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=train_loader.loader,
        eval_dataset=tested if evaluates else None,
        callbacks=[] if last_step is None else [DiesAtStep(last_step)],
    )
    if evaluates == "before":
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=checkpoint)
    return logs(trainer), train_loader.samples


class OwnSampler(PlannedTrainer):
    """A Trainer with its own sample order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler([1.0, 2.0], 2)


class SampleRecorder:
    """Records the samples of each microbatch of a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.samples = loader, []
        batches = loader._batches

        def recording(*args: Any) -> Iterator[Any]:
            for batch in batches(*args):
                self.samples.append(batch.samples.tolist())
                yield batch

        loader._batches = recording


def logs(trainer: Any) -> Any:
    history = trainer.state.log_history
    names = ("loss", "eval_loss", "grad_norm", "epoch")
    return {name: [row[name] for row in history if name in row] for name in names}


class Plain(Trainer):
    """A Trainer that takes prepared batches in order."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None, shuffle=False)


def train_alone(comm: Communicator, folder: Path, samples: Any, options: Any = ()) -> Any:
    """Like `train`, but in one process on these samples, with the model's own attention."""
    documents = hf_jobs.Documents(TRAIN_LENGTHS)
    batches = [packed(documents, group, None) for group in samples]
    trainer = Plain(model=new_model("llama"), args=arguments(folder, **dict(options)), train_dataset=batches)
    trainer.train()
    return logs(trainer)


def evaluate(comm: Communicator, folder: Path, groups: int = 1, microbatches: int = 1) -> Any:
    """Two evaluation losses of an untrained model, and the number of batches. groups: of ranks, which share the
    samples."""
    set_rank_environment(comm)
    model, ranks = hf.enable(new_model("llama")), comm.ranks // groups
    mesh = init_device_mesh("cpu", (groups, ranks))
    replicas = mesh.get_group(0) if groups > 1 else None
    options: Any = {"microbatches": microbatches, "replicas": replicas}
    group = ap.Communicator(mesh.get_group(1))
    evaluation = hf_jobs.loader(model, ranks, group, EVAL_LENGTHS, 120 // ranks, **options)
    trainer = PlannedTrainer(model=model, args=arguments(folder), eval_dataset=evaluation)
    return [trainer.evaluate()["eval_loss"] for _ in range(2)], len(trainer.get_eval_dataloader())


def mean_alone(comm: Communicator) -> Any:
    """The mean loss over tokens of the evaluation samples, computed one sample at a time."""
    model, documents = new_model("llama").eval(), hf_jobs.Documents(EVAL_LENGTHS)
    valid = sum(length - 1 for length in EVAL_LENGTHS)
    with torch.no_grad():
        parts = [model(**packed(documents, [i], valid)).loss for i in range(len(EVAL_LENGTHS))]
    return float(sum(part.double() for part in parts))


def refusal(comm: Communicator, folder: Path, options: Any) -> Any:
    """The error of a Trainer whose options do not allow a loader."""
    model = hf.enable(new_model("llama"))
    dataset = hf_jobs.Weighted if options.pop("weighted", False) else hf_jobs.Documents
    data = hf_jobs.loader(model, comm.ranks, comm, dataset=dataset)
    metrics = options.pop("compute_metrics", None) and (lambda prediction: {})
    own = options.pop("compute_loss_func", None) and (lambda outputs, labels, **kwargs: outputs.loss)
    collator = options.pop("data_collator", None) and (lambda samples: samples)
    callables = {"compute_metrics": metrics, "compute_loss_func": own, "data_collator": collator}
    predicts, kind = options.pop("predict", False), options.pop("kind", PlannedTrainer)
    plain = options.pop("plain", False)
    trainer = kind(model=model, args=arguments(folder, **options), **callables)
    try:
        if predicts:
            trainer.predict(data)
        next(iter(trainer._get_dataloader(data.dataset if plain else data, is_training=metrics is None)))
    except ConfigError as error:
        return str(error)


def with_column(comm: Communicator, folder: Path, column: str) -> Any:
    """The error of a Trainer on a dataset with this column."""
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4], column: [0, 0, 1, 1]}])
    options = {"cluster": Cluster(1, comm.ranks), "tokens_per_rank": 64}
    trainer = PlannedTrainer(
        hf.enable(new_model("llama")), arguments(folder), train_dataset=data, planned=options
    )
    try:
        trainer.get_train_dataloader()
    except ConfigError as error:
        return str(error)


class OwnLoss(Trainer):
    """A Trainer with its own loss over labels that are shifted already."""

    kind = ""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = 1
    ) -> Any:
        labels = inputs.pop("labels")[0]
        del inputs["shift_labels"]
        logits = model(**inputs).logits[0]
        losses = cross_entropy(logits, labels, reduction="none")
        if self.kind == "mean":
            return losses[labels >= 0].mean()
        if self.kind == "focal":
            losses = losses * (1 - torch.exp(-losses))
        factor = 1 if self.kind == "share" else self.accelerator.num_processes
        return losses.sum() / num_items_in_batch * factor


class PlannedOwnLoss(PlannedTrainer, OwnLoss):
    sums_tokens = True


def own_loss(comm: Communicator, folder: Path, kind: str) -> Any:
    """The warnings of a Trainer with its own loss."""
    set_rank_environment(comm)
    model = hf.enable(new_model("llama"))
    data = hf_jobs.loader(model, comm.ranks, lengths=TRAIN_LENGTHS, tokens=60, microbatches=2)
    trainer = PlannedOwnLoss(model=model, args=arguments(folder), train_dataset=data)
    trainer.kind = kind
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return " ".join(str(one.message) for one in caught)


def on_training_samples(comm: Communicator, folder: Path) -> Any:
    """The microbatches of the loaders that train and evaluate on one dataset, and the samples of their batches."""
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4]}] * 2)
    sampler = [[[1], [1]]]
    planned = {
        "cluster": Cluster(1, comm.ranks),
        "tokens_per_rank": 4,
        "communicator": comm,
        "sampler": sampler,
    }
    options: Any = {"train_dataset": data, "eval_dataset": data, "planned": planned}
    trainer = PlannedTrainer(hf.enable(new_model("llama")), arguments(folder), **options)
    passes = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    loaders = [one.dataset.epochs.loader for one in passes]
    return [(one.job.microbatches, [int(b.sample_ids[0]) for b in one]) for one in loaders]


def set_rank_environment(comm: Communicator) -> None:
    """Sets the environment in which accelerate looks for torch.distributed."""
    os.environ.update(
        RANK=str(comm.rank),
        LOCAL_RANK=str(comm.rank),
        WORLD_SIZE=str(comm.ranks),
        LOCAL_WORLD_SIZE=str(comm.ranks),
    )
