"""Rank pool jobs with models of transformers that select keys at run time."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.trainer import hf_sparse

LENGTHS = [40, 1, 57, 23]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 16,  # enough that no two rows score 0
    "index_head_dim": 8,
    "index_topk": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Documents:
    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Draws no padding tokens, whose zero embeddings would give all keys equal scores."""
        return torch.randint(1, 64, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))


def new_model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the only one that supports float64
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def reference(name: str, implementation: str) -> tuple[float, list[Any]]:
    """Loss and gradients of the model's own forward on all documents, with the batch's mask."""
    model = new_model(name, implementation)
    tokens = torch.cat([Documents()[i] for i in range(len(LENGTHS))])
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (number[:, None] == number).tril()
    hidden = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    labels = torch.cat([torch.cat([Documents()[i][1:], torch.tensor([-100])]) for i in range(len(LENGTHS))])
    loss = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask={"indexed_attention": hidden[None, None]},
        labels=labels[None],
        shift_labels=labels[None],
        num_items_in_batch=int((labels >= 0).sum()),
        use_cache=False,
    ).loss
    loss.backward()
    return loss.item(), gradients(model)


def planned(
    comm: Communicator, name: str, implementation: str, shape: tuple[int, int]
) -> tuple[float, list[Any]]:
    """This rank's loss and gradients under a plan."""
    model = new_model(name, implementation)
    loader = ap.PlannedLoader(
        Documents(),
        ap.Cluster(*shape),
        hf_sparse.model_of(model.config, "fp64"),
        -(-sum(LENGTHS) // comm.ranks),
        shuffle=False,
        rows_multiple=4,
        recipe="mixed",
        communicator=comm,
    )
    (batch,) = loader
    loss = model(**hf_sparse.inputs(batch, model)).loss
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: Any) -> list[Any]:
    """The gradient of each parameter, 0.0 if it has none."""
    return [0.0 if one.grad is None else one.grad.numpy() for one in model.parameters()]


def refusals(comm: Communicator) -> list[str]:
    """Errors for a skipped layer and for gradient checkpointing, which would change the result."""
    model, errors = new_model("DeepseekV32", "eager"), []
    loader = ap.PlannedLoader(
        Documents(),
        ap.Cluster(1, comm.ranks),
        hf_sparse.model_of(model.config, "fp64"),
        128,
        communicator=comm,
    )
    batch = next(iter(loader))
    inputs = hf_sparse.inputs(batch, model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    model.gradient_checkpointing_disable()
    for attempt in (lambda: model(**inputs), lambda: hf_sparse.inputs(batch, checkpointed(model))):
        try:
            attempt()
        except ap.ApportionError as error:
            errors.append(str(error))
    return errors


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model
