"""The model: facts about the layers for planning and execution."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import MAX_INT, integer, known, load, mapping, name, suggestion
from apportion.ir.latent import Latent
from apportion.ir.request.hf_fields import is_config, model_fields
from apportion.ir.request.hf_recurrent import recurrent_kinds
from apportion.ir.request.recurrent import MAX_KINDS, Recurrent
from apportion.ir.structs import check, one_of, read, to_data
from apportion.ir.tensors import GRADIENTS, HEADLESS, SENT_GRADIENTS, Tensor

ELEMENT_BYTES = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8})

MAX_HEADS = 2**16  # also the limit of head dims, as in the header of a plan
_MAX_SIZE = 2**24
Heads = Annotated[int, Meta(ge=1, le=MAX_HEADS)]
Width = Annotated[int, Meta(ge=1, le=_MAX_SIZE)]


@dataclass(frozen=True)
class Model:
    """Layer dimensions; heads are counted per tensor-parallel rank. `v_head_dim` differs from `head_dim` in MLA (None:
    equal).

    `layers`: the number of attention layers, or one number for each attention kind, sorted. `sent_gradients`: transfer
    dtype of partial gradients: `wide`, the accumulators' dtype, or `model`, rounded to bf16 or fp16, which halves
    their bytes; sums are always in float32. `recurrent`: kinds of linear recurrent layers, sorted. `balance`:
    {kind: {"keys": n}} for kinds whose layers choose keys at run time in their own kernel: rows are gathered, queries
    stay home with all heads, and a query counts as min(visible keys, n) pairs. `latent`: KV rows are latent rows, of
    one KV head, which the layer's projection expands to k and v of each query head where attention is computed; head
    dims describe the expanded heads. Raises ConfigError.
    """

    q_heads: Heads = 32
    kv_heads: Heads = 8
    head_dim: Heads = 128
    v_head_dim: Heads | None = None
    dtype: Annotated[str, one_of(ELEMENT_BYTES)] = "bf16"
    hidden: Width = 4096
    ffn: Width = 14336
    layers: int | Mapping[str, int] = field(default=32, hash=False)
    sent_gradients: Annotated[str, one_of(SENT_GRADIENTS)] = "wide"
    recurrent: Annotated[Mapping[str, Recurrent], Meta(max_length=MAX_KINDS)] = field(
        default_factory=dict, hash=False
    )
    balance: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        check(self, "model")
        self._check_latent()
        if self.q_heads % self.kv_heads:
            raise ConfigError(
                "model.q_heads",
                self.q_heads,
                f"must be a multiple of kv_heads ({self.kv_heads})",
                "give each KV head the same number of query heads",
            )
        object.__setattr__(self, "layers", _layers(self.layers))
        object.__setattr__(self, "recurrent", dict(sorted(self.recurrent.items())))
        self.check_recurrent(() if isinstance(self.layers, int) else self.layers)
        object.__setattr__(self, "balance", _balance(self.balance))
        for kind in self.balance:
            self.layers_of(kind)
        if self.sent_gradients == "model" and self.element_bytes == self.accumulator_bytes:
            raise ConfigError(
                "model.sent_gradients",
                self.sent_gradients,
                f"is for bf16 and fp16: gradients of {self.dtype} already travel in the model's dtype",
                "leave it out",
            )

    def _repr_html_(self) -> str:
        """Notebook card: heads, layers of each kind, sizes and dtype."""
        from apportion.ir import cards

        return cards.card("Model", self.figures())

    def figures(self) -> list[tuple[str, str]]:
        """(name, value) pairs as text: heads, layers of each kind, sizes and dtype."""
        width = (
            f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim} (v {self.value_dim})"
        )
        layers = {"attention": self.layers} if isinstance(self.layers, int) else self.layers
        counts = {**layers, **{kind: recurrence.layers for kind, recurrence in self.recurrent.items()}}
        latent = (
            []
            if self.latent is None
            else [("latent rows", f"{self.latent.rank} + {self.latent.rope} of RoPE")]
        )
        return [
            ("heads", f"{self.q_heads} query, {self.kv_heads} KV, of {width}"),
            ("layers", ", ".join(f"{count} {kind}" for kind, count in counts.items())),
            *latent,
            ("hidden, FFN", f"{self.hidden:,}, {self.ffn:,}"),
            ("dtype", self.dtype),
        ]

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        check(self.latent, "model.latent")
        if self.kv_heads != 1:
            remedy = "write kv_heads: 1, or leave latent out if keys and values travel expanded"
            raise ConfigError("model.kv_heads", self.kv_heads, "must be 1: a latent row is one head", remedy)
        if self.latent.rope >= self.head_dim:
            rule = f"must be less than head_dim ({self.head_dim}): the rest of k is specific to each head"
            raise ConfigError("model.latent.rope", self.latent.rope, rule, "correct the sizes")

    def check_recurrent(self, kinds: Collection[str]) -> None:
        """Refuses recurrent kinds named like an attention kind. Raises ConfigError."""
        for kind in self.recurrent:
            if kind in kinds:
                raise ConfigError("model.recurrent", kind, "is also an attention kind", "rename one of them")

    @property
    def expansion(self) -> int:
        """Multiplications to expand a latent row to k and v of one head, equal to the number of weights; 0 without
        latent rows."""
        if self.latent is None:
            return 0
        return self.latent.rank * (self.head_dim - self.latent.rope + self.value_dim)

    @property
    def expanded(self) -> Model:
        """The model without latent rows, as kernels see it: k and v of every query head."""
        return self if self.latent is None else replace(self, kv_heads=self.q_heads, latent=None)

    @property
    def key_products(self) -> int:
        """Multiplications to compute k and v of a token, or its latent row, on its home rank."""
        if self.latent is not None:
            return self.hidden * sum(self.latent.widths)
        return self.hidden * self.kv_heads * (self.head_dim + self.value_dim)

    def layers_of(self, kind: str) -> int:
        """The number of layers of one attention kind. Raises UnknownNameError."""
        if isinstance(self.layers, int) and isinstance(kind, str):
            return self.layers
        if isinstance(self.layers, int) or not isinstance(kind, str) or kind not in self.layers:
            raise UnknownNameError(
                "model.layers",
                kind,
                "unknown attention kind",
                suggestion(str(kind), () if isinstance(self.layers, int) else self.layers),
            )
        return self.layers[kind]

    def keys_of(self, kind: str) -> int | None:
        """The maximum number of keys counted for a query of an attention kind; None: all visible keys."""
        return self.balance[kind]["keys"] if kind in self.balance else None

    @property
    def value_dim(self) -> int:
        """The head dim of V."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of the model's dtype."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one number of an accumulator or partial: float32, or float64 for a float64 model."""
        return max(4, self.element_bytes)

    def row_bytes(self, tensor: Tensor, heads: int | None = None) -> int:
        """Bytes of one row of a tensor with `heads` of its heads (KV heads for KV and dKV; None: all); X without its
        position id."""
        head_bytes, count = self._head_bytes[tensor]
        return head_bytes * (count if heads is None or tensor in HEADLESS else heads)

    def narrows(self, tensor: Tensor) -> bool:
        """True if tiles of a tensor, complete or not, are rounded to the model's dtype for transfer."""
        return self.sent_gradients == "model" and tensor in GRADIENTS

    def sent_bytes(self, tensor: Tensor, heads: int | None = None) -> int:
        """Like `row_bytes`, for a row in transit that is not a result."""
        size = self.row_bytes(tensor, heads)
        return size // self.accumulator_bytes * self.element_bytes if self.narrows(tensor) else size

    @cached_property
    def _head_bytes(self) -> Mapping[Tensor, tuple[int, int]]:
        """For each tensor, the bytes of one head's row, without position id, and the number of heads."""
        count, sizes = {"query": self.q_heads, "key": self.kv_heads, None: 1}, {}
        for tensor in Tensor:
            contents = tensor.contents
            widths = contents.widths(self.head_dim, self.value_dim, self.hidden, self.latent)
            pairs = zip(widths, contents.parts, strict=True)
            numbers = sum(max(width, 1) for width, part in pairs if not part.integer)
            size = self.accumulator_bytes if contents.wide else self.element_bytes
            sizes[tensor] = numbers * size, count[contents.side]
        return sizes

    def result_bytes(self, tensor: Tensor) -> int:
        """Bytes per row and head of a sum's result, in the model's dtype, without its LSE."""
        widths = tensor.contents.widths(self.head_dim, self.value_dim, self.hidden, self.latent)
        return sum(widths) * self.element_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes per row and head of the forward result: the output in the model's dtype, and its LSE."""
        return self.result_bytes(Tensor.O) + self.accumulator_bytes

    def sent_result_bytes(self, tensor: Tensor) -> int:
        """Bytes per row and head of a sum that is sent as a result; 0 for tensors that are not sums."""
        if not tensor.contents.partial or tensor in HEADLESS:
            return 0
        return self.output_bytes if tensor == Tensor.O else self.result_bytes(tensor)

    @staticmethod
    def from_data(data: Any) -> Model:
        """Builds a model from plain data: a mapping of the fields above, all optional. Raises ConfigError."""
        return read(Model, "model", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data; fields of later format versions are omitted at their defaults."""
        data = to_data(self)
        if not self.balance:
            del data["balance"]
        if self.sent_gradients == "wide":
            del data["sent_gradients"]
        if self.recurrent:
            data["recurrent"] = {kind: recurrence.to_data() for kind, recurrence in self.recurrent.items()}
        else:
            del data["recurrent"]
        if self.latent is None:
            del data["latent"]
        return data

    @staticmethod
    def load(path: str | Path) -> Model:
        """Loads a model from a JSON or YAML file, or from the `config.json` of a Hugging Face model. Raises
        ConfigError."""
        data = load(path)
        if not is_config(data):
            return Model.from_data(data)
        return Model(**model_fields(data), recurrent=recurrent_kinds(data))


def _balance(balance: Any) -> dict[str, dict[str, int]]:
    result = {}
    for kind, parameters in sorted(mapping("model.balance", balance).items()):
        path = f"model.balance.{name('model.balance', kind)}"
        keys = known(path, parameters, ("keys",), ("keys",))["keys"]
        result[kind] = {"keys": integer(f"{path}.keys", keys, 1, MAX_INT)}
    return result


def _layers(layers: Any) -> int | dict[str, int]:
    if not isinstance(layers, Mapping):
        return integer("model.layers", layers, 1, _MAX_SIZE)
    if not layers:
        raise ConfigError("model.layers", layers, "must name at least one attention kind", "write layers: 32")
    kinds = mapping("model.layers", layers)
    return {
        name("model.layers", kind): integer(f"model.layers.{kind}", kinds[kind], 1, _MAX_SIZE)
        for kind in sorted(kinds)
    }
