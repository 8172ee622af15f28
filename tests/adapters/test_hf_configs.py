"""Compares the configs of all causal language models of transformers, read as data, with models built from them.

Each config is tried as transformers saves it, with the defaults of its class, and bare, with only model type and sizes.
A model is built on the meta device and run once: `model_of` and `masks_of` must match the arguments of its attention
calls, or refuse the config and name a field.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from apportion.ir.errors import ConfigError
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.windows import Causal, Chunked, Full, SlidingWindow
from apportion.ir.request.hf_config import masks_of, model_of, vocabulary_fields
from apportion.ir.request.hf_layers import table
from apportion.ir.request.model import Model

SIZES = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: Arguments that classes need besides their defaults before a model can be built and run.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 1408},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
#: Classes whose defaults fail because of bugs in transformers.
BROKEN = {"cohere_compass_text", "dbrx"}
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
OLD = ("falcon", "git", "gpt_neo", "gptj")  # have their own tables in place of attention functions
FAR = 1 << 16

Seen = Counter[tuple[Mask, int, int, int, int]]  # mask, query heads, KV heads, head dims -> layers


@pytest.fixture(scope="module")
def calls() -> Iterator[list[tuple[Any, ...]]]:
    """Records the arguments of attention functions of models on the meta device."""
    found: list[tuple[Any, ...]] = []

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        rule = getattr(attention_mask, "rule", Causal())
        found.append((rule, query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        return query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3]), None

    def mask(*args: Any, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> Any:
        found = torch.empty(1, 1, 8, 8, device="meta")
        found.rule = mask_of_function(mask_function, local_size)  # type: ignore[attr-defined]
        return found

    ALL_ATTENTION_FUNCTIONS.register("seen", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("seen", mask)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # grouped products of experts take only this
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda *args, **kwargs: None)
        yield found
    torch.set_default_dtype(before)


def mask_of_function(function: Any, size: int | None) -> Mask:
    """The mask that a function of positions describes; one that needs tensor values, which meta tensors lack, is taken
    as chunked."""

    def is_visible(query: int, key: int) -> bool:
        return bool(function(0, 0, torch.tensor(query), torch.tensor(key)))

    try:
        sees_later = is_visible(1, 2)
        if size is None:
            return Full() if sees_later else Causal()
        first = next(back for back in (size - 1, size, size + 1) if not is_visible(FAR, FAR - back - 1))
        return SlidingWindow(first + 1, size if sees_later else 0)
    except NotImplementedError:
        assert size is not None
        return Chunked(size)


def build(config: Any, name: str) -> Any:
    config._attn_implementation = own = "eager" if config.model_type in OLD else "seen"
    with torch.device("meta"), transformers.initialization.no_init_weights():
        return getattr(transformers, name)._from_config(config, attn_implementation=own).eval()


def attention_calls(config: Any, name: str, calls: list[tuple[Any, ...]]) -> Seen | int:
    """The attention calls of the model's layers, or the number of layers if it calls no attention functions."""
    model = build(config, name)
    calls.clear()
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    except (NotImplementedError, RuntimeError, ValueError):  # needs tensor values
        calls.clear()
    return Counter(calls) if calls else sum(map(is_attention, model.modules()))


def is_attention(module: Any) -> bool:
    """Whether a module is attention itself, not a wrapper of it."""
    inner = [child for child in module.children() if "Attention" in type(child).__name__]
    return "Attention" in type(module).__name__ and not inner


def layers_read(model: Model, data: dict[str, Any]) -> Seen:
    keys = model.kv_heads if model.latent is None else model.q_heads  # expanded, without a plan
    masks, heads = masks_of(data), (model.q_heads, keys, model.head_dim, model.value_dim)
    if isinstance(masks, dict):
        return Counter({(mask, *heads): model.layers_of(kind) for kind, mask in masks.items()})
    assert isinstance(model.layers, int)
    return Counter({(masks or Causal(), *heads): model.layers})


def sizes_of(config: Any) -> dict[str, Any]:
    """`SIZES` under the config class's own field names, without those that it lacks."""
    fields = config.to_dict()
    pairs = (
        (field, next((n for n in (field, *table("aliases").get(field, ())) if n in fields), None))
        for field in SIZES
    )
    return {name: SIZES[field] for field, name in pairs if name is not None}


def config_and_file_of(kind: str, form: str) -> tuple[Any, dict[str, Any]]:
    """The config of a model type, None if its class refuses the sizes; and the config as data."""
    try:
        own = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
    except StrictDataclassClassValidationError:
        return None, {"model_type": kind, **SIZES}
    text = own.get_text_config(decoder=True)
    if form == "saved":
        return text, json.loads(json.dumps(own.to_dict(), default=str))
    sizes = sizes_of(text)
    with suppress(StrictDataclassClassValidationError, TypeError):
        return type(text)(**{**NEEDED.get(kind, {}), **sizes}), {"model_type": text.model_type, **sizes}
    return None, {"model_type": text.model_type, **sizes}


def check_config(kind: str, form: str, calls: list[tuple[Any, ...]]) -> str:
    """Returns `right`, or the field for which the config is refused. Fails if the model behaves differently."""
    config, data = config_and_file_of(kind, form)
    try:
        tied = vocabulary_fields(data, {"vocab"})["tied"]
        read = layers_read(model_of(data), data)
    except ConfigError as error:
        return error.field
    if kind in BROKEN:
        return "no model"
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    found = attention_calls(config, name if isinstance(name, str) else name[0], calls)
    assert found == (read.total() if isinstance(found, int) else read)
    assert tied == config.tie_word_embeddings
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["saved", "bare"])
def test_every_causal_config_is_read_correctly_or_refused_by_field(
    form: str, calls: list[tuple[Any, ...]]
) -> None:
    """With `pytest -s`, prints the result of `check_config` for each model type."""
    table, failures = {}, {}
    for kind in TYPES:
        try:
            table[kind] = check_config(kind, form, calls)
        except Exception as error:
            failures[kind] = f"{type(error).__name__}: {str(error)[:700]}"
        gc.collect()  # models contain reference cycles; together they occupy gigabytes
    for result, count in Counter(table.values()).most_common():
        print(
            f"{form} {count:4} {result}: {' '.join(kind for kind, found in table.items() if found == result)}"
        )
    assert not failures, "\n".join(f"{kind}: {error}" for kind, error in failures.items())
