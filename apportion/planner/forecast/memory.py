"""Memory of a rank, by closed forms, and what a plan's programs need beside: bytes by part.

weights, gradients, optimizer    of the rank's layers and its share of embedding and head
activations                      what backward needs of every layer in flight, and of one that is made anew
head                             logits of a tile of tokens, and their gradients
attention                        home and work rows of one attention call, in the phase that has more
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from apportion.planner.forecast.layers import Layers
from apportion.planner.forecast.training import Held, Training


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def to_data(self, cap_gib: float) -> dict[str, float | bool]:
        """GiB by part, the total, the cap, and whether it fits."""
        parts = {field.name: getattr(self, field.name) / 2**30 for field in fields(self)}
        return {**parts, "total": self.total / 2**30, "cap": cap_gib, "fits": self.total <= cap_gib * 2**30}


def kept_bytes(layers: Layers, recompute: str) -> float:
    """Of a token and layer, what stays from forward to backward: with nothing made anew the inputs of both norms, the
    norms' outputs, Q, K, V, attention's output and its LSE, gate, up and their product; its input alone where all is
    made anew, and attention's output and LSE besides where the recomputation is selective."""
    m, tensor = layers.model, layers.tensor
    number = m.element_bytes
    row: float = m.hidden * number / tensor
    output: float = m.q_heads * (m.value_dim * number + 4)
    if recompute == "full":
        return row
    if recompute == "selective":
        return row + output
    heads = (m.q_heads * m.head_dim + m.kv_heads * (m.head_dim + m.value_dim)) * number
    kept: float = 4 * row + heads + output + 3 * m.ffn * number
    return kept


def in_flight(stages: int, microbatches: int, virtual: int) -> float:
    """Microbatches whose activations the first stage holds at once, each with all layers of the stage: under 1F1B as
    many as there are stages; interleaved 1 + (stages - 1) / (stages virtual) times that (Korthikanti et al., 2022)."""
    held = stages * (1 + (stages - 1) / (stages * virtual)) if virtual > 1 else stages
    return min(float(microbatches), held)


def memory(
    layers: Layers,
    stage_layers: float,
    ranks: int,
    tokens: int,
    held: float,
    attention_bytes: int,
    ends: float,
) -> Memory:
    """Of the fullest rank. stage_layers: layers of a stage; ranks: that share its weights; tokens: of a microbatch on
    the rank; held: microbatches in flight; ends: how many matrices of the vocabulary's size it has (embedding, head).
    """
    training, number = layers.training, layers.model.element_bytes
    parameters = layers.parameters * stage_layers + layers.vocabulary_parameters * ends

    def share(what: Held) -> float:
        return parameters / ranks if training.shards(what) else parameters

    whole = 2 * layers.parameters * training.shards("weights")  # this layer's and the next one's, gathered
    kept = kept_bytes(layers, training.recompute) * stage_layers * held
    anew = kept_bytes(layers, "none") * (training.recompute != "none")
    logits = min(tokens, training.loss_tokens) * layers.vocabulary_parameters / layers.model.hidden
    return Memory(
        weights=(share("weights") + whole) * number,
        gradients=share("gradients") * layers.gradient_bytes
        + layers.parameters * layers.gradient_bytes * training.shards("gradients"),
        optimizer=share("optimizer") * training.optimizer_bytes,
        activations=tokens * (kept + anew),
        head=logits * (2 * number + 4) * min(ends, 1),
        attention=float(attention_bytes),
    )


def vocabularies(training: Training, stages: int) -> tuple[float, float]:
    """Matrices of the vocabulary's size on the first and on the last stage."""
    if stages == 1:
        both = 1.0 if training.tied else 2.0
        return both, both
    return 1.0, 1.0
