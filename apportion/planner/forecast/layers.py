"""Layers except attention, in closed form: microseconds, FLOPs and parameters of one tensor-parallel rank. `tokens` is
a rank's tokens divided by its speed.

Times are forward; backward has two products (GEMMs) of the same size for each forward one, twice the row work. Rows of
norms and residual sums are split among tensor-parallel ranks (sequence parallelism: Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.ir.layer_work import (
    DISPATCHED,
    GATED,
    LOSS,
    NORMS,
    adam_bytes,
    adam_state_bytes,
    row_work_numbers,
)
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.forecast import recurrent
from apportion.planner.forecast.training import Training
from apportion.planner.simulate.recurrent import token_flops


@dataclass(frozen=True)
class Layers:
    """One rank's share of a layer, averaged over layers with and without experts, and over attention and recurrent
    ones. model: a tensor-parallel rank's part; tensor: number of such ranks. sparse: share of layers with experts;
    degree: ranks of an expert-parallel group; spread: rows of its fullest rank over its mean."""

    hardware: Hardware
    model: Model
    training: Training
    tensor: int = 1
    sparse: float = 0.0
    degree: int = 1
    spread: float = 1.0

    @property
    def dense(self) -> float:
        """Fraction of the layers with one FFN."""
        return self.training.ffn_share(recurrent.layer_count(self.model)) - self.sparse

    @property
    def linear_parameters(self) -> float:
        """Parameters of one layer's products that every token uses, on one rank: all but routed experts."""
        return linear_parameters(self.model, self.training, self.sparse, self.tensor)

    @property
    def parameters(self) -> float:
        """Parameters of one layer on one rank: products and two norms, without routed experts."""
        return self.linear_parameters + 2 * self.model.hidden

    @property
    def expert_parameters(self) -> float:
        """Parameters of routed experts on one rank."""
        experts, matrices = self.training.experts, self.training.matrices
        return self.sparse * experts.count / self.degree * matrices * self.model.hidden * experts.width

    def experts_us(self, rows: float) -> float:
        """Time of the experts for `rows` rows: products, gate, and memory traffic of dispatch and combine."""
        m, width, matrices = self.model, self.training.experts.width, self.training.matrices
        products = 2 * matrices * m.hidden * width / (self.hardware.linear_tflops.value * 1e6)
        memory = m.element_bytes * (matrices * width + DISPATCHED * m.hidden) / self._bytes_per_us("rows_gbs")
        return self.sparse * rows * (products + memory)

    def ffn_elements(self, gates: float, dense: float, sparse: float) -> float:
        """Elements per token in a rank's FFNs: `gates` vectors of the FFN's size if gated, one fewer if not, averaged
        with the fractions `dense` and `sparse` of layers with one FFN and with experts; experts add two vectors of the
        hidden size per dispatched row."""
        m, experts = self.model, self.training.experts
        gates -= not self.training.gated
        rows = experts.active * self.spread
        expert_numbers = (gates * (experts.shared + rows * experts.width) + 2 * rows * m.hidden) / self.tensor
        return dense * gates * m.ffn + sparse * expert_numbers

    @property
    def projection_parameters(self) -> float:
        """Parameters of the Q, K and V projections, which programs with `project` compute themselves."""
        m = self.model
        count = attention_parameters(m, self.training) - m.hidden * m.q_heads * m.value_dim
        return recurrent.attention_share(m) * count

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the output head, or of the embedding, on one rank."""
        return -(-self.training.vocab // self.tensor) * self.model.hidden

    def linear_us(self, tokens: float, projects: bool = False) -> float:
        """Time of one layer's products. projects: True if programs compute Q, K and V, whose projections are then left
        out. Expanding latent rows counts as attention."""
        expansion = recurrent.attention_share(self.model) * self.model.q_heads * self.model.expansion
        parameters = self.linear_parameters - projects * self.projection_parameters - expansion
        return tokens * 2 * parameters / (self.hardware.linear_tflops.value * 1e6)

    def mlp_us(self, tokens: float) -> float:
        """Time of the FFN of one layer: its share of `linear_us`, and its gate's share of `rows_us`."""
        m, numbers = self.model, self.dense * self.training.matrices * self.model.ffn
        products = 2 * numbers * m.hidden / (self.hardware.linear_tflops.value * 1e6)
        return tokens * (products + m.element_bytes * numbers / self._bytes_per_us("rows_gbs"))

    def rows_us(self, tokens: float) -> float:
        """Time of one layer's memory-bound work: norms, residual sums, rotary embeddings and the gate (with experts,
        only the shared ones' gate); convolutions, norms and gates of recurrent layers."""
        m, training = self.model, self.training
        ffn = self.dense * m.ffn + self.sparse * training.experts.shared / self.tensor
        numbers = row_work_numbers(m, self.tensor) + training.matrices * ffn - GATED * m.ffn
        numbers += (self.dense + self.sparse - 1) * NORMS / 2 * m.hidden / self.tensor
        low_rank = 2 * (training.q_rank + training.kv_rank)
        attention_numbers = low_rank + 2 * (m.q_heads + m.kv_heads) * m.head_dim  # of attention layers only
        numbers += low_rank + sum(
            share * (recurrent.row_work_elements(kind) - attention_numbers)
            for share, kind in recurrent.shares(m)
        )
        size = tokens * m.element_bytes * numbers
        return size / self._bytes_per_us("rows_gbs")

    def _bytes_per_us(self, rate: str) -> float:
        return self.hardware.rate_gbs(rate) * 1e3

    def head_us(self, tokens: float) -> float:
        """Time of the output head: its products, and the memory traffic of the loss."""
        m, logits = self.model, tokens * self.vocabulary_parameters / self.model.hidden
        products = 2 * logits * m.hidden / (self.hardware.linear_tflops.value * 1e6)
        return products + logits * LOSS * m.element_bytes / self._bytes_per_us("loss_gbs")

    def optimizer_us(self, parameters: float) -> float:
        """Time of an Adam step over `parameters` parameters, memory-bound; each byte of the optimizer's state is read
        and written."""
        size = adam_bytes(self.gradient_bytes, self.model.element_bytes)
        size += 2 * (self.optimizer_bytes - adam_state_bytes(self.model.element_bytes))
        return parameters * size / self._bytes_per_us("optimizer_gbs")

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter."""
        size = self.training.optimizer_bytes
        return adam_state_bytes(self.model.element_bytes) if size is None else size

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradient per parameter."""
        return self.model.element_bytes if self.training.gradients == "model" else 4

    def tensor_us(self, tokens: float, cluster: Cluster) -> float:
        """Tensor-parallel communication of one layer, forward or backward, fully exposed: two all-gathers and two
        reduce-scatters of its input rows; routed experts are not split and need none."""
        if self.tensor == 1:
            return 0.0
        size = tokens * self.model.hidden * self.model.element_bytes * (self.tensor - 1) / self.tensor
        reductions = 2 + 2 * self.dense + 2 * self.sparse * (self.training.experts.shared > 0)
        return reductions * (size / (cluster.intra_gbs * 1e3) + cluster.intra_latency_us)


