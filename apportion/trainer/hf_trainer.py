"""Hugging Face's Trainer on planned batches.

    trainer = PlannedTrainer(model=enable(model), args=args, train_dataset=loader(dataset, model, …))
    class Mine(PlannedTrainer, SFTTrainer): ...          mixed into another Trainer

An optimizer step is an iteration of the loader; its microbatches are accumulated (`gradient_accumulation_steps`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.trainer.epochs import Epochs
from apportion.trainer.hf import NAME, inputs
from apportion.trainer.loading.loader import PlannedLoader

try:
    import accelerate  # noqa: F401
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        error.name or "transformers", "hf", "apportion.trainer.hf_trainer"
    ) from error

STATE = "planned.json"  # in a checkpoint: where the loader was


class PlannedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose train_dataset and eval_dataset may be loaders (`hf.loader`); any other it treats as Trainer does.

    Evaluation on a loader, of a stream of its own, gives the mean over tokens. A checkpoint holds the loader's state,
    and a resumed run gets the batches that would have come. Raises ConfigError for arguments that would make the loss
    another one.
    """

    _planned: PlannedLoader | None = None  # what is trained on
    _evaluated: Any = 0.0  # loss x tokens, so far

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        if not isinstance(dataset, PlannedLoader):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        self._check(predicts=not is_training and self.compute_metrics is not None)
        if is_training:
            self._planned = dataset
        held = _Numbered(Epochs(dataset, self.args.gradient_accumulation_steps if is_training else None))
        numbered: Any = held  # map-style, without being told so
        return DataLoader(numbered, batch_sampler=numbered, collate_fn=itemgetter(0))

    def _check(self, predicts: bool) -> None:
        """Raises ConfigError."""
        args, smoothing = self.args, self.args.label_smoothing_factor
        scaled = args.average_tokens_across_devices
        order = "predictions would be in the plan's order, and labels are shifted"
        own, counted = self.compute_loss_func, "its loss does not take num_items_in_batch"
        averages = "DDP and FSDP average gradients, and the loss would not make up for it"
        for name, value, refused, rule, remedy in (
            ("label_smoothing_factor", smoothing, smoothing, "it would shift labels again", "leave it 0"),
            ("average_tokens_across_devices", scaled, not scaled, averages, "leave it True"),
            ("compute_metrics", self.compute_metrics, predicts, order, "give a plain eval_dataset"),
            (
                "compute_loss_func",
                own,
                own,
                "it would be given labels that are shifted",
                "use the model's own loss",
            ),
            ("n_gpu", args.n_gpu, args.n_gpu > 1, "DataParallel splits rows", "start a process for each GPU"),
            (
                "model",
                type(self.model).__name__,
                not self.model_accepts_loss_kwargs,
                counted,
                "train it in a loop",
            ),
        ):
            if refused:
                raise ConfigError(name, value, rule, remedy)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or NAME not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        return torch.tensor(batch_samples[0]["num_items_in_batch"], device=device)

    # ---- evaluation

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        self._evaluated = torch.zeros((), device=self.args.device, dtype=torch.float64)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        held = dataloader.dataset
        if isinstance(held, _Numbered):
            total = self.accelerator.reduce(self._evaluated, "mean")  # Trainer's losses are times the ranks
            output.metrics[f"{metric_key_prefix}_loss"] = (total / max(held.epochs.valid_tokens, 1)).item()
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if NAME in inputs:
            self._evaluated += loss.double() * inputs["num_items_in_batch"]
        return loss, logits, labels

    # ---- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._planned is not None and self.args.should_save:
            Path(output_dir, STATE).write_text(json.dumps(self._planned.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._planned is None or checkpoint is None:
            return
        if not (state := Path(checkpoint, STATE)).exists():
            rule, remedy = f"has no {STATE}: it is not of a planned run", "begin anew from its weights"
            raise ConfigError("resume_from_checkpoint", checkpoint, rule, remedy)
        self._planned.load_state_dict(json.loads(state.read_text()))


class _Numbered:
    """Epochs as Trainer and accelerate know data: `[number]` is a batch. They come in order, whichever number a resumed
    epoch begins with: the loader's state says with what it does."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = iter(self.epochs)
        try:
            yield from ([number] for number in range(len(self)))
        finally:
            del self._batches

    def __getitem__(self, number: int) -> dict[str, Any]:
        return inputs(next(self._batches))
