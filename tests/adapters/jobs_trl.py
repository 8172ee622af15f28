"""Rank pool jobs with trl's trainers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.utils import DataCollatorForChatML

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.request.hf_config import model_of
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer import hf
from apportion.trainer.hf_trainer import PlannedTrainer
from tests.adapters.jobs_hf import VOCABULARY, new_model
from tests.adapters.jobs_hf_trainer import SampleRecorder, set_rank_environment
from tests.ranks.loading import planning_of

SPECIAL = ["<pad>", "<eos>", "<unk>", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <eos> {% endgeneration %}"
    "{% else %}{{ message['content'] }} <eos> {% endif %}{% endfor %}"
)


class PlannedSFT(PlannedTrainer, SFTTrainer):
    """The trainer of docs/how-to/transformers.md."""


class PlannedDPO(PlannedTrainer, DPOTrainer):
    """A trainer that is refused: its loss is not a sum over tokens."""


class Batches(SFTTrainer):
    """trl's own trainer, with `groups` of samples of its prepared dataset as batches."""

    groups: Any = ()

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset
        batches = [self.data_collator([rows[i] for i in group]) for group in self.groups]
        return DataLoader(batches, batch_size=None, shuffle=False)


def tokenizer() -> Any:
    """Tokenizer with one token per word."""
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))]
    word_level = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    found = PreTrainedTokenizerFast(tokenizer_object=word_level, **names)
    found.chat_template = TEMPLATE
    return found


def words(seed: int, count: int) -> str:
    numbers = np.random.default_rng(seed).integers(0, VOCABULARY - len(SPECIAL), count)
    return " ".join(f"w{i}" for i in numbers)


def dataset(form: str, first: int = 0, count: int = 24) -> Any:
    """Samples of 8 to 60 words in a format that trl supports."""
    rows = list[Any]()
    for i in range(first, first + count):
        prompt, answered = words(2 * i, 4 + 7 * i % 30), words(2 * i + 1, 4 + 11 * i % 30)
        user, assistant = ({"role": r, "content": t} for r, t in (("user", prompt), ("assistant", answered)))
        rows.append(
            {
                "text": {"text": f"{prompt} {answered}"},
                "prompt": {"prompt": f"{prompt} ", "completion": answered},
                "chat": {"messages": [user, assistant, user, assistant]},
            }[form]
        )
    return Dataset.from_list(rows)


def config(folder: Path, kind: Any = SFTConfig, **options: Any) -> Any:
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=0.5,
        optim="sgd",
        num_train_epochs=1,
        save_strategy="no",
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        bf16=False,
        **options,
    )


