"""Vision encoders of transformers (Qwen2-VL, Qwen2.5-VL, Qwen3-VL): patches under their own plan.

    images ──media──► loader ──► batch.media ──inputs──► visual.patch_embed, blocks ──move_rows──► visual.merger
                                                                            rows of placeholder tokens ◄──┘

Blocks and mergers remain the model's; mergers run where the placeholder tokens are. Written for transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.compiler import is_compiling
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integers
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.specs import documents, full, slices
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.trainer.hf_recurrent import NAME
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.media import Media
from apportion.trainer.loading.rows import MROPE
from apportion.trainer.step.microbatch import require_calls
from apportion.trainer.step.moves import move_rows

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # supported `model_type`s
MEDIA = "apportion_media"  # kwarg: the feed, and the fields of patches
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")  # fields of configs
FULL, WINDOWS = "full", "windows"  # attention kinds of encoders with windows


def media(
    images: Any, model: Any, grids: ArrayLike, places: ArrayLike, *, dtype: str | None = None, **options: Any
) -> Media:
    """The `Media` of a model's encoder. images: map-style; image i has `pixel_values` [patches, ...] from the model's
    processor. grids: integers [images, 3], their `image_grid_thw`. places: sample and first placeholder
    token of each. dtype: see `hf.loader`. options: further options of `Media`. Raises ConfigError for other models."""
    config = _config(model).vision_config
    grid_rows = integers("grids", np.asarray(grids).ravel()).reshape(-1, 3)
    own_dtype = next(name for name, value in DTYPES.items() if value == model.dtype)
    width = getattr(config, "embed_dim", config.hidden_size)
    heads, layers = config.num_heads, config.depth
    full_layers = getattr(config, "fullatt_block_indexes", None)
    fields: dict[str, Any] = {
        "dataset": _Patches(images, grid_rows, config),
        "lengths": grid_rows.prod(1),
        "masks": [full() if t == 1 else documents([h * w] * t, full()) for t, h, w in grid_rows.tolist()],
    }
    if full_layers is not None:
        layers = {FULL: len({*full_layers}), WINDOWS: config.depth - len({*full_layers})}
        windows = [_windows(grid, config) for grid in grid_rows]
        kinds = zip(fields["masks"], windows, strict=True)
        fields["masks"] = [{FULL: mask, WINDOWS: _block_diagonal_mask(ends)} for mask, (_, ends) in kinds]
        fields["orders"] = [order for order, _ in windows]
    ffn = int(getattr(config, "intermediate_size", 0) or width * config.mlp_ratio)
    sizes = {"q_heads": heads, "kv_heads": heads, "head_dim": width // heads, "hidden": width, "ffn": ffn}
    encoder = Model(**sizes, dtype=dtype or own_dtype, layers=layers)
    return Media(**{**fields, **options}, model=encoder, places=places, merge=config.spatial_merge_size**2)


def mrope(model: Any, tokens: ArrayLike, grids: ArrayLike = (), mask: Mask | None = None) -> Tensor:
    """int64 [length, 3]: the field `mrope_position_ids` of a sample. tokens: [length]; grids: [images, 3], of its
    images in order; mask: of the sample if it is a tree, whose branches continue from their parents. Raises ConfigError
    if images have other numbers of placeholder tokens."""
    config, ids = _config(model), torch.as_tensor(tokens)
    image_grids = torch.as_tensor(grids, dtype=torch.int64).reshape(-1, 3)
    kinds = (ids == config.image_token_id).int()
    starts, parents, _ = Batch.from_lengths([len(ids)], mask).branches()
    owners = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(ids)))
    groups = groupby(zip(kinds.tolist(), owners.tolist(), strict=True))
    runs = [(owner, len([*run])) for (kind, owner), run in groups if kind]
    sizes = [size for _, size in runs]
    merged = image_grids.prod(1) // config.vision_config.spatial_merge_size**2
    if sizes != merged.tolist():
        rule = f"have {merged.tolist()} tokens, but the sample's placeholder tokens come in runs of {sizes}"
        raise ConfigError(
            "grids", image_grids.tolist(), rule, "pass those of the sample's own images, in order"
        )
    positions, images = torch.empty(len(ids), 3, dtype=torch.int64), [owner for owner, _ in runs]
    for branch in range(len(starts)):
        path = [branch]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        rows, seen = np.flatnonzero(np.isin(owners, path)), image_grids[np.isin(images, path)]
        along = model.base_model.get_rope_index(ids[rows][None], kinds[rows][None], seen)[0][:, 0].T
        positions[owners == branch] = along[owners[rows] == branch]
    return positions


def _config(model: Any) -> Any:
    if model.config.model_type not in TYPES:
        rule, remedy = f"is not one of {', '.join(TYPES)}", "create ap.Media, and run its encoder yourself"
        raise ConfigError("model_type", model.config.model_type, rule, remedy)
    return model.config


def _windows(grid: Ints, config: Any) -> tuple[Ints, Ints]:
    """The order of the merged tokens by window, and the ends of the windows, in patches."""
    sizes = config.spatial_merge_size, config.window_size, config.patch_size
    order, ends = get_vision_window_index(torch.as_tensor(grid)[None], *sizes)
    return order.numpy(), ends.numpy()


def _block_diagonal_mask(ends: Ints) -> Mask:
    """A mask in which rows between two consecutive ends see each other."""
    first, end = ends[:-1], ends[1:]
    return slices(np.stack([first, end, first, end, np.zeros_like(first)], 1))


@dataclass
class _Patches:
    """Patches of each image with the position data that layers need, in the order of windows if there are any."""

    images: Any
    grids: Ints
    config: Any

    def __len__(self) -> int:
        return len(self.grids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        config, grid = self.config, torch.as_tensor(self.grids[index])[None]
        image = self.images[index]
        own_grid = torch.as_tensor(image.get("image_grid_thw", grid)).view(1, 3)
        if not torch.equal(own_grid, grid):
            rule = f"was planned with the grid {grid[0].tolist()}"
            raise ConfigError(
                f"image {index}: image_grid_thw", own_grid[0].tolist(), rule, "plan with its own grid"
            )
        fields = {"patches": torch.as_tensor(image["pixel_values"])}
        fields["grid"] = get_vision_position_ids(grid, config.spatial_merge_size)
        if hasattr(config, "num_position_embeddings"):
            side = int(config.num_position_embeddings**0.5)
            taps = get_vision_interpolation_indices_and_weights(
                grid, side, "bilinear", True, config.spatial_merge_size
            )
            fields["taps"], fields["tap_weights"] = taps
        if hasattr(config, "fullatt_block_indexes"):
            order = torch.as_tensor(_windows(self.grids[index], config)[0])
            merge = config.spatial_merge_size**2
            reordered = {
                name: field.reshape(-1, merge, *field.shape[1:])[order] for name, field in fields.items()
            }
            fields = {name: field.flatten(0, 1) for name, field in reordered.items()}
        return fields


# ---- an enabled model


def adapt(model: Any) -> Iterator[Any]:
    """Makes the model's encoder run under a plan if a forward gets media. Yields its attention layers, if known."""
    base = model.base_model
    placeholders = {getattr(model.config, name, None) for name in _PLACEHOLDERS} - {None}
    if placeholders and not hasattr(base, "_placeholders"):
        base._placeholders = placeholders
        base.register_forward_pre_hook(_check_places, with_kwargs=True)
    if model.config.model_type not in TYPES or hasattr(base.visual, "_encodes"):
        return
    for module in base.visual.modules():
        module._encodes = True
    base.get_image_features = partial(_features, base)
    full_layers = getattr(base.visual, "fullatt_block_indexes", None)
    for number, block in enumerate(base.visual.blocks):
        layer, kind = block.attn, None if full_layers is None else FULL if number in full_layers else WINDOWS
        layer.layer_idx, layer._kind, layer._window, layer._served = f"visual {number}", kind, -1, set()
        yield layer


