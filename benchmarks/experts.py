"""Compares forecast steps of mixture-of-experts models with published ones; writes a table of docs/benchmarks.md.

All publications use sequences of 4,096 tokens, one per rank, with forced even routing. Layers that Megatron adds to the
model's (embedding, loss, multi-token prediction) count as layers, so that the number of stages divides the
number of layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hf_config import masks_of, model_of
from apportion.planner.forecast.parallelism import Degrees, Parallelism
from apportion.planner.forecast.run import forecast
from apportion.planner.forecast.training import Training
from apportion.planner.recipe.recipes import find_recipe
from benchmarks.tables import write_tables

RESULTS = Path(__file__).parent / "results" / "experts.json"
TOKENS = 4096
BRIDGE, ZOO = "Megatron Bridge, performance summary", "Megatron MoE model zoo, Qwen3"

Config = Mapping[str, Any]
QWEN3: Config = json.loads("""{"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
  "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
  "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 96, "vocab_size": 151936, "sliding_window": null,
  "use_sliding_window": false}""")
GPT_OSS: Config = json.loads("""{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
  "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4,
  "num_hidden_layers": 36, "vocab_size": 201088}""")
DEEPSEEK: Config = json.loads("""{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
  "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_hidden_layers": 64, "n_routed_experts": 256,
  "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
  "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
  "vocab_size": 129280}""")


@dataclass(frozen=True)
class PublishedStep:
    """A published step of `sequences` sequences. seconds: as published; training: settings in addition to the config
    and ZeRO-1."""

    name: str
    source: str
    config: Config
    gpus: int
    sequences: int
    degrees: Degrees
    seconds: float
    training: Config
    dispatch: str = "expert"


CASES = (
    PublishedStep(
        *("Qwen3-235B-A22B, DeepEP", ZOO, QWEN3, 256, 2048, Degrees(2, 8, 4, 16, 32), 19.7),
        *({"recompute": "none"}, "node"),
    ),
    PublishedStep(
        *("Qwen3-235B-A22B, all-to-all", ZOO, QWEN3, 256, 2048, Degrees(2, 32, 3, 16, 8), 24.2),
        {"recompute": "none"},
    ),
    PublishedStep(
        *("gpt-oss-120b", BRIDGE, GPT_OSS, 64, 512, Degrees(1, 4, 1, 2, 8), 512 * TOKENS / 64 / 5630),
        {"recompute": "selective"},
    ),
    PublishedStep(
        *("DeepSeek-V3, FP8", BRIDGE, DEEPSEEK, 1024, 8192, Degrees(2, 8, 4, 16, 64)),
        *(8192 * TOKENS / 1024 / 1297, {"recompute": "none"}, "node"),
    ),
)


def row(case: PublishedStep) -> dict[str, Any]:
    """A row of forecast and published figures."""
    experts = {"imbalance": 1.0, "dispatch": case.dispatch}
    training = Training.from_data({"sharding": "zero1", **case.training, "experts": experts}, case.config)
    batch = Batch.from_lengths([TOKENS] * case.sequences, masks_of(case.config))
    form = Parallelism(find_recipe("ring"), case.degrees, 1, "order")
    cluster = Cluster(case.gpus // 8, 8)
    forecasts = forecast(batch, cluster, model_of(case.config), [form], training, hardware="h100")
    result = forecasts.record()["rows"][0]
    row = {"name": case.name, "source": case.source, "published_s": case.seconds, "gpus": case.gpus}
    return row | {"step_s": result["step_s"], "parts_s": result["parts_s"], "parallelism": result["name"]}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | GPUs | layout | published s | forecast s (low-high) | forecast / published | parts above 5 % |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    for case in rows:
        step, parts = case["step_s"], sorted(case["parts_s"].items(), key=lambda item: -item[1])
        breakdown = ", ".join(
            f"{name.replace('_', ' ')} {time:.1f}" for name, time in parts if time > 0.05 * step["value"]
        )
        layout = case["parallelism"].split("order, ")[1]
        lines.append(
            f"| {case['name']} | {case['gpus']:,} | {layout} | {case['published_s']:.1f} | {step['value']:.1f} "
            f"({step['low']:.1f}-{step['high']:.1f}) | {step['value'] / case['published_s']:.2f} | {breakdown} |"
        )
    return lines


def main() -> None:
    rows = [row(case) for case in CASES]
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    write_tables({"experts": "\n".join(table(rows))})


if __name__ == "__main__":
    main()
