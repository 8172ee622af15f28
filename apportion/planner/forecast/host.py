"""Copies between a rank and its host's memory: bytes of a layer, by closed forms."""

from __future__ import annotations

from typing import NamedTuple

from apportion.planner.forecast.layers import Layers
from apportion.planner.forecast.memory import attention_row, hidden_row, kept_bytes, output_row

_FLOAT32 = 4


class Copies(NamedTuple):
    """Bytes that a rank sends to the host and takes from it, in one layer."""

    to_host: float = 0.0
    to_device: float = 0.0

    def us(self, host_gbs: float) -> float:
        """Microseconds at so many GB/s each way: the longer of the two ways, as a link carries both at once."""
        return max(self) / (host_gbs * 1e3)


def copies(layers: Layers, tokens: int, phase: str, stages: int = 0) -> Copies:
    """Of one layer of a microbatch with so many tokens on the rank. phase: forward or backward; stages: see
    `PlannedMicrobatch`. Offloading sends what the layer keeps, and brings it back."""
    training = layers.training
    if not training.offload:
        return Copies()
    if training.chunks > 1:
        return _chunked(layers, tokens, phase, max(stages - 1, 0))
    kept = kept_bytes(layers, training.recompute) * tokens
    return Copies(to_host=kept) if phase == "forward" else Copies(to_device=kept)


def _chunked(layers: Layers, tokens: int, phase: str, again: int) -> Copies:
    """FPDT's copies for causal attention of one sequence: a rank has its share of the heads and all tokens of a chunk,
    which is as much as its share of the tokens with all heads, unless ranks share KV heads.

    Counted from the loops of its implementation in DeepSpeed, under full checkpointing. forward: the layer's input, its
    norm, Q, K, V, O and the LSE go to the host once, and every chunk of queries takes K and V of the chunks before.
    backward: the layer's input comes, and the forward runs again; then each chunk of K and V and of the norm comes
    once, dO goes out once, and each chunk of K and V brings all chunks of queries that see it: Q, O, the LSE, dO (which
    the first chunk finds on the device) and dQ in float32, which goes back after each. For a chunk or two that happen
    to be on the device nothing is taken off.

    again: head stages behind the first (UPipe), each over all chunks. Every one brings the norm again, for its own
    projections, and in backward its gradient in float32, which the stage before has sent out.
    """
    m, chunks, row = layers.model, layers.training.chunks, hidden_row(layers)
    queries = float(m.q_heads * m.head_dim * m.element_bytes)
    keys, saved = attention_row(layers) - queries, output_row(layers)
    output, sums = saved - _FLOAT32 * m.q_heads, queries / m.element_bytes * _FLOAT32
    part, before = -(-tokens // chunks), chunks * (chunks - 1) // 2
    pairs = before + chunks
    out, back = (row + queries + keys + saved) * tokens, before * part * keys
    if phase == "forward":
        return Copies(row * tokens + out, back + again * row * tokens)
    brought = (row + row + keys) * tokens + (pairs * (queries + saved + sums) + before * output) * part
    gradient = row / m.element_bytes * _FLOAT32
    out += again * gradient * tokens
    back += again * (2 * row + gradient) * tokens
    return Copies(out + output * tokens + pairs * sums * part, back + brought)