def planned(comm: Communicator, model: Any, tokens: int = 150, microbatches: int = 2) -> Any:
    policy = Policy(find_recipe("fcp"))
    shape = replace(model_of(model.config.to_dict()), dtype="fp32")
    job = Job(ap.Cluster(1, comm.ranks), shape, policy, tokens // comm.ranks, microbatches)
    return planning_of(job, communicator=comm, dtype="fp32", shuffle=False)


def sft(comm: Communicator, folder: Path, form: str, options: Any) -> Any:
    """trl's logs of a planned run, and its samples per microbatch."""
    set_rank_environment(comm)
    model = hf.enable(new_model("llama"))
    trainer = PlannedSFT(
        model=model,
        args=config(folder, **options),
        train_dataset=dataset(form),
        processing_class=tokenizer(),
        planned=planned(comm, model),
    )
    recorder = SampleRecorder(trainer._loader(trainer.train_dataset, is_training=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*loss")
        trainer.train()
    return logged(trainer), recorder.samples


def sft_alone(comm: Communicator, folder: Path, form: str, options: Any, samples: Any) -> Any:
    """trl's logs of a run with its own attention on these samples."""
    trainer = Batches(
        model=new_model("llama"),
        args=config(folder, **options),
        train_dataset=dataset(form),
        processing_class=tokenizer(),
    )
    trainer.groups = samples
    trainer.train()
    return logged(trainer)


def logged(trainer: Any) -> Any:
    rows = trainer.state.log_history
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss")
    return {name: [row[name] for row in rows if name in row] for name in names}


def evaluation(comm: Communicator, folder: Path) -> Any:
    """Mean evaluation losses over tokens: two of a planned run, and one computed sample by sample."""
    set_rank_environment(comm)
    model = hf.enable(new_model("llama"))
    trainer = PlannedSFT(
        model=model,
        args=config(folder),
        train_dataset=dataset("prompt"),
        eval_dataset=dataset("prompt", 20, 7),
        processing_class=tokenizer(),
        planned=planned(comm, model, microbatches=2) | {"drop_last": False},
    )
    found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    rows, own = trainer.eval_dataset, new_model("llama").eval()
    with torch.no_grad():
        losses = [own(**one_sample(row), num_items_in_batch=1).loss.double() for row in rows]
    valid = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
    return found, float(sum(losses)) / valid


def one_sample(row: Any) -> Any:
    return {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}


def refusal(comm: Communicator, folder: Path, which: str) -> Any:
    """The error of a planned trainer with an unsupported loss, collator or dataset."""
    set_rank_environment(comm)
    model = hf.enable(new_model("llama"))
    common = {"model": model, "processing_class": tokenizer()}
    try:
        if which == "dpo":
            args = config(folder, DPOConfig)
            PlannedDPO(args=args, train_dataset=dataset("prompt"), planned={}, **common)
        elif which == "collator":  # removes labels of all messages except the last
            common |= {"planned": planned(comm, model), "data_collator": DataCollatorForChatML(tokenizer())}
            PlannedSFT(args=config(folder), train_dataset=dataset("chat"), **common).get_train_dataloader()
        else:
            data = hf.loader(ap.Samples([[1, 2]]), model, **planned(comm, model))
            PlannedSFT(args=config(folder), train_dataset=data, **common)
    except ConfigError as error:
        return str(error)


# ---- preference pairs


def pairs() -> Any:
    """Prompts, chosen and rejected answers, as trl tokenizes them."""
    rows = [
        {
            "prompt": words(3 * i, 5 + i) + " ",
            "chosen": words(3 * i + 1, 9 + 3 * i),
            "rejected": words(3 * i + 2, 12),
        }
        for i in range(6)
    ]
    return Dataset.from_list(rows)


def dpo_alone(comm: Communicator, folder: Path) -> Any:
    """Loss and gradients of trl's DPOTrainer on all pairs in one batch, and the token ids of its samples."""
    args = config(folder, DPOConfig, beta=0.3)
    common = {"train_dataset": pairs(), "processing_class": tokenizer()}
    trainer = DPOTrainer(model=new_model("llama"), ref_model=reference(), args=args, **common)
    rows = list(trainer.train_dataset)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    loss.backward()
    samples = [[row["prompt_ids"], row[name]] for row in rows for name in ("chosen_ids", "rejected_ids")]
    return loss.item(), gradients(trainer.model), samples


def reference() -> Any:
    model = new_model("llama").eval()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.7)
    return model


def gradients(model: Any) -> Any:
    return {name: value.grad.numpy() for name, value in model.named_parameters()}


def dpo(comm: Communicator, samples: Any) -> Any:
    """The step of docs/how-to/transformers.md; returns the loss and the gradients summed over ranks."""
    model, frozen = hf.enable(new_model("llama")), hf.enable(reference())
    forest = ap.trees.fold(
        [[*prompt, *answer] for prompt, answer in samples], groups=[i // 2 for i in range(12)]
    )
    is_learnt = [torch.arange(len(prompt) + len(answer)) >= len(prompt) for prompt, answer in samples]
    options = planned(comm, model, tokens=80, microbatches=8) | {"drop_last": False}
    total = torch.zeros(())
    for b in hf.loader(forest, model, **options):
        found = ap.trees.unfold(forest, b, is_learnt)
        log_probs = found.sums(found.log_probs(model(**hf.inputs(b)).logits))
        with torch.no_grad():
            reference_log_probs = found.sums(found.log_probs(frozen(**hf.inputs(b)).logits))
        chosen, rejected = found.pairs(log_probs - reference_log_probs)
        loss = -logsigmoid(0.3 * (chosen - rejected)).sum() / 6
        found.share(loss).backward()
        total += loss.detach()
    ap.sum_gradients(model)
    return total.item(), gradients(model)
