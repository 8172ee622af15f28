"""Rank pool jobs with TorchTitan: its own trainer on a tiny model, with plans or its own attention."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from tests.adapters import titan_alone  # before torchtitan

# isort: split
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import deepseek_v3, gpt_oss, llama3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.trainer import Trainer

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.ir.request.cluster import Cluster
from apportion.trainer.torchtitan import planned
from tests.adapters.documents import VOCABULARY, documents, packed
from tests.ranks.loading import HereSource

TOKENS, SEED, DIM, WINDOW = 128, 3, 32, 7
ROPE = {"dim": 8, "max_seq_len": 1024, "theta": 10000.0}


class NoTokenizer(BaseTokenizer):
    """A tokenizer for documents that are already tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return ""

    def get_vocab_size(self) -> Any:
        return VOCABULARY


class PackedDataLoader(BaseDataLoader):
    """Loads the same microbatches for Titan's own attention in one process."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        microbatches: int = 1
        infinite: bool = True

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.taken = config, 0

    def __iter__(self) -> Iterator[Any]:
        epochs = 10 if self.config.infinite else 1
        for tokens, positions, labels in packed(
            documents(), TOKENS, self.config.microbatches, SEED, epochs=epochs
        ):
            yield {"input": tokens[None], "positions": positions[None]}, labels[None]

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def llama(backend: Any, count: int) -> Any:
    layers = llama3._build_llama3_layers(
        n_layers=count,
        dim=DIM,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=64,
        rope=ComplexRoPE.Config(**ROPE, scaling="llama"),
        attn_backend=backend,
    )
    model = llama3.Llama3Model.Config(**_around(llama3, layers))
    return replace(llama3.model_registry("debugmodel", attn_backend=backend), model=model)


def gptoss(backend: Any, count: int) -> Any:
    layers = gpt_oss._build_gptoss_layers(
        n_layers=count,
        dim=DIM,
        hidden_dim=32,
        num_experts=4,
        top_k=2,
        load_balance_coeff=None,  # would also count padding, which is routed too
        attn_backend=backend,
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(**{**ROPE, "dim": 64}),
    )
    small = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "dim": DIM, "attn_backend": backend}
    for number, layer in enumerate(layers):
        window = WINDOW if layer.attention.sliding_window_size else None
        attention = {"layer_id": number, "sliding_window_size": window, "rope": layer.attention.rope}
        layer.attention = gpt_oss._make_gptoss_attn_config(**small, **attention)
    model = gpt_oss.GptOssModel.Config(**_around(gpt_oss, layers))
    return replace(gpt_oss.model_registry("debugmodel", attn_backend=backend), model=model)


def _around(module: Any, layers: int) -> Any:
    return {
        "dim": DIM,
        "vocab_size": VOCABULARY,
        "tok_embeddings": Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=module._EMBEDDING_INIT
        ),
        "norm": RMSNorm.Config(normalized_shape=DIM, param_init=module._NORM_INIT),
        "lm_head": Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=module._output_linear_init(DIM)
        ),
        "layers": layers,
    }


def deepseek(backend: Any, count: int) -> Any:
    """Multi-head latent attention."""
    return deepseek_v3.model_registry("debugmodel", attn_backend=backend)


def multi_token(backend: Any, count: int) -> Any:
    """A model with multi-token prediction and Llama's layers."""
    spec = llama(backend, count)
    parts = {one.name: getattr(spec.model, one.name) for one in fields(llama3.Llama3Model.Config)}
    model = deepseek_v3.MTPDecoder.Config(**parts, mtp_layers=spec.model.layers[:1])
    return replace(spec, model=model)


