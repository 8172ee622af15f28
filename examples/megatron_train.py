"""Trains Megatron-Core's GPTModel on the bytes of Python files, with planned attention, on one GPU per rank or on CPUs.

torchrun --nproc-per-node 2 examples/megatron_train.py
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import apportion as ap

STEPS, MICROBATCHES, TOKENS_PER_RANK = 5, 2, 2048


class Files:
    """Map-style dataset: each file is a document; lengths are known in advance."""

    def __init__(self, folder: Path) -> None:
        self.documents = [
            np.frombuffer(path.read_bytes()[:4000], np.uint8) for path in sorted(folder.rglob("*.py"))
        ]
        self.lengths = [len(document) for document in self.documents]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[index].astype(np.int64)


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from apportion.trainer.megatron import endless, forward_step, planned_loader, planned_spec

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
    )
    spec = planned_spec(get_gpt_layer_local_spec())
    model = GPTModel(
        config, spec, vocab_size=256, max_sequence_length=4096, position_embedding_type="rope"
    ).cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    # Megatron clips only on GPUs
    rates = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(rates, [model])
    config.finalize_model_grads_func = finalize_model_grads
    ranks = ap.Cluster(nodes=1, ranks_per_node=dist.get_world_size())
    dataset = Files(Path(__file__).parent)
    loader = planned_loader(
        dataset, config, cluster=ranks, tokens_per_rank=TOKENS_PER_RANK, microbatches=MICROBATCHES
    )
    batches = endless(loader)
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS_PER_RANK,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        total = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step: {step + 1}  loss: {float(total[0] / total[1]):.5f}", flush=True)
    batches.close()


if __name__ == "__main__":
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        import megatron_cpu  # noqa: F401
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    main()
    dist.destroy_process_group()
