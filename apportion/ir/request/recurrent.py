"""Linear recurrent layers of models with attention: facts for planning and execution.

Each head passes a state of [key_dim, value_dim] from token to token. Over a run of tokens it is affine in the incoming
state: out = M · in + U, where M and U depend only on the run.

    Gated DeltaNet       gate scalar,   delta         M [key_dim, key_dim]
    Kimi Delta Attention gate diagonal, delta         M [key_dim, key_dim]
    Mamba-2, lightning   gate scalar,   no delta      M one number
    GLA                  gate diagonal, no delta      M [key_dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from apportion.ir.errors import ConfigError
from apportion.ir.structs import check, one_of, read, to_data

MAX_KINDS = 16
#: if runs that end documents have more than this share of a rank's rows, they are computed before their incoming
#: states arrive, like middle runs: more work, but no wait for the runs of another rank
EARLY_SHARE = 0.2
MAX_CONV = 1024
_Size = Annotated[int, Meta(ge=1, le=2**16)]


@dataclass(frozen=True)
class Recurrent:
    """A kind of recurrent layer; heads are counted per tensor-parallel rank.

    heads: heads of V, each with a state. key_heads: heads of Q and K, each shared by equally many heads of V (None: as
    many as heads). gate: `scalar`, one decay per head, or `diagonal`, one per key dimension of a head. delta: True if a
    token first removes the state's value for its key. conv: width of the causal depthwise convolution of Q, K and V
    before the recurrence (0: none). layers: number of layers. Raises ConfigError.
    """

    heads: _Size
    key_dim: _Size
    value_dim: _Size
    key_heads: _Size | None = None
    gate: Annotated[str, one_of(("scalar", "diagonal"))] = "scalar"
    delta: bool = True
    conv: Annotated[int, Meta(ge=0, le=MAX_CONV)] = 0
    layers: Annotated[int, Meta(ge=1, le=2**24)] = 1

    def __post_init__(self) -> None:
        if self.key_heads is None:
            object.__setattr__(self, "key_heads", self.heads)
        check(self, "recurrent")
        if self.heads % self.qk_heads:
            raise ConfigError(
                "recurrent.heads",
                self.heads,
                f"must be a multiple of key_heads ({self.key_heads})",
                "give each head of Q and K the same number of heads of V",
            )

    @property
    def qk_heads(self) -> int:
        """The number of heads of Q and K."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def state_numbers(self) -> int:
        """Numbers in a head's state, and in its U."""
        return self.key_dim * self.value_dim

    @property
    def transition_numbers(self) -> int:
        """Numbers in a head's M."""
        return self.key_dim**2 if self.delta else self.key_dim if self.gate == "diagonal" else 1

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: numbers of Q, K and V in a row."""
        return 2 * self.qk_heads * self.key_dim + self.heads * self.value_dim

    @property
    def halo(self) -> int:
        """Rows before a run that its convolution reads."""
        return max(self.conv - 1, 0)

    @staticmethod
    def from_data(data: Any) -> Recurrent:
        """Builds a kind from plain data: a mapping of the fields above. Raises ConfigError."""
        return read(Recurrent, "recurrent", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return to_data(self)


def widest_halo(kinds: Mapping[str, Recurrent]) -> int:
    """Rows before a run that the widest convolution reads."""
    return max((kind.halo for kind in kinds.values()), default=0)
