"""Trains a small Llama with Hugging Face's Trainer on planned batches.

    torchrun --nproc-per-node 2 examples/hf_train.py

With --resume it continues a run that was killed. Start it with torchrun even for one process.
"""

import sys
import time

import numpy as np
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import apportion as ap
from apportion.trainer import hf
from apportion.trainer.hf_trainer import PlannedTrainer


class Documents:
    """Documents that count up from different starts, so that the next token can be learnt."""

    def __init__(self, count: int, seed: int) -> None:
        self.lengths = np.random.default_rng(seed).geometric(0.01, count).clip(2, 500)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return (7 * index + np.arange(self.lengths[index])) % 256


def main(folder: str = "hf-checkpoints") -> None:
    set_seed(0)
    args = TrainingArguments(
        folder,
        num_train_epochs=2,
        learning_rate=3e-3,
        gradient_accumulation_steps=2,
        logging_steps=5,
        eval_strategy="epoch",
        save_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )  # joins torch.distributed
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = hf.enable(LlamaForCausalLM(config))
    options = {"cluster": ap.Cluster(1, dist.get_world_size()), "tokens_per_rank": 512}
    trainer = PlannedTrainer(
        model,
        args,
        train_dataset=hf.loader(Documents(240, seed=0), model, microbatches=2, **options),
        eval_dataset=hf.loader(Documents(20, seed=1), model, drop_last=False, **options),
    )
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)


if __name__ == "__main__":
    main()
    time.sleep(1)  # gloo's thread may still hold the last tensors, and would abort if Python ended now
    dist.destroy_process_group()