def arguments(batch: PlannedBatch) -> dict[str, Any]:
    """Kwargs of the model's forward in addition to those of text. Raises ConfigError for images without positions."""
    if batch.feed is not None and MROPE not in batch.fields:
        remedy = "add hf_vision.mrope(model, tokens, grids) to each sample"
        raise ConfigError(MROPE, None, "positions of images have rows and columns", remedy)
    result: dict[str, Any] = {}
    if MROPE in batch.fields:
        result["position_ids"] = batch.fields[MROPE].T[:, None]
    if batch.feed is not None and batch.media is not None:
        result |= {"pixel_values": batch.media.fields["patches"], MEDIA: (batch.feed, batch.media.fields)}
    return result


def _check_places(base: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises ConfigError unless the placeholder tokens are exactly the fed rows."""
    tokens, passed, handle = (kwargs.get(name) for name in ("input_ids", MEDIA, NAME))
    if tokens is None or not isinstance(handle, PlanHandle) or is_compiling():
        return
    is_placeholder = torch.isin(tokens[0], tokens.new_tensor([*base._placeholders]))
    rows = tokens.new_zeros(0) if passed is None else passed[0].rows.to(tokens.device)
    if not torch.equal(torch.nonzero(is_placeholder)[:, 0], rows):
        rule = f"has {int(is_placeholder.sum())} placeholder tokens on this rank, but media are at {len(rows)} rows"
        remedy = f"give the loader media at these tokens ({', '.join(TYPES)}), or the model inputs_embeds"
        raise ConfigError("input_ids", "placeholder tokens", rule, remedy)


def _features(base: Any, pixel_values: Tensor, image_grid_thw: Any = None, **kwargs: Any) -> Any:
    """Replaces the model's own method: pixel_values of this rank's patches -> rows of its placeholder tokens."""
    if kwargs.get(MEDIA) is None:
        return type(base).get_image_features(base, pixel_values, image_grid_thw, **kwargs)
    (feed, fields), visual = kwargs[MEDIA], base.visual
    rows = visual.patch_embed(pixel_values.to(visual.dtype))
    if "taps" in fields:
        taps = visual.pos_embed(fields["taps"]) * fields["tap_weights"][:, :, None]
        rows = rows + taps.sum(1).to(rows.dtype)
    options = {"cu_seqlens": torch.tensor([0, len(rows)]), "max_seqlen": len(rows), NAME: feed.encoder}
    options["position_embeddings"] = visual.rotary_pos_emb(rows, fields["grid"])
    calls, deep = feed.encoder.calls, [*getattr(visual, "deepstack_visual_indexes", ())]
    outputs: dict[int, Any] = {}
    for number, block in enumerate(visual.blocks):
        rows = block(rows, **options)
        if number in deep:
            merger = visual.deepstack_merger_list[deep.index(number)]
            outputs[number] = (merger(move_rows(rows, feed)),)
    require_calls(feed.encoder, calls, len(visual.blocks), "the encoder's attention was replaced")
    merged = visual.merger(move_rows(rows, feed))
    return SimpleNamespace(pooler_output=(merged,), deepstack_features=[outputs[number] for number in deep])
