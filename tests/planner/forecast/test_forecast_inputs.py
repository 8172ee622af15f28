"""Options and files of `apportion forecast`: Hugging Face models, masks, training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command

SMALL: dict[str, Any] = json.loads("""{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
  "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 1000}""")
OPTIONS = "--ranks 4 --tokens-per-rank 2048 --batches 1 --recipes fcp --grids none --json"
SIZE = OPTIONS.split()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes SMALL with changed fields to a file."""

    def write(**given: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SMALL | given))
        return path

    return write


def test_vocabulary_and_ties_come_from_the_config(run: Command, config: Callable[..., Path]) -> None:
    path = config(tie_word_embeddings=True)
    result = run("forecast", *SIZE, "--model", path).json["training"]
    assert (result["vocab"], result["tied"]) == (1000, True)
    options = ("--model", path, "--training", "{vocab: 500, recompute: full}")
    given = run("forecast", *SIZE, *options).json["training"]
    assert (given["vocab"], given["tied"], given["recompute"]) == (500, True, "full")
    assert run("forecast", *SIZE).json["training"]["vocab"] == 128256


def test_experts_come_from_the_config(run: Command, config: Callable[..., Path]) -> None:
    path = config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    given = ("--training", "{experts: {imbalance: 1.5}}", "--expert", "2")
    result = run("forecast", *SIZE, "--model", path, *given)
    experts = result.json["training"]["experts"]
    assert (experts["count"], experts["active"], experts["imbalance"]) == (8, 2, 1.5)
    assert result.row["name"].endswith("EP 2")
    assert result.row["parts_s"]["all_to_all"] > 0
    assert result.row["experts"]["uneven"] >= 1


def test_experts_of_other_types_are_refused_and_compared(run: Command, config: Callable[..., Path]) -> None:
    path = config(model_type="granitemoe", num_local_experts=8)
    refused = run("forecast", *SIZE, "--model", path)
    assert (refused.code, refused.json["error"]["field"]) == (2, "num_local_experts")
    assert run("compare", *SIZE[:6], "--recipes", "fcp", "--model", path, "--json").code == 0


def test_windows_come_from_the_config(run: Command, config: Callable[..., Path]) -> None:
    """Windows take less time than a causal mask; the config also has two kinds of layers, which no option can
    express."""
    window = {"model_type": "mistral", "sliding_window": 64}
    causal, windows = (
        run("forecast", *SIZE, "--model", config(**given)).row["parts_s"]["attention"]
        for given in ({}, window)
    )
    assert windows < 0.8 * causal
    row = run("forecast", *SIZE, "--model", config(**window), "--mask", "causal").row
    given = row["parts_s"]["attention"]
    assert given == causal
    kinds = config(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64)
    both = run("forecast", *SIZE, "--model", kinds).row["parts_s"]["attention"]
    assert windows < both < causal
    assert run("compare", *SIZE[:6], "--recipes", "fcp", "--model", kinds, "--json").code == 0


def test_plans_of_lengths_have_the_windows_of_the_config(run: Command, config: Any, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("3000\n500\n")
    size = ("--lengths", lengths, "--ranks", 2, "--tokens-per-rank", 2048, "--json")
    kinds = config(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64)
    assert run("plan", *size, "--model", kinds).code == 0


def test_each_kind_of_a_model_file_may_have_its_own_mask(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("{q_heads: 8, kv_heads: 2, hidden: 512, ffn: 1024, layers: {full: 2, local: 2}}")
    refused = run("forecast", *SIZE, "--model", path).row["reason"]
    assert "has no kind default" in refused
    assert "--mask '{kind: mask}'" in refused
    masks = "{full: {causal: {}}, local: {sliding_window: {window: 64}}}"
    assert run("forecast", *SIZE, "--model", path, "--mask", masks).row["status"] == "ok"


def test_tokens_come_from_the_batch(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    path.write_text('{"lengths": [3000, 1096]}')
    size = ("--batch", path, "--ranks", 4, "--recipes", "fcp", "--grids", "none")
    assert run("forecast", *size, "--json").json["tokens"] == 4096
    assert "1 step of 4,096 tokens" in run("forecast", *size).out


def test_no_sample_is_longer_than_a_microbatch(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("9000\n" * 3 + "4000\n" + "1000\n" * 6)
    size = ("--lengths", path, *SIZE, "--microbatches", 2)
    warnings = run("forecast", *SIZE[:-1], *size[:2], "--microbatches", 2).err
    assert warnings.count("samples with more than 8,192 tokens") == 1
    whole = run("forecast", *size).json
    assert (whole["tokens"], whole["skipped_samples"] > 0) == (16384, True)
    stages = run("forecast", *size, "--pipeline", 2).json
    assert stages["skipped_samples"] >= whole["skipped_samples"]
    path.write_text("9000\n")
    assert "use more ranks" in run("forecast", *size).json["error"]["message"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_dtype_other_than_the_hardwares_is_a_warning(run: Command, tmp_path: Path, dtype: str) -> None:
    path, plan = tmp_path / "model.yaml", tmp_path / "made.plan"
    path.write_text(f"{{q_heads: 8, kv_heads: 2, hidden: 512, ffn: 1024, layers: 4, dtype: {dtype}}}")
    batch = tmp_path / "batch.json"
    batch.write_text('{"lengths": [3000, 1096]}')
    assert run("plan", "--batch", batch, "--ranks", 2, "--model", path, "-o", plan).code == 0
    warning = "warning: model.dtype is fp32, but hardware h100 has bf16"
    for command in (
        ("forecast", *SIZE, "--model", path),
        ("compare", *SIZE[:6], "--recipes", "fcp", "--model", path, "--json"),
        ("simulate", plan, "--json"),
        ("report", plan, "-o", tmp_path / "page.html"),
    ):
        assert (warning in run(*command).err) == (dtype == "fp32")


def test_a_refused_baseline_is_printed_with_its_reason(run: Command) -> None:
    name = "ulysses, CP 4, order"
    size = (*SIZE[:8], "--grids", "ulysses")
    training = ("--mask", "full", "--training", "{chunks: 2, offload: true, recompute: full}")
    warning = run("forecast", *size, "--baseline", name, *training).out
    assert f"baseline {name} (refused)" in warning
    assert f"{name}: training.chunks = 2: need one causal sequence" in warning


def test_nothing_to_forecast_is_refused(run: Command) -> None:
    assert run("forecast", *SIZE[:6], "--recipes", "none", "--grids", "ring", "--json").json["best"]
    refused = run("forecast", *SIZE[:6], "--recipes", "none", "--grids", "none", "--json")
    assert refused.json["error"]["field"] == "parallelisms"
