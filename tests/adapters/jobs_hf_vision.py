"""Tiny vision-language models of transformers, on ranks of the pool and in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.trainer import hf, hf_vision
from tests.ranks.loading import HereSource

IMAGE, CHANNELS, PATCH, MERGE = 60, 3, 2, 2
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
#: tokens of each sample; for each image its sample, first token and patch grid (t, h, w)
LENGTHS = [40, 9, 60, 25, 33, 20]
IMAGES = [(0, 3, (1, 6, 8)), (0, 20, (1, 10, 4)), (2, 0, (1, 12, 12)), (2, 40, (1, 4, 4)), (4, 30, (1, 2, 4))]
GRIDS = [grid for *_, grid in IMAGES]


def new_model(name: str) -> Any:
    torch.manual_seed(0)
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "in_channels": CHANNELS,
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT, vision_config={**vision, "spatial_merge_size": MERGE, **VISION[name]}, **ids
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double()
    for one in model.parameters():  # biases and norms too
        one.data += 0.1 * torch.randn(one.shape, dtype=one.dtype)
    return model


def patches(image: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(image)
    return torch.randn(int(np.prod(GRIDS[image])), CHANNELS * PATCH**2, generator=draw, dtype=torch.float64)


class Images:
    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": patches(index)}


class Samples:
    lengths = LENGTHS

    def __init__(self, model: Any) -> None:
        self._model = model

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(1, 59, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))
        own = [one for one in IMAGES if one[0] == index]
        for _, first, grid in own:
            tokens[first : first + int(np.prod(grid)) // MERGE**2] = IMAGE
        labels = tokens.masked_fill(tokens == IMAGE, -100)
        positions = hf_vision.mrope(self._model, tokens, [grid for *_, grid in own])
        return {"input_ids": tokens, "labels": labels, "mrope_position_ids": positions}


def reference(name: str, samples: Sequence[int] = range(len(LENGTHS))) -> tuple[float, dict[str, Any]]:
    """Loss and gradients in one process, sample by sample, with the model's own forward."""
    model, total = new_model(name), 0.0
    model.set_attn_implementation("sdpa")
    data = Samples(model)
    valid = sum(int((data[i]["labels"][1:] >= 0).sum()) for i in samples)
    for i in samples:
        own = [n for n, one in enumerate(IMAGES) if one[0] == i]
        tokens, labels = (data[i][field][None] for field in ("input_ids", "labels"))
        inputs = {"input_ids": tokens, "labels": labels, "num_items_in_batch": valid, "use_cache": False}
        if own:
            inputs["pixel_values"] = torch.cat([patches(n) for n in own])
            inputs["image_grid_thw"] = torch.tensor([GRIDS[n] for n in own])
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        loss = model(**inputs).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def loader(comm: Communicator, model: Any, **changes: Any) -> Any:
    images = hf_vision.media(Images(), model, GRIDS, [one[:2] for one in IMAGES], recipe="blend")
    options = {"media": images, "recipe": "blend", "shuffle": False, "source": HereSource(), **changes}
    size = -(-sum(LENGTHS) // comm.ranks)
    return hf.loader(
        Samples(model),
        model,
        cluster=ap.Cluster(1, comm.ranks),
        tokens_per_rank=size,
        communicator=comm,
        **options,
    )


def loss_of(comm: Communicator, model: Any) -> float:
    """This rank's share of the loss of an enabled model."""
    (batch,) = loader(comm, model)
    return float(model(**hf.inputs(batch)).loss.detach())


def planned(comm: Communicator, name: str, checkpointing: bool) -> tuple[float, dict[str, Any]]:
    """This rank's loss and gradients under plans."""
    model = hf.enable(new_model(name))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    (batch,) = loader(comm, model)
    loss = model(**hf.inputs(batch)).loss
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: Any) -> dict[str, Any]:
    return {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


def text_only(comm: Communicator) -> tuple[float, dict[str, Any]]:
    """This rank's loss and gradients for samples without images."""
    model = hf.enable(new_model("Qwen2VL"))
    (batch,) = loader(comm, model, sampler=[[1, 3, 5]])
    assert batch.media is None
    loss = model(**hf.inputs(batch)).loss
    loss.backward()
    return loss.item(), gradients(model)


#: answers to a prompt with an image, which fold into one tree
ROLLOUTS = [[1, 2, *[IMAGE] * 16, 3, 4, *range(5, 25)], [1, 2, *[IMAGE] * 16, 3, 4, *range(30, 44)]]


def tree_reference(name: str) -> dict[str, Any]:
    """Gradients of the answers' log-probabilities in one process, rollout by rollout."""
    model = new_model(name)
    for rollout in ROLLOUTS:
        ids = torch.tensor(rollout)
        images = {"pixel_values": tree_image(), "image_grid_thw": torch.tensor([[1, 8, 8]])}
        kinds = (ids == IMAGE).int()[None]
        logits = model(input_ids=ids[None], mm_token_type_ids=kinds, use_cache=False, **images).logits[0]
        logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[19:].sum().backward()
    return gradients(model)


def tree_image() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(64, CHANNELS * PATCH**2, generator=draw, dtype=torch.float64)


def tree(comm: Communicator, name: str, is_passed: bool) -> dict[str, Any] | str:
    """This rank's gradients if the rollouts are one tree, or the error. is_passed: positions follow the tree."""
    model, forest = hf.enable(new_model(name)), ap.trees.fold(ROLLOUTS)
    positions = hf_vision.mrope(model, forest[0], [(1, 8, 8)], forest.masks[0] if is_passed else None)
    images = hf_vision.media([{"pixel_values": tree_image()}], model, [(1, 8, 8)], [(0, 2)])
    options = {"media": images, "lengths": forest.lengths, "masks": forest.masks, "source": HereSource()}
    samples = [{"input_ids": forest[0], "mrope_position_ids": positions}]
    planned = hf.loader(samples, model, ap.Cluster(1, comm.ranks), 32, communicator=comm, **options)
    try:
        (batch,) = planned
    except ap.ApportionError as error:
        return str(error)
    mask = [torch.arange(len(rollout)) >= 20 for rollout in ROLLOUTS]
    predictions = ap.trees.unfold(forest, batch, mask)
    predictions.log_probs(model(**hf.inputs(batch)).logits).sum().backward()
    return gradients(model)


def refusals(comm: Communicator) -> list[str]:
    """Errors for inputs and models that would change the result."""
    model = hf.enable(new_model("Qwen2VL"))
    errors = []

    def fails(run: Callable[[], Any]) -> None:
        try:
            run()
        except ap.ApportionError as error:
            errors.append(str(error))

    (batch,) = loader(comm, model, recipe="ring")
    other_fields = {name: one for name, one in batch.fields.items() if name != "mrope_position_ids"}
    fails(lambda: hf.inputs(replace(batch, fields=other_fields)))
    inputs = hf.inputs(batch)
    fails(lambda: model(**hf.inputs(replace(batch, media=None, feed=None))))
    fails(lambda: model(**{**inputs, "input_ids": inputs["input_ids"].clamp(max=1)}))
    model.model.visual.blocks[1].forward = lambda rows, **kwargs: rows
    fails(lambda: model(**inputs))
    return errors