def attention_parameters(model: Model, training: Training) -> int:
    """Parameters of one layer's Q, K, V and O projections on one rank; MLA's down-projections are replicated."""
    m, rope = model, training.rope_dim
    output = m.hidden * m.q_heads * m.value_dim
    if not training.kv_rank:
        return output + m.hidden * (m.q_heads * m.head_dim + m.kv_heads * (m.head_dim + m.value_dim))
    q, heads = training.q_rank, m.q_heads * m.head_dim
    queries = q * (m.hidden + heads) if q else m.hidden * heads
    low_rank = m.hidden * (training.kv_rank + rope)
    return output + queries + low_rank + training.kv_rank * m.q_heads * (m.head_dim - rope + m.value_dim)


def linear_parameters(model: Model, training: Training, sparse: float, tensor: int = 1) -> float:
    """Parameters of one layer's products on one rank, without routed experts, averaged over layers with experts (share
    `sparse`) and without."""
    experts, ffn = training.experts, training.matrices * model.hidden * model.ffn
    shared = model.hidden * (experts.count + training.matrices * experts.shared / tensor)
    dense = training.ffn_share(recurrent.layer_count(model)) - sparse
    mixers = recurrent.attention_share(model) * attention_parameters(model, training)
    mixers += sum(
        share * recurrent.product_parameters(kind, model.hidden) for share, kind in recurrent.shares(model)
    )
    return mixers + dense * ffn + sparse * shared


def whole_parameters(model: Model, training: Training, layers: int, routed: int) -> float:
    """Parameters of all layers' products, with `routed` routed experts per sparse layer: `Experts.count` for the model,
    `Experts.active` for one token."""
    sparse = training.sparse_share(layers)
    expert_size = training.matrices * model.hidden * training.experts.width * routed
    return layers * (linear_parameters(model, training, sparse) + sparse * expert_size)


def model_flops(model: Model, training: Training, layers: int, tokens: int, pairs: int) -> float:
    """FLOPs of a step of the whole model, forward and backward without recomputation, as MFU counts them: 6 per token
    and parameter of the products applied to it (not embeddings), attention over the pairs that masks allow, and
    recurrences computed in chunks. pairs: over all layers."""
    states = sum(kind.layers * token_flops(kind) for kind in model.recurrent.values())
    attention = model.q_heads * (model.head_dim + model.value_dim)
    products = whole_parameters(model, training, layers, training.experts.active)
    linear = 6.0 * (products + model.hidden * training.vocab)
    return tokens * (linear + 3.0 * states) + 6.0 * pairs * attention
