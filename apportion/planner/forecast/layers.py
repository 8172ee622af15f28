"""What layers take besides attention, by closed forms: microseconds, FLOPs and parameters of one tensor-parallel rank.
Tokens are those of a rank over its speed.

Forward; backward is two products of the same size for each of the forward, and its row work is counted twice. Rows that
norms and residual sums go over are split among tensor-parallel ranks (sequence parallelism: Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.ir.layer_work import GATED, LOSS, adam_bytes, adam_state_bytes, row_numbers
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.cost import CostModel
from apportion.planner.forecast.training import Training


@dataclass(frozen=True)
class Layers:
    """One rank's share of the layers. model: of a tensor-parallel rank; tensor: their number."""

    hardware: Hardware
    model: Model
    training: Training
    tensor: int = 1

    @property
    def _cost(self) -> CostModel:
        return CostModel(self.hardware, self.model)

    @property
    def linear_parameters(self) -> int:
        """Of the products of one layer, on one rank."""
        return self._cost.linear_parameters

    @property
    def parameters(self) -> int:
        """Of one layer, on one rank: its products and two norms."""
        return self.linear_parameters + 2 * self.model.hidden

    @property
    def projection_parameters(self) -> int:
        """Those of Q, K and V, which programs that `project` run themselves."""
        m = self.model
        return m.hidden * (m.q_heads * m.head_dim + m.kv_heads * (m.head_dim + m.value_dim))

    @property
    def vocabulary_parameters(self) -> int:
        """Of the head, or the embedding, on one rank."""
        return -(-self.training.vocab // self.tensor) * self.model.hidden

    def linear_us(self, tokens: float, projects: bool = False) -> float:
        """One layer. projects: without the projections of Q, K and V."""
        share = 1.0 - projects * self.projection_parameters / self.linear_parameters
        return float(self._cost.linear_us(1)) * tokens * share

    def mlp_us(self, tokens: float) -> float:
        """The FFN of one layer: its share of `linear_us`, and its gate's of `rows_us`."""
        m = self.model
        products = float(self._cost.linear_us(1)) * 3 * m.hidden * m.ffn / self.linear_parameters
        return tokens * (products + m.element_bytes * GATED * m.ffn / self._bytes_per_us("rows_gbs"))

    def rows_us(self, tokens: float) -> float:
        """One layer: norms, residual sums, rotary embeddings and the gate, bound by memory."""
        moved = tokens * self.model.element_bytes * row_numbers(self.model, self.tensor)
        return moved / self._bytes_per_us("rows_gbs")

    def _bytes_per_us(self, rate: str) -> float:
        return self.hardware.rate_gbs(rate) * 1e3

    def head_us(self, tokens: float) -> float:
        """The products of the head, and what its loss reads and writes."""
        m, logits = self.model, tokens * self.vocabulary_parameters / self.model.hidden
        products = 2 * logits * m.hidden / (self.hardware.linear_tflops.value * 1e6)
        return products + logits * LOSS * m.element_bytes / self._bytes_per_us("loss_gbs")

    def optimizer_us(self, parameters: float) -> float:
        """A step of Adam over so many parameters, bound by memory; of a smaller or larger state, each byte of it read
        and written."""
        moved = adam_bytes(self.gradient_bytes, self.model.element_bytes)
        moved += 2 * (self.optimizer_bytes - adam_state_bytes(self.model.element_bytes))
        return parameters * moved / self._bytes_per_us("optimizer_gbs")

    @property
    def optimizer_bytes(self) -> int:
        """Of state a parameter."""
        given = self.training.optimizer_bytes
        return adam_state_bytes(self.model.element_bytes) if given is None else given

    @property
    def gradient_bytes(self) -> int:
        """Of a parameter."""
        return self.model.element_bytes if self.training.gradients == "model" else 4

    def tensor_us(self, tokens: float, cluster: Cluster) -> float:
        """One layer, forward or backward: two all-gathers and two reduce-scatters of its input rows, which nothing
        hides."""
        if self.tensor == 1:
            return 0.0
        moved = tokens * self.model.hidden * self.model.element_bytes * (self.tensor - 1) / self.tensor
        return 4 * (moved / (cluster.intra_gbs * 1e3) + cluster.intra_latency_us)


def model_flops(model: Model, training: Training, layers: int, tokens: int, pairs: int) -> float:
    """FLOPs of a step of the whole model, forward and backward without recomputation, as MFU counts them: 6 a token and
    parameter of products (embeddings are none), and attention's of the pairs that the masks allow. pairs: over all
    layers."""
    m = model
    attention = m.q_heads * (m.head_dim + m.value_dim)
    products = m.hidden * (attention + m.kv_heads * (m.head_dim + m.value_dim) + 3 * m.ffn) * layers
    return 6.0 * tokens * (products + m.hidden * training.vocab) + 6.0 * pairs * attention
