"""Runs an example of docs/how-to in one process, with its trainer's own attention, on the documents of planned runs:

torchrun --nproc-per-node 1 tests/adapters/example_alone.py hf|titan|megatron
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path += [str(ROOT), str(EXAMPLES), str(EXAMPLES / "titan")]


def hf() -> None:
    import hf_train

    from apportion.ir.request.sampling import Sampling
    from tests.adapters import jobs_hf
    from tests.adapters.jobs_hf_trainer import Plain

    def packs(
        documents: Any, model: Any, microbatches: int = 1, tokens_per_rank: Any = 512, **options: Any
    ) -> Any:
        iterations = list(Sampling(documents.lengths, 2 * tokens_per_rank, microbatches, 0).epoch(0))
        whole = [iteration for iteration in iterations if len(iteration) == microbatches]
        return [jobs_hf.packed(documents, group, None) for iteration in whole for group in iteration]

    hf_train.hf.enable, hf_train.hf.loader, hf_train.PlannedTrainer = (lambda model: model), packs, Plain
    arguments = hf_train.TrainingArguments
    hf_train.TrainingArguments = lambda *positional, **named: arguments(
        *positional, **{**named, "eval_strategy": "no"}
    )
    hf_train.main()


def titan() -> None:
    from tests.adapters import titan_alone

    titan_alone.own_attention(titan_alone.causal_flex)
    from torchtitan.train import main

    sys.argv += ["--module", "example_alone_titan", "--config", "own_tiny"]
    main()


def megatron() -> None:
    import megatron_train

    from apportion.trainer import megatron
    from tests.adapters import jobs_megatron
    from tests.adapters.documents import packed

    def packs(dataset: Any, config: Any, *, cluster: Any, tokens_per_rank: Any, microbatches: int) -> Any:
        return packed(dataset, 2 * tokens_per_rank, microbatches, seed=0, multiple=1)

    megatron.planned_loader, megatron.forward_step = packs, jobs_megatron.own_step
    megatron.planned_spec, megatron.endless = (lambda spec: spec), (lambda batches: batches)
    dist.init_process_group("gloo")
    megatron_train.main()


if __name__ == "__main__":
    {"hf": hf, "titan": titan, "megatron": megatron}[sys.argv.pop(1)]()
    if dist.is_initialized():
        dist.destroy_process_group()
