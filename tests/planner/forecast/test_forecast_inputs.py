"""What `apportion forecast` makes of its options and files: models of Hugging Face, masks, training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apportion import cli

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
SIZE = (
    "--ranks",
    4,
    "--tokens-per-rank",
    2048,
    "--batches",
    1,
    "--recipes",
    "fcp",
    "--grids",
    "none",
    "--json",
)


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def row(self) -> dict[str, Any]:
        (row,) = self.json["rows"]
        return dict(row)


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> Said:
        code = cli.main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return call


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A file of SMALL with other fields."""

    def write(**given: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SMALL | given), encoding="utf-8")
        return path

    return write


def test_vocabulary_and_ties_come_from_the_config(run: Run, config: Callable[..., Path]) -> None:
    path = config(tie_word_embeddings=True)
    told = run("forecast", *SIZE, "--model", path).json["training"]
    assert (told["vocab"], told["tied"]) == (1000, True)
    given = run("forecast", *SIZE, "--model", path, "--training", "{vocab: 500, recompute: full}").json[
        "training"
    ]
    assert (given["vocab"], given["tied"], given["recompute"]) == (500, True, "full")
    assert run("forecast", *SIZE).json["training"]["vocab"] == 128256


def test_layers_that_are_not_dense_are_refused_and_compared(run: Run, config: Callable[..., Path]) -> None:
    path = config(model_type="mixtral", num_local_experts=8)
    refused = run("forecast", *SIZE, "--model", path)
    assert (refused.code, refused.json["error"]["field"]) == (2, "num_local_experts")
    assert run("compare", *SIZE[:6], "--recipes", "fcp", "--model", path, "--json").code == 0


def test_windows_come_from_the_config(run: Run, config: Callable[..., Path]) -> None:
    """A quarter of what a causal mask takes, and two kinds of layers, that no other option says."""
    window = {"model_type": "mistral", "sliding_window": 64}
    causal, windows = (
        run("forecast", *SIZE, "--model", config(**given)).row["parts_s"]["attention"]
        for given in ({}, window)
    )
    assert windows < 0.8 * causal
    given = run("forecast", *SIZE, "--model", config(**window), "--mask", "causal").row["parts_s"][
        "attention"
    ]
    assert given == causal
    kinds = config(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64)
    both = run("forecast", *SIZE, "--model", kinds).row["parts_s"]["attention"]
    assert windows < both < causal
    assert run("compare", *SIZE[:6], "--recipes", "fcp", "--model", kinds, "--json").code == 0


def test_plans_of_lengths_have_the_windows_of_the_config(
    run: Run, config: Callable[..., Path], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("3000\n500\n", encoding="utf-8")
    size = ("--lengths", lengths, "--ranks", 2, "--tokens-per-rank", 2048, "--json")
    kinds = config(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64)
    assert run("plan", *size, "--model", kinds).code == 0


def test_kinds_of_a_model_file_take_a_mask_each(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "{q_heads: 8, kv_heads: 2, hidden: 512, ffn: 1024, layers: {full: 2, local: 2}}", encoding="utf-8"
    )
    refused = run("forecast", *SIZE, "--model", path).row["reason"]
    assert "has no kind default" in refused
    assert "--mask '{kind: mask}'" in refused
    masks = "{full: {causal: {}}, local: {sliding_window: {window: 64}}}"
    assert run("forecast", *SIZE, "--model", path, "--mask", masks).row["status"] == "ok"
