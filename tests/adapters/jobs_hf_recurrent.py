"""Rank pool jobs with models of transformers that have recurrent layers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

import apportion as ap
from apportion.ir.bytes.job import Job
from apportion.ir.request.batch import Batch
from apportion.ir.request.hf_config import model_of
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer import hf
from tests.ranks.loading import planning_of

VOCABULARY, DOCUMENTS = 64, (50, 1, 23, 9)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "max_position_embeddings": 256,
}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GATED_DELTANET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
#: class -> (config, fields)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": ("Qwen3NextConfig", {**LAYERS, **GATED_DELTANET, "mlp_only_layers": [0, 1, 2]}),
    "Qwen3_5": ("Qwen3_5TextConfig", {**LAYERS, **GATED_DELTANET}),
    "OlmoHybrid": ("OlmoHybridConfig", {**LAYERS, **GATED_DELTANET}),
    "KimiLinear": (
        "KimiLinearConfig",
        {**LAYERS, **MLA, "mlp_layer_types": ["dense"] * 3, "linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "NemotronH": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
        },
    ),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {**LAYERS, **MAMBA, **EXPERTS, "shared_intermediate_size": 32},
    ),
    "Bamba": ("BambaConfig", {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA}),
    "FalconH1": ("FalconH1Config", {"num_hidden_layers": 2, **MAMBA, "mamba_d_ssm": 64}),
    "MiniMax": ("MiniMaxConfig", {**LAYERS, **EXPERTS, "block_size": 16}),
}


def new_model(name: str, **changes: Any) -> Any:
    """A small float64 model of this class, identical on all ranks."""
    own, fields = MODELS[name]
    form = getattr(transformers, own)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or hasattr(form(), "head_dim")}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # tables of decays use it, too
    config = form(**{**sizes, **fields, **changes})
    config._experts_implementation = "eager"  # grouped matrix products do not support float64
    model = getattr(transformers, f"{name}ForCausalLM")(config).train().double()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if not key.endswith(("A_log", "dt_bias", "D")):
                value.normal_(std=0.2)
    return model


class Wide:
    """Stands for torch with float64 as its float32, since models compute some values in float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide(model: Any) -> Iterator[None]:
    """Runs a model in float64 throughout."""
    homes = {sys.modules[type(one).__module__] for one in model.modules()}
    homes = {home for home in homes if home.__name__.startswith("transformers.models")}
    own = torch.Tensor.float
    try:
        torch.Tensor.float = torch.Tensor.double
        for home in homes:
            home.__dict__["torch"] = Wide()
        yield
    finally:
        torch.Tensor.float = own
        for home in homes:
            home.__dict__["torch"] = torch


def by_documents(name: str, batch: Batch, tokens: Any, grad: Any) -> tuple[Any, dict[str, Any]]:
    """Logits of all tokens and gradients, by the model's own code on each document and tree path separately."""
    starts, parents, _ = batch.branches()
    ends = np.append(starts[1:], batch.tokens)
    model = new_model(name)
    parts = []
    with wide(model):
        for number in range(len(starts)):
            above, path = number, []
            while above >= 0:
                path = [*range(starts[above], ends[above]), *path]
                above = int(parents[above])
            out = model(input_ids=torch.from_numpy(tokens[path])[None], use_cache=False).logits[0]
            parts.append(out[len(path) - int(ends[number] - starts[number]) :])
        logits = torch.cat(parts)
        (logits * torch.from_numpy(grad)).sum().backward()
    return logits.detach().numpy(), gradients(model)


def gradients(model: Any) -> dict[str, Any]:
    return {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}


def planned(comm: Any, name: str, given: Any) -> tuple[Any, Any]:
    """Logits of this rank's rows, and gradients summed over ranks. given: encoded slice, (tokens, gradient of logits)
    of the whole batch, whether to checkpoint, padding rows."""
    data, rows, checkpointing, padding = given
    handle = ap.PlanHandle(ap.Slice.decode(data), comm, padding=padding)
    tokens, grad = (torch.from_numpy(one)[handle.tokens] for one in rows)
    model = hf.enable(new_model(name))
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, places = (torch.nn.functional.pad(one, (0, padding)) for one in (tokens, handle.position_ids))
    named = {"input_ids": ids[None], "position_ids": places[None], "use_cache": False}
    with wide(model):
        last = places.new_tensor([len(rows[0])])
        logits = model(**named, **{hf.NAME: handle, hf.LAST: last}).logits[0, : handle.rows]
        (logits * grad).sum().backward()
    for value in model.parameters():
        if value.grad is not None:
            dist.all_reduce(value.grad, group=comm._groups[0])
    return logits.detach().numpy(), gradients(model)