class OwnFlex(FlexAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 0.5


class OwnBlock(Llama3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        pass

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x + 0.5 * (super().forward(x, *args, **kwargs) - x)


class OwnModel(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 0.5


class OwnMasks(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def get_attention_masks(self, positions: Any) -> Any:
        return super().get_attention_masks(positions // 2)


def with_own(part: Any, backend: Any, count: int) -> Any:
    """Llama with a part of the user's own."""
    spec = llama(backend, count)
    if issubclass(part, Llama3Model):
        return replace(spec, model=derive(spec.model, part.Config))
    for layer in spec.model.layers:
        if part is OwnFlex:
            layer.attention.inner_attention = part.Config()
    if part is OwnBlock:
        spec.model.layers = [derive(layer, part.Config) for layer in spec.model.layers]
    return spec


def of_two_windows(backend: Any, count: int) -> Any:
    spec = gptoss(backend, count)
    for number, layer in enumerate(spec.model.layers):
        layer.attention.sliding_window_size = WINDOW + number
    return spec


def with_lora(backend: Any, count: int) -> Any:
    spec = llama(backend, count)
    targets = ["wq", "wkv", "wo"]
    return replace(
        spec, model=LoRAConverter.Config(rank=4, target_modules=targets).build().convert(spec.model)
    )


MODELS = {"llama": llama, "lora": with_lora, "gpt_oss": gptoss, "deepseek": deepseek, "ahead": multi_token}
MODELS |= {part.__name__: partial(with_own, part) for part in (OwnFlex, OwnBlock, OwnModel, OwnMasks)}
MODELS["windows"] = of_two_windows
CHECKPOINTS = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


@dataclass(frozen=True)
class Case:
    model: str = "llama"
    backend: str = "flex"
    layers: int = 2
    steps: int = 3
    microbatches: int = 1
    dtype: str = "float32"
    checkpoint: str = "none"
    chunked: bool = True
    tp: int = 1
    pp: int = 1
    spmd: str = "partial_dtensor"  # spmd_types needs a torch after 2.13
    validate: bool = False
    folder: str = ""
    last_step: int = -1  # ends the process after this step and its checkpoint
    fault: str = ""  # "own": a layer's attention is not planned; "bypass": a layer bypasses it
    changes: dict = field(default_factory=dict)  # of fields of the config, by section
    ping_pong: bool = False
    ticks: int = 0  # chunks per stage, if all stages compute each tick's attention


def own_config(case: Any, ranks: int) -> Any:
    """A config of Titan's own trainer on packed microbatches."""
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return Trainer.Config(
        model_spec=MODELS[case.model](case.backend, case.layers),
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if case.chunked else loss,
        tokenizer=NoTokenizer.Config(),
        dump_folder=case.folder or "/nowhere",
        optimizer=default_adamw(lr=1e-3, eps=1e-5),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=ranks // case.tp // case.pp * case.microbatches // (1 + case.ping_pong),
            seq_len=64,
            steps=case.steps,
            mixed_precision_param=case.dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=case.tp,
            pipeline_parallel_degree=case.pp,
            pipeline_parallel_schedule="1F1B" if case.ticks < 2 else "Interleaved1F1B",
            spmd_backend=case.spmd,
        ),
        dataloader=PackedDataLoader.Config(microbatches=case.microbatches),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=CHECKPOINTS[case.checkpoint],
        checkpoint=CheckpointManager.Config(enable=bool(case.folder), interval=1, last_save_model_only=False),
        validator=Validator.Config(
            enable=case.validate, freq=2, steps=-1, dataloader=PackedDataLoader.Config()
        ),
        debug=DebugConfig(seed=1),
    )


def planned_config(case: Any, ranks: int) -> Any:
    """A config of the planned trainer."""
    config = own_config(case, ranks)
    cluster = Cluster(1, ranks // case.tp // case.pp)
    held_out = "documents.documents" if case.validate else None
    records = {"tokens_per_rank": TOKENS // cluster.ranks, "microbatches": case.microbatches, "seed": SEED}
    records |= {"ping_pong": case.ping_pong, "ticks": case.ticks}
    config = planned(config, held_out, dataset="documents.documents", source=HereSource(), **records)
    for section, changes in case.changes.items():
        setattr(config, section, replace(getattr(config, section), **changes))
    return config


@torch.no_grad()
def same_weights(parts: Any) -> None:
    """Sets the same weights on any mesh; Titan's random numbers on CPUs depend on the mesh."""
    for name, parameter in (pair for part in parts for pair in part.named_parameters()):
        if "norm" in name:
            continue
        seed = zlib.crc32(name.replace("_checkpoint_wrapped_module.", "").encode())
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 6
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.copy_(full)


def train(comm: Communicator, own: Any, case: Any) -> Any:
    """Loss and gradient norm of each step, with validation losses, and this rank's number of communication rounds."""
    titan_alone.own_attention()
    os.environ["LOCAL_RANK"] = "0"
    torch.autograd.set_multithreading_enabled(False)  # as Titan does when it initialises torch.distributed
    config = (own_config if own else planned_config)(case, comm.ranks)
    trainer, records, rounds = config.build(), [], []
    trainer.metrics_processor.log = lambda step, loss, top, norm, extra_metrics: records.append((loss, norm))
    trainer.metrics_processor.log_validation = lambda loss, step: records.append(("validation", loss))
    trainer.should_continue_training = partial(_should_continue, trainer, case)
    same_weights(trainer.model_parts)
    original_batch = Communicator.batch
    Communicator.batch = lambda *arguments: (rounds.append(1), original_batch(*arguments))[1]
    try:
        trainer.train()
    finally:
        Communicator.batch = original_batch
        trainer.close()
    return records, len(rounds)


def _should_continue(trainer: Any, case: Any) -> Any:
    if trainer.step == case.last_step:
        torch.distributed.barrier()  # until all have saved
        os.kill(os.getpid(), signal.SIGKILL)
    return trainer.step < case.steps


def refusal(comm: Communicator, case: Any) -> Any:
    """The error for a config; "" if there is none."""
    os.environ["LOCAL_RANK"] = "0"
    config = planned_config(case, comm.ranks)
    if case.fault == "own":
        config.model_spec.model.layers[1].attention.inner_attention = ScaledDotProductAttention.Config()
    try:
        trainer = config.build()
        if case.fault == "bypass":
            titan_alone.own_attention()
            trainer.model_parts[0].layers["1"].attention.inner_attention.forward = lambda q, *_, **arguments: (
                q
            )
            trainer.train()
        trainer.close()
    except ApportionError as error:
        return str(error)
    return ""
