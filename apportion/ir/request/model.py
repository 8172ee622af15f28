"""The model: what planning and execution must know of the layers."""

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

MAX_HEADS = 2**16  # and widths of a head, as in the header of a plan
_MAX_SIZE = 2**24
Heads = Annotated[int, Meta(ge=1, le=MAX_HEADS)]
Width = Annotated[int, Meta(ge=1, le=_MAX_SIZE)]


@dataclass(frozen=True)
class Model:
    """Heads are those of one tensor-parallel rank; `v_head_dim` differs from `head_dim` in MLA (None: equal).

    `layers` is the number of attention layers, or one number for each attention kind, sorted. `sent_gradients` says how
    gradients that are no results travel from rank to rank: `wide`, in the accumulators' dtype, or rounded to that of
    a bf16 or fp16 `model` on their way, which halves their bytes; they are added up in float32 in any case. `recurrent`
    has the kinds of linear recurrent layers beside attention, sorted. `balance` names kinds whose layers choose keys at
    run time by a kernel of their own: their rows are gathered, their queries stay home with all heads, and a query
    counts as min(keys it may see, keys), {kind: {"keys": n}}. `latent` says that rows of KV are latent rows, of one KV
    head, which the layer's own projection expands to a k and v of each query head where attention is computed; head
    dims are those of the expanded heads. Raises ConfigError.
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
                f"is for bf16 and fp16: gradients of {self.dtype} travel in the model's dtype as they are",
                "leave it out",
            )

    def _repr_html_(self) -> str:
        """What a notebook shows: heads, layers of each kind, sizes and dtype."""
        from apportion.ir import cards

        return cards.card("Model", self.figures())

    def figures(self) -> list[tuple[str, str]]:
        """Names and values, in words: heads, layers of each kind, sizes and dtype."""
        width = (
            f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim} (v {self.value_dim})"
        )
        layers = {"attention": self.layers} if isinstance(self.layers, int) else self.layers
        counts = {**layers, **{kind: held.layers for kind, held in self.recurrent.items()}}
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
            remedy = "write kv_heads: 1, or leave latent out where keys and values travel expanded"
            raise ConfigError("model.kv_heads", self.kv_heads, "must be 1: a latent row is one head", remedy)
        if self.latent.rope >= self.head_dim:
            rule = f"must be less than head_dim ({self.head_dim}): the rest of k is each head's own"
            raise ConfigError("model.latent.rope", self.latent.rope, rule, "correct the sizes")

    def check_recurrent(self, kinds: Collection[str]) -> None:
        """Refuses recurrent kinds with the name of an attention kind. Raises ConfigError."""
        for kind in self.recurrent:
            if kind in kinds:
                raise ConfigError(
                    "model.recurrent", kind, "is an attention kind too", "name one of them otherwise"
                )

    @property
    def expansion(self) -> int:
        """Multiplications by which a latent row becomes k and v of one head, and weights of that head; 0 without
        latents."""
        if self.latent is None:
            return 0
        return self.latent.rank * (self.head_dim - self.latent.rope + self.value_dim)

    @property
    def expanded(self) -> Model:
        """The model without latent rows: k and v of every query head, which is what kernels see."""
        return self if self.latent is None else replace(self, kv_heads=self.q_heads, latent=None)

    @property
    def key_products(self) -> int:
        """Multiplications that make k and v of a token where it lives, or its latent row."""
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
                "no attention kind of that name",
                suggestion(str(kind), () if isinstance(self.layers, int) else self.layers),
            )
        return self.layers[kind]

    def keys_of(self, kind: str) -> int | None:
        """How many keys a query of an attention kind counts for at most; None: all that it sees."""
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
        """Bytes of one number of an accumulator or partial: float32, float64 for a float64 model."""
        return max(4, self.element_bytes)

    def row_bytes(self, tensor: Tensor, heads: int | None = None) -> int:
        """Bytes of one row of a tensor with `heads` of its heads (KV heads for KV and dKV; None: all); of X without its
        position id."""
        of_head, count = self._head_bytes[tensor]
        return of_head * (count if heads is None or tensor in HEADLESS else heads)

    def narrows(self, tensor: Tensor) -> bool:
        """Whether tiles of a tensor are rounded to the model's dtype on their way, complete or not."""
        return self.sent_gradients == "model" and tensor in GRADIENTS

    def sent_bytes(self, tensor: Tensor, heads: int | None = None) -> int:
        """As `row_bytes`, of a row that travels, but not as a result."""
        held = self.row_bytes(tensor, heads)
        return held // self.accumulator_bytes * self.element_bytes if self.narrows(tensor) else held

    @cached_property
    def _head_bytes(self) -> Mapping[Tensor, tuple[int, int]]:
        """Of each tensor the bytes of a row of one head, without its position id, and the number of heads."""
        count, found = {"query": self.q_heads, "key": self.kv_heads, None: 1}, {}
        for tensor in Tensor:
            contents = tensor.contents
            widths = contents.widths(self.head_dim, self.value_dim, self.hidden, self.latent)
            pairs = zip(widths, contents.parts, strict=True)
            numbers = sum(max(width, 1) for width, part in pairs if not part.integer)
            size = self.accumulator_bytes if contents.wide else self.element_bytes
            found[tensor] = numbers * size, count[contents.side]
        return found

    def result_bytes(self, tensor: Tensor) -> int:
        """Bytes of one row of one head of a sum, once it is a result in the model's dtype; without its LSE."""
        widths = tensor.contents.widths(self.head_dim, self.value_dim, self.hidden, self.latent)
        return sum(widths) * self.element_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of a row of one head of what the forward gives: the output in the model's dtype, and its LSE."""
        return self.result_bytes(Tensor.O) + self.accumulator_bytes

    def sent_result_bytes(self, tensor: Tensor) -> int:
        """Bytes of a row of one head of a sum that travels as a result; 0 of what is no sum with heads."""
        if not tensor.contents.partial or tensor in HEADLESS:
            return 0
        return self.output_bytes if tensor == Tensor.O else self.result_bytes(tensor)

    @staticmethod
    def from_data(data: Any) -> Model:
        """The model of plain data: a mapping of the fields above, all optional. Raises ConfigError."""
        return read(Model, "model", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field; those that came later where they are not the default."""
        data = to_data(self)
        if not self.balance:
            del data["balance"]
        if self.sent_gradients == "wide":
            del data["sent_gradients"]
        if self.recurrent:
            data["recurrent"] = {kind: held.to_data() for kind, held in self.recurrent.items()}
        else:
            del data["recurrent"]
        if self.latent is None:
            del data["latent"]
        return data

    @staticmethod
    def load(path: str | Path) -> Model:
        """The model of a JSON or YAML file, or of the `config.json` of a Hugging Face model. Raises ConfigError."""
        data = load(path)
        if not is_config(data):
            return Model.from_data(data)
        return Model(**model_fields(data), recurrent=recurrent_kinds(data))


def _balance(balance: Any) -> dict[str, dict[str, int]]:
    found = {}
    for kind, held in sorted(mapping("model.balance", balance).items()):
        where = f"model.balance.{name('model.balance', kind)}"
        keys = known(where, held, ("keys",), ("keys",))["keys"]
        found[kind] = {"keys": integer(f"{where}.keys", keys, 1, MAX_INT)}
    return found


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