def step(comm: Any, name: str, under_plan: bool) -> tuple[float, list[float]]:
    """Loss and gradient norms of one microbatch of a loader, under a plan or document by document."""
    documents = [
        np.random.default_rng(n).integers(0, VOCABULARY, length) for n, length in enumerate(DOCUMENTS)
    ]
    model = new_model(name).float()
    if under_plan:
        options = {"shuffle": False, "rows_multiple": 8}
        batch = next(iter(loader(comm, hf.enable(model), documents, sum(DOCUMENTS), **options)))
        loss = model(**hf.inputs(batch)).loss
    else:
        valid = sum(len(ids) - 1 for ids in documents)
        rows = [torch.from_numpy(ids)[None] for ids in documents]
        named = {"num_items_in_batch": valid, "use_cache": False}
        losses = [model(input_ids=ids, labels=ids, **named).loss for ids in rows if ids.numel() > 1]
        loss = torch.stack(losses).sum()
    loss.backward()
    total = loss.detach().double()
    for one in (total, *(value.grad for value in model.parameters() if value.grad is not None)):
        dist.all_reduce(one, group=comm._groups[0])
    return float(total), [float(value.grad.norm()) for value in model.parameters() if value.grad is not None]


def loader(comm: Any, model: Any, documents: list[Any], tokens: int, **options: Any) -> Any:
    """A loader of microbatches with about this many tokens over all ranks."""
    shape, policy = model_of(model.config.to_dict()), Policy(find_recipe("fcp"))
    given = Job(ap.Cluster(1, comm.ranks), shape, policy, tokens // comm.ranks + 1, 1)
    return hf.loader(DocumentList(documents), model, **planning_of(given), communicator=comm, **options)


def loss_of(comm: Any, model: Any) -> float:
    """This rank's share of the loss of an enabled model."""
    documents = [np.arange(length) % VOCABULARY for length in (40, 9, 23)]
    batch = next(iter(loader(comm, model, documents, 72)))
    return float(model(**hf.inputs(batch)).loss.detach())


class TrainingLoop:
    """A training loop as documented: a float32 model, AdamW, a loader. saved: the state to resume from."""

    def __init__(self, comm: Any, name: str, saved: bytes | None = None) -> None:
        self.comm, self.model = comm, hf.enable(new_model(name).float())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        lengths = np.random.default_rng(7).integers(5, 40, 12)
        documents = [np.random.default_rng(n).integers(0, VOCABULARY, lengths[n]) for n in range(12)]
        self.loader = loader(comm, self.model, documents, 64)
        if saved is not None:
            for own, state in zip(self._parts, torch.load(io.BytesIO(saved)), strict=True):
                own.load_state_dict(state)

    @property
    def _parts(self) -> list[Any]:
        return [self.model, self.optimizer, self.loader]

    def run(self, steps: int) -> tuple[list[float], bytes]:
        """Trains; returns losses and the state to save."""
        losses = []
        for batch in self.loader:
            loss = self.model(**hf.inputs(batch)).loss
            loss.backward()
            for value in self.model.parameters():
                if value.grad is not None:
                    dist.all_reduce(value.grad, group=self.comm._groups[0])
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
        buffer = io.BytesIO()
        torch.save([own.state_dict() for own in self._parts], buffer)
        return losses, buffer.getvalue()


def resumed_training(comm: Any, name: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of an uninterrupted pass and of a resumed one, and the names of weights that differ afterwards."""
    whole = TrainingLoop(comm, name)
    first_losses, saved = TrainingLoop(comm, name).run(2)
    resumed_loop = TrainingLoop(comm, name, saved)
    losses, parts = whole.run(9)[0], first_losses + resumed_loop.run(9)[0]
    pairs = zip(whole.model.named_parameters(), resumed_loop.model.parameters(), strict=True)
    return losses, parts, [name for (name, value), other in pairs if not torch.equal(value, other)]


class DocumentList:
    """A dataset of these documents."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.lengths = documents, [*map(len, documents)]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        return self.documents[index]
