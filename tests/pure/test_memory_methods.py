"""Memory of layers and head under published methods: what is printed of them, and the page that has both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.model import Model
from apportion.planner.memory_model import (
    LAYER_METHODS,
    Offload,
    activation_bytes,
    activations,
    fpdt_offload,
    printed_backward,
    printed_forward,
    printed_phases,
)
from benchmarks import memory_methods

GIB = 2**30
LLAMA, VOCABULARY = Model(32, 8, 128, hidden=4096, ffn=14336, layers=32), 128256
#: heads times head dim are the hidden size, as the printed tables take it
SQUARE = [
    Model(heads, heads // ratio, 16, hidden=16 * heads, layers=3)
    for heads, ratio in ((8, 1), (16, 4), (32, 8))
]


@pytest.mark.parametrize("model", SQUARE, ids=str)
def test_attention_is_what_upipe_prints(model: Model) -> None:
    """Table 6's largest moment, which is larger than any of Table 2."""
    ratio, tokens, row = model.q_heads // model.kv_heads, 4800, model.hidden * model.element_bytes
    printed = {"plain": "ulysses", "alst": "ulysses_offload", "upipe": "upipe", "fpdt": "fpdt"}
    for method, name in printed.items():
        chunks = 4 if method in ("upipe", "fpdt") else 1
        tables = (printed_backward(name, ratio, chunks, 3), printed_forward(name, ratio, chunks, 3))
        found = activations(method, model, tokens, 1000, chunks)
        assert found.kept + found.attention == max(map(max, tables)) * row * tokens
        assert found.kept == (3 * row * tokens if method == "plain" else 0)


def test_phases_without_tiles_are_those_of_table_1() -> None:
    """25 and 240 times tokens and hidden size, beside which we count the input of the head."""
    model, tokens = Model(10, 10, 10, hidden=100, ffn=267, layers=1), 1000
    found, phases = activations("plain", model, tokens, 30 * 100), printed_phases()
    assert found.feed_forward == phases["feed_forward"] * tokens * 100
    assert found.cross_entropy == (phases["cross_entropy"] + 2) * tokens * 100


def test_logits_are_as_large_as_alst_says() -> None:
    """Its usage guide: 16,000 tokens of Llama-3.1-8B have 7.64 GiB of logits in float32; its paper: tiles of the loss
    save over 14 GiB of them."""
    whole, tiled = (
        activations(method, LLAMA, 16000, VOCABULARY).cross_entropy / GIB for method in ("plain", "alst")
    )
    row = 16000 * 2 * 4096 / GIB
    assert round((whole - row) / 2, 2) == 7.64
    assert 14 < whole - tiled < 15
    assert tiled - row <= 1


def test_tiles_and_chunks_bound_what_grows() -> None:
    for tile in (1, 100, 4096):
        found = activations("alst", LLAMA, 8192, VOCABULARY, tile_tokens=tile)
        assert found.feed_forward == 2 * 8192 * 8192 + 8 * 14336 * tile
    assert activations("alst", LLAMA, 100, VOCABULARY).feed_forward == 100 * (2 * 8192 + 8 * 14336)
    small = activations("alst", LLAMA, 100, VOCABULARY, logits_tile_bytes=1)
    assert small.cross_entropy == 100 * 8192 + 8 * VOCABULARY  # at least a token
    # the last chunk may be shorter, and a chunk has at least a token
    found = activations("fpdt", LLAMA, 10, VOCABULARY, chunks=3)
    assert found.attention == 4 * (2 * 8192 + 2 * (2 * 8192 + 4096))
    assert found.feed_forward == 20 * 8192 + 4 * 8 * 14336
    one, more = (activations("fpdt", LLAMA, 64, VOCABULARY, chunks=chunks).attention for chunks in (64, 999))
    assert one == more


def test_kinds_of_layers_are_counted_together() -> None:
    kinds = Model(32, 8, 128, layers={"global": 20, "local": 12})
    for method in LAYER_METHODS:
        assert activations(method, kinds, 4096, VOCABULARY) == activations(method, LLAMA, 4096, VOCABULARY)


