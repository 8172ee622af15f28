"""Hugging Face Trainer adapter for planned batches.

    trainer = PlannedTrainer(model=enable(model), args=args, train_dataset=loader(dataset, model, …))

    class Mine(PlannedTrainer, SFTTrainer): ...          mixed into another Trainer, which prepares its data itself
    Mine(model=enable(model), args=args, train_dataset=dataset, planned={"cluster": …, "tokens_per_rank": …})

An optimizer step is an iteration of the loader; its microbatches are accumulated (`gradient_accumulation_steps`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.ir.masks.spec import Mask
from apportion.ir.request.hf_config import masks_of
from apportion.trainer.hf import NAME, inputs, loader
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.loading.rows import LOSS_MASKS
from apportion.trainer.loading.samples import Samples
from apportion.trainer.shared import Epochs
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import WEIGHTS
from apportion.trainer.step.terms import SHARE, has_term, mark

try:
    import accelerate  # noqa: F401
    from transformers import PreTrainedModel, Trainer, default_data_collator
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        error.name or "transformers", "hf", "apportion.trainer.hf_trainer"
    ) from error

STATE = "planned.json"  # the loader's state in a checkpoint

#: collators that only pad: (top package, class)
_PADS = {
    ("transformers", "DataCollatorForSeq2Seq"),
    ("transformers", "DataCollatorWithPadding"),
    ("trl", "DataCollatorForLanguageModeling"),
}
#: trainers whose loss is a sum over rows divided by num_items_in_batch: (top package, class)
_SUMS = {("transformers", "Trainer"), ("trl", "SFTTrainer")}


class PlannedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose train_dataset and eval_dataset may be loaders (`hf.loader`); other datasets work as usual.

    planned: options of `hf.loader`, which then loads the datasets as the Trainer has prepared them (trl's SFTTrainer
    tokenizes, masks, truncates and packs); an iteration has `gradient_accumulation_steps` microbatches.

    Evaluation on a loader returns the mean over tokens. Checkpoints contain the loader's state, so a resumed run
    continues with the next batch. Raises ConfigError for arguments that would change the loss, and for a Trainer whose
    `compute_loss` is not known to be a sum over tokens; set `sums_tokens = True` if it is.
    """

    sums_tokens = False
    _planned: PlannedLoader | None = None  # the training loader
    _evaluated: Any = 0.0  # sum of loss x tokens so far

    def __init__(self, *args: Any, planned: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._options, self._loaders = planned, dict[tuple[int, bool], tuple[Any, PlannedLoader]]()
        arguments = [*args, *kwargs.values()]
        if planned is not None or any(isinstance(value, PlannedLoader) for value in arguments):
            self._check_loss(has_loader=planned is None)
        super().__init__(*args, **kwargs)

    def _check_loss(self, has_loader: bool) -> None:
        """Raises ConfigError for a loss that is not token-wise, or for a loader if the Trainer prepares data itself."""
        mixed, owner = type(self).__mro__, self._loss_owner()
        if _name(owner) not in _SUMS and not self.sums_tokens:
            rule = f"the loss of {owner.__name__} is not known to be a sum over tokens, which ranks can share"
            remedy = (
                "train preferences and rollouts with ap.trees in your own loop, or set sums_tokens = True"
            )
            raise ConfigError("compute_loss", owner.__qualname__, rule, remedy)
        if has_loader and any(hasattr(base, "_prepare_dataset") for base in mixed):
            rule = "this Trainer tokenizes, masks and cuts the samples itself, before they are planned"
            raise ConfigError("train_dataset", "a loader", rule, "pass the dataset, and planned={...}")

    def _loss_owner(self) -> Any:
        """The class whose `compute_loss` this Trainer uses."""
        bases = type(self).__mro__
        return next(base for base in bases if base is not PlannedTrainer and "compute_loss" in vars(base))

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        if self._options is not None and kwargs.get("description") != "test":  # predictions keep their order
            dataset = self._loader(dataset, is_training)
        if not isinstance(dataset, PlannedLoader):
            if is_training:
                rule, remedy = "would be trained on without plans", "pass hf.loader(...), or planned={...}"
                raise ConfigError("train_dataset", type(dataset).__name__, rule, remedy)
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        if kwargs.get("description") == "test":
            rule, remedy = "predictions would be in the plan's order", "pass the plain dataset"
            raise ConfigError("test_dataset", "a loader", rule, remedy)
        self._check(predicts=not is_training and self.compute_metrics is not None)
        if is_training:
            self._planned = dataset
        batches = _EpochData(Epochs(dataset, self.args.gradient_accumulation_steps if is_training else None))
        numbered: Any = batches  # map-style, though not declared so
        return DataLoader(numbered, batch_sampler=numbered, collate_fn=itemgetter(0))

    def _loader(self, dataset: Any, is_training: bool) -> PlannedLoader:
        """The loader of a prepared dataset, cached."""
        key = id(dataset), is_training  # evaluation on the training samples is one unshuffled pass
        if key not in self._loaders:
            self._set_signature_columns_if_needed()
            self._check_columns(dataset)
            mask = masks_of(self.model.config.get_text_config().to_dict())
            samples = Samples(dataset, columns={*self._signature_columns, "labels"}, mask=mask)
            options = dict(self._options or {})
            if is_training:
                options["microbatches"] = self.args.gradient_accumulation_steps
            else:
                options = _evaluation_options(options) | {"shuffle": False, "drop_last": False}
            self._loaders[key] = dataset, loader(samples, self.model, **options)
        return self._loaders[key][1]

    def _check_columns(self, dataset: Any) -> None:
        """Raises ConfigError for loss masks and weights that this Trainer ignores."""
        if hasattr(self, "_prepare_dataset"):  # such a Trainer has turned them into labels
            return
        columns = getattr(dataset, "column_names", None) or ()
        for name in (*LOSS_MASKS, WEIGHTS):
            if name in columns and name not in self._signature_columns:
                rule = "is a column that this Trainer ignores"
                remedy = "pass a loader as train_dataset, or drop it"
                raise ConfigError(name, "a column of the dataset", rule, remedy)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if NAME in inputs and num_items_in_batch is None:  # not every Trainer counts items in evaluation
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        is_sum = NAME in inputs and loss.requires_grad and _name(self._loss_owner()) in _SUMS
        if is_sum and not has_term(loss, SHARE):  # trl's own, of hidden states
            mark(loss)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not wiring.watch.accounted:  # Trainer undoes the averaging over ranks; unknown losses are checked
            wiring.watch.accounted, wiring.watch.unknown = True, _name(self._loss_owner()) not in _SUMS
        return super().training_step(*args, **kwargs)

    def _check(self, predicts: bool) -> None:
        """Raises ConfigError for arguments that planned batches do not support."""
        args, smoothing = self.args, self.args.label_smoothing_factor
        scaled, noise = args.average_tokens_across_devices, args.neftune_noise_alpha
        order = "predictions would be in the plan's order, and labels are shifted"
        averages = "DDP and FSDP average gradients, and the loss would not compensate"
        rows = "the noise depends on a rank's rows"
        shifted = "it would receive shifted labels"
        routed = getattr(self, "router_aux_loss_coef", 0), getattr(self, "aux_loss_enabled", False)
        data_collator = self.data_collator
        collator = getattr(data_collator, "__name__", type(data_collator).__name__)
        pads = data_collator is default_data_collator or _name(type(data_collator)) in _PADS
        sampler, sampling = type(self)._get_train_sampler, "the loader draws the samples"
        orders = sampler is not Trainer._get_train_sampler
        model, uncounted = type(self.model).__name__, not self.model_accepts_loss_kwargs
        for name, value, is_refused, rule, remedy in (
            ("label_smoothing_factor", smoothing, smoothing, "it would shift labels again", "leave it at 0"),
            ("average_tokens_across_devices", scaled, not scaled, averages, "leave it at True"),
            ("neftune_noise_alpha", noise, noise, rows, "leave it out"),
            ("compute_metrics", self.compute_metrics, predicts, order, "pass a plain eval_dataset"),
            ("data_collator", collator, not pads, "rows are not collated", "put labels into the samples"),
            ("_get_train_sampler", sampler.__qualname__, orders, sampling, "pass it sampler="),
            ("compute_loss_func", *[self.compute_loss_func] * 2, shifted, "use the model's own loss"),
            ("n_gpu", args.n_gpu, args.n_gpu > 1, "DataParallel splits rows", "start a process for each GPU"),
            ("router_aux_loss_coef", *routed, "trl adds the router's loss of a rank's rows", "set it to 0"),
            ("model", model, uncounted, "its loss does not take num_items_in_batch", "train it in your loop"),
        ):
            if is_refused:
                raise ConfigError(name, value, rule, remedy)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or NAME not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        return torch.tensor(batch_samples[0]["num_items_in_batch"], device=device)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        if not self.is_fsdp_enabled and vars(model).pop("_is_accelerate_prepared", False):
            # prepared by an evaluation before training, without DDP; accelerate would leave it so
            self.model_wrapped = self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return super()._prepare_for_training(*args, **kwargs)

    # ---- evaluation

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        self._evaluated = torch.zeros((), device=self.args.device, dtype=torch.float64)
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        dataset = dataloader.dataset
        if isinstance(dataset, _EpochData):
            total = self.accelerator.reduce(self._evaluated, "sum")  # Trainer multiplies by the rank count
            total *= wiring.watch.ranks / self.accelerator.num_processes**2  # groups may evaluate alone
            output.metrics[f"{metric_key_prefix}_loss"] = (total / max(dataset.epochs.valid_tokens, 1)).item()
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
            rule, remedy = f"has no {STATE}: it is not from a planned run", "start a new run from its weights"
            raise ConfigError("resume_from_checkpoint", checkpoint, rule, remedy)
        self._planned.load_state_dict(json.loads(state.read_text()))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loaded = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._loaded = self.state.best_model_checkpoint
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Loads weights by the names of published files, which checkpoints use: unlike `from_pretrained`, Trainer does
        not convert them to the class's names, but warns and continues with the existing weights."""
        if load_result.missing_keys and isinstance(self.model, PreTrainedModel):
            saved = type(self.model).from_pretrained(self._loaded, dtype=self.model.dtype)
            load_result = self.model.load_state_dict(saved.state_dict())
        super()._issue_warnings_after_load(load_result)


def _evaluation_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `planned` without those of the training samples. Raises ConfigError for masks, one per sample."""
    masks = options.get("masks")
    if not isinstance(masks, Mask | Mapping | None):
        rule, remedy = "has one for each training sample", "pass a loader as eval_dataset"
        raise ConfigError("planned.masks", type(masks).__name__, rule, remedy)
    return {name: value for name, value in options.items() if name not in ("sampler", "lengths")}


def _name(cls: type) -> tuple[str, str]:
    """The top package and the name of a class."""
    return cls.__module__.partition(".")[0], cls.__name__


class _EpochData:
    """Epochs as a map-style dataset for Trainer and accelerate: `[number]` is a batch. Batches come in the loader's
    order; its state, and not the number, determines where a resumed epoch begins."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches = iter(self.epochs)
        try:
            yield from ([number] for number in range(len(self)))
        finally:
            batches.close()

    def __getitem__(self, number: int) -> dict[str, Any]:
        batch = next(self._batches)
        batch.check_unweighted("the model's own loss")
        return inputs(batch)
