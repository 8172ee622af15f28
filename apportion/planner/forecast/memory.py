"""Memory of a rank in closed form, with the home and work rows of a plan's programs: bytes by part.

weights, gradients, optimizer    of the rank's layers and its share of embedding and head; if sharded, also gathered
                                 weights of two layers, of embedding and head, and a layer's gradient
kept                             activations saved for backward
working                          those of the current layer and the head, at the largest of three points in backward

    moment         in addition to what is kept
    attention      the layer's input, its norm's output and the residual stream's gradient; rows of a call,
                   or, if that is more, what backward needs of a recurrent layer, and its gradients
    feed_forward   inputs and outputs of both norms and the output's gradient; Q, K, V, O and the LSE; and, of a tile of
                   tokens, four vectors of the FFN's size: gate, up, their product and a gradient (UPipe, Table 1)
    cross_entropy  the head's input and its gradient; of a tile of tokens, logits, their float32 copy and gradient;
                   and the full gradient of the head, if gradients are sharded

Ranks of a tensor-parallel group keep a share of the rows (sequence parallelism: Korthikanti et al., 2022), but the FFN
and the head hold their input and its gradient for all tokens, or for a tile.

Tiles are those of ALST (Bekman et al., 2025), chunks those of FPDT (Yao et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from apportion.ir.layer_work import FLOAT32
from apportion.planner.forecast import recurrent
from apportion.planner.forecast.layers import Layers
from apportion.planner.forecast.training import ShardedState, Training


@dataclass(frozen=True)
class Activations:
    """Activation bytes on a rank: `kept`, plus those of one moment of backward at a time; `host`: in host memory."""

    kept: float
    attention: float
    feed_forward: float
    cross_entropy: float
    host: float

    @property
    def moments(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("attention", "feed_forward", "cross_entropy")}

    @property
    def working(self) -> float:
        """Bytes at the moment that needs the most."""
        return max(self.moments.values())

    @property
    def peak(self) -> float:
        """Peak bytes on the device."""
        return self.kept + self.working


@dataclass(frozen=True)
class Memory:
    """Memory of a rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: Activations

    @property
    def parts(self) -> dict[str, float]:
        """Bytes on the device by part."""
        states = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer")}
        return {**states, "kept": self.activations.kept, "working": self.activations.working}

    @property
    def total(self) -> float:
        return float(sum(self.parts.values()))

    def to_data(self, cap_gib: float) -> dict[str, float | bool | dict[str, float]]:
        """GiB by part, the total, the cap, and whether it fits; GiB of each moment, and on the host."""
        gib = {name: size / 2**30 for name, size in self.parts.items()}
        moments = {name: size / 2**30 for name, size in self.activations.moments.items()}
        total, host = self.total / 2**30, self.activations.host / 2**30
        return {
            **gib, "total": total, "cap": cap_gib, "fits": total <= cap_gib, "moments": moments, "host": host,
        }  # fmt: skip


def attention_row(layers: Layers) -> float:
    """Bytes of a token's Q, K and V, or of Q and its latent row."""
    m = layers.model
    keys = m.head_dim + m.value_dim if m.latent is None else sum(m.latent.widths)
    return float((m.q_heads * m.head_dim + m.kv_heads * keys) * m.element_bytes)


def output_row(layers: Layers) -> float:
    """Bytes of a token's attention output and LSE."""
    m = layers.model
    return float(m.q_heads * (m.value_dim * m.element_bytes + FLOAT32))


def hidden_row(layers: Layers) -> float:
    """Bytes of a token's hidden state: a tensor-parallel rank has its share of the tokens."""
    return layers.model.hidden * layers.model.element_bytes / layers.tensor


def kept_bytes(layers: Layers, recompute: str) -> float:
    """Bytes per token and layer kept from forward to backward: without recomputation the inputs of both norms, the
    norms' outputs, Q, K, V, attention's output and its LSE, and, unless the FFN is tiled, gate, up and their product;
    with full recomputation: only the layer's input; with selective recomputation: also attention's output and LSE.
    Without recomputation, recurrent layers keep what their backward needs.
    """
    row, output, m = hidden_row(layers), output_row(layers), layers.model
    if recompute == "full":
        return row
    attention_share = recurrent.attention_share(m)
    if recompute == "selective":
        return row + attention_share * output
    states = (
        sum(share * recurrent.kept_elements(kind) for share, kind in recurrent.shares(m)) * m.element_bytes
    )
    ffn_bytes = (
        0.0
        if layers.training.tiles_mlp
        else layers.ffn_elements(3, layers.dense, layers.sparse) * m.element_bytes
    )
    return (
        2 * row * (1 + layers.dense + layers.sparse)
        + attention_share * (attention_row(layers) + output)
        + states
        + ffn_bytes
    )