def test_methods_stand_in_the_order_that_was_measured() -> None:
    """UPipe, Table 4: FPDT holds least, then UPipe, then Ulysses with tiles and offload; plain Ulysses most."""
    for run in memory_methods.RUNS:
        for tokens in (4 * memory_methods.M, 8 * memory_methods.M):
            peaks = [
                activation_bytes(method, run.model, tokens // run.gpus, run.vocabulary, run.chunks(method, tokens))
                for method in ("fpdt", "upipe", "alst", "plain")
            ]  # fmt: skip
            assert peaks == sorted(peaks)
            assert len(set(peaks)) == 4


def test_formulas_count_a_part_of_what_was_measured() -> None:
    """What they leave out is six to twelve tensors of the hidden size with every method and both models."""
    for one in memory_methods.growths():
        assert 0 < one.ours < one.measured
        assert 6 < one.rest < 12


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_what_fpdt_moves_is_what_its_loops_move(chunks: int) -> None:
    """Walked through, chunk by chunk."""
    model, part = Model(4, 2, 8, v_head_dim=4, hidden=24, layers=1), 5
    row, q, k, o = (2 * width * part for width in (24, 4 * 8, 2 * 12, 4 * 4))
    lse, sums = 4 * 4 * part, 4 * 4 * 8 * part
    out = back = 0
    for chunk in range(chunks):
        out += row + q + k + o + lse
        back += chunk * k  # keys before
    forward = fpdt_offload(model, chunks * part, chunks, "forward")
    assert forward == (out + chunks * row, back)
    back += chunks * row  # the layer's input
    for keys in range(chunks):
        out, back = out + o, back + k + row
        for _ in range(keys, chunks):
            out, back = out + sums, back + q + o + lse + sums + (o if keys else 0)
    assert fpdt_offload(model, chunks * part, chunks, "backward") == (out, back)


def test_time_is_bytes_over_bandwidth() -> None:
    assert Offload(3_000_000_000, 5_000_000_000).ms(50) == 100
    once, twice = (fpdt_offload(LLAMA, 131072, 16, "forward").ms(gbs) for gbs in (50, 25))
    assert twice == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"method": "ring"}, "method"),
        ({"method": "alst", "chunks": 2}, "chunks = 2: method alst has none"),
        ({"method": "fpdt", "tile_tokens": 2}, "tile_tokens = 2: method fpdt has no tiles of tokens"),
        ({"tokens_per_rank": 0}, "tokens_per_rank"),
        ({"tokens_per_rank": 1.5}, "tokens_per_rank"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"chunks": 0}, "chunks"),
        ({"tile_tokens": 0}, "tile_tokens"),
        ({"logits_tile_bytes": 0}, "logits_tile_bytes"),
    ],
)
def test_refusals_name_the_argument(changed: dict[str, Any], told: str) -> None:
    given = {"method": "upipe", "model": LLAMA, "tokens_per_rank": 100, "vocabulary": 100} | changed
    with pytest.raises(ConfigError, match=told):
        activation_bytes(**given)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fpdt_offload(LLAMA, 8, 2, "both"), "phase"),
        (lambda: fpdt_offload(LLAMA, 8, 0, "forward"), "chunks"),
        (lambda: fpdt_offload(LLAMA, 0, 2, "forward"), "tokens_per_rank"),
        (lambda: Offload(1, 1).ms(0), "host_gbs"),
    ],
)
def test_refusals_of_offload(call: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


def test_the_page_has_the_tables_as_they_come_out() -> None:
    text = memory_methods.PAGE.read_text(encoding="utf-8")
    held = text.split(memory_methods.BEGIN)[1].split(memory_methods.END)[0]
    assert held == memory_methods.tables(), "run python benchmarks/memory_methods.py"


def test_the_example_of_the_page_runs() -> None:
    text = memory_methods.PAGE.read_text(encoding="utf-8").split("## Memory of published methods")[1]
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block, {})
