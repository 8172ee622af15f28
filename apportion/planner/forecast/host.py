"""Copies between a rank and its host's memory: bytes per layer, in closed form."""

from __future__ import annotations

from typing import NamedTuple

from apportion.planner.forecast.layers import Layers
from apportion.planner.forecast.memory import attention_row, hidden_row, kept_bytes, output_row

_FLOAT32 = 4


class Copies(NamedTuple):
    """Bytes that a rank sends to and receives from the host, in one layer."""

    to_host: float = 0.0
    to_device: float = 0.0

    def us(self, host_gbs: float) -> float:
        """Microseconds at `host_gbs` each way: the longer direction, since both run at once."""
        return max(self) / (host_gbs * 1e3)


def copies(layers: Layers, tokens: int, phase: str, stages: int = 0) -> Copies:
    """Copies of one layer of a microbatch with `tokens` tokens on the rank. phase: forward or backward; stages: see
    `PlannedMicrobatch`. Offloading sends the saved activations, and fetches them again."""
    training = layers.training
    if not training.offload:
        return Copies()
    if training.chunks > 1:
        return _chunked_copies(layers, tokens, phase, max(stages - 1, 0))
    size = kept_bytes(layers, training.recompute) * tokens
    return Copies(to_host=size) if phase == "forward" else Copies(to_device=size)


def _chunked_copies(layers: Layers, tokens: int, phase: str, repeats: int) -> Copies:
    """FPDT's copies for causal attention of one sequence: a rank has its share of the heads and all tokens of a chunk,
    the same amount as its share of the tokens with all heads, unless ranks share KV heads.

    Counted from the loops of its implementation in DeepSpeed, under full checkpointing. forward: the layer's input, its
    norm, Q, K, V, O and the LSE go to the host once, and every chunk of queries fetches K and V of the earlier chunks.
    backward: the layer's input is fetched, and the forward runs again; then each chunk of K and V and of the norm is
    fetched once, dO is sent once, and each chunk of K and V fetches all chunks of queries that see it: Q, O, the LSE,
    dO (on the device for the first chunk) and dQ in float32, which is sent back after each. Chunks that happen to be on
    the device are not deducted.

    repeats: head stages after the first (UPipe), each over all chunks. Each fetches the norm again, for its own
    projections; in backward it also fetches the norm's float32 gradient, which the previous stage sent.
    """
    m, chunks, row = layers.model, layers.training.chunks, hidden_row(layers)
    queries = float(m.q_heads * m.head_dim * m.element_bytes)
    keys, saved = attention_row(layers) - queries, output_row(layers)
    output, sums = saved - _FLOAT32 * m.q_heads, queries / m.element_bytes * _FLOAT32
    part, before = -(-tokens // chunks), chunks * (chunks - 1) // 2
    pairs = before + chunks
    out, back = (row + queries + keys + saved) * tokens, before * part * keys
    if phase == "forward":
        return Copies(row * tokens + out, back + repeats * row * tokens)
    fetched = (row + row + keys) * tokens + (pairs * (queries + saved + sums) + before * output) * part
    gradient = row / m.element_bytes * _FLOAT32
    out += repeats * gradient * tokens
    back += repeats * (2 * row + gradient) * tokens
    return Copies(out + output * tokens + pairs * sums * part, back + fetched)