def in_flight(stages: int, microbatches: int, virtual: int, last: bool = False) -> float:
    """Microbatches whose activations the first stage holds at once, each with all layers of the stage: under 1F1B the
    number of stages; interleaved, 1 + (stages - 1) / (stages * virtual) times that (Korthikanti et al., 2022). last:
    for the last stage, which holds its last chunk of one microbatch, and its other chunks of `stages` microbatches."""
    chunks = (virtual - 1) * stages + 1 if last else virtual * stages + (stages - 1) * (virtual > 1)
    return min(float(microbatches), chunks / virtual)


def activations(
    layers: Layers,
    count: float,
    tokens: int,
    attention_bytes: float,
    projects: bool = False,
    head: bool = True,
) -> Activations:
    """Activations of a rank with `tokens` tokens of a microbatch. count: layers whose activations it holds, times
    microbatches in flight; attention_bytes: home and work rows of a call; projects: True if programs compute Q, K and
    V: the call's rows then include the norm's output, and dX in place of attention's output, which is added unless
    recompute is full; the rest of the layer has no Q, K and V. head: True if the logits are on this rank.

    With offloading all saved activations are on the host, except those of the next layer. With chunks a layer has one
    chunk of its input, norm, Q, K, V and O on the device; in the FFN only its own tensors are chunked, as in
    DeepSpeed's FPDT.
    """
    training, m, row = layers.training, layers.model, hidden_row(layers)
    chunks, kept = training.chunks, kept_bytes(layers, training.recompute) * tokens
    waiting = max(count - 1, 0.0)
    tile = min(tokens, training.mlp_tile or tokens, -(-tokens // chunks))
    outputs, kinds = output_row(layers) + attention_row(layers) * (not projects), m.recurrent.values()
    outputs = max([outputs, *(recurrent.kept_elements(kind) * m.element_bytes for kind in kinds)])
    states = max(
        (3 * row + recurrent.working_elements(kind) * m.element_bytes for kind in kinds), default=0.0
    )
    output = output_row(layers) * tokens * (projects and training.recompute != "full")
    row_bytes = 3 * row if chunks > 1 else 5 * row + outputs
    logits = min(tokens, training.loss_tokens) * layers.vocabulary_parameters / m.hidden
    fullest = max(layers.ffn_elements(4, not kind, kind) for kind in {layers.sparse > 0, not layers.dense})
    gathered_row = 2 * m.hidden * m.element_bytes * (layers.tensor > 1)
    return Activations(
        kept=kept * min(waiting, 1) / chunks if training.offload else kept * waiting,
        attention=max(((3 - projects) * row * tokens + attention_bytes + output) / chunks, states * tokens),
        feed_forward=row_bytes * tokens + (fullest * m.element_bytes + gathered_row) * tile,
        cross_entropy=(
            2 * row * tokens
            + gathered_row * min(tokens, training.loss_tokens)
            + logits * (2 * m.element_bytes + FLOAT32)
        )
        * head,
        host=kept * count * training.offload,
    )


def memory(
    layers: Layers,
    stage_layers: float,
    ranks: int,
    ends: float,
    sizes: Activations,
    head: bool = True,
    copies: int = 1,
) -> Memory:
    """Memory of the fullest rank. stage_layers: layers of a stage; ranks: ranks that shard its weights; ends: number of
    vocabulary-sized matrices (embedding, head); head: True if one of them is the head; copies: ranks that shard the
    weights of its experts.

    With a single rank nothing is gathered. Sharded vocabulary matrices stay gathered through both passes, like FSDP's
    root module; the head's gradient is full until it is scattered.
    """
    training, number = layers.training, layers.model.element_bytes
    parameters = layers.parameters * stage_layers + layers.vocabulary_parameters * ends
    experts = layers.expert_parameters * stage_layers

    def shares(state: ShardedState) -> bool:
        return ranks > 1 and training.shards(state)

    def share(state: ShardedState) -> float:
        return parameters / ranks + experts / copies if shares(state) else parameters + experts

    vocabulary = layers.vocabulary_parameters
    layer = layers.parameters + layers.expert_parameters * (copies > 1)
    gathered = (2 * layer + vocabulary * ends) * shares("weights")  # this layer's and the next one's
    loss = vocabulary * layers.gradient_bytes * (head and shares("gradients"))
    return Memory(
        weights=(share("weights") + gathered) * number,
        gradients=(share("gradients") + layer * shares("gradients")) * layers.gradient_bytes,
        optimizer=share("optimizer") * layers.optimizer_bytes,
        activations=replace(sizes, cross_entropy=sizes.cross_entropy + loss),
    )


def vocabularies(training: Training, stages: int) -> tuple[float, float]:
    """Number of vocabulary-sized matrices on the first and on the last stage."""
    if stages == 1:
        count = 1.0 if training.tied else 2.0
        return count, count
    return 1.0, 1.0
