"""Tensors of a program: their codes, contents and memory spaces. Codes are part of the format: they are never
renumbered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from apportion.ir.latent import Latent

PHASES = ("forward", "backward")


#: the heads of a tensor: query heads or KV heads
Side = Literal["query", "key"]
SIDES: tuple[Side, Side] = ("query", "key")
Width = Literal["head_dim", "v_head_dim", "hidden"]


class Part(NamedTuple):
    """One array of a tensor: [rows, heads, width]; [rows, heads] if width is None; [rows, width] if headless."""

    name: str
    width: Width | None = None
    integer: bool = False


@dataclass(frozen=True)
class Contents:
    """Properties of a tensor. parts: its arrays, in transfer order. side: None if headless. wide: stored in the
    accumulators' dtype, float32 (float64 for a float64 model), instead of the model's. partial: a sum of partial
    results. fused: its parts are side by side in each row and head of an arena. phases: phases that may use it;
    fetched, returned: phases in which its rows travel to tasks, and in which partial results travel back."""

    name: str
    parts: tuple[Part, ...] = ()
    side: Side | None = None
    wide: bool = False
    partial: bool = False
    fused: bool = False
    phases: tuple[str, ...] = PHASES
    fetched: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()

    def widths(self, head_dim: int, v_head_dim: int, hidden: int, latent: Latent | None) -> tuple[int, ...]:
        """The width of each part in a row of one head; 0 for a part without a width. latent: as in the model."""
        if latent is not None and self.side == "key":
            head_dim, v_head_dim = latent.widths
        sizes = {"head_dim": head_dim, "v_head_dim": v_head_dim, "hidden": hidden}
        return tuple(sizes[part.width] if part.width else 0 for part in self.parts)


_NOTHING = Contents("none")
_BACKWARD = ("backward",)


def _tensor(code: int, name: str, side: Side | None, *parts: Part, **more: Any) -> tuple[int, Contents]:
    """A tensor's code and contents. A sum of partial results is wide."""
    return code, Contents(name, parts, side, **{"wide": more.get("partial", False), **more})


class Tensor(IntEnum):
    """Tensors of a program; each has a code and contents. Rows are tokens."""

    contents: Contents

    # contents are optional, so that `Tensor(code)` looks up a tensor
    def __new__(cls, code: int, contents: Contents = _NOTHING) -> Tensor:
        tensor = int.__new__(cls, code)
        tensor._value_, tensor.contents = code, contents
        return tensor

    NONE = 0, _NOTHING
    # hidden states, only for `project`; with position ids, so that rows can be projected on any rank
    X = _tensor(1, "X", None, Part("x", "hidden"), Part("position", integer=True))
    Q = _tensor(2, "Q", "query", Part("q", "head_dim"), fetched=PHASES)
    KV = _tensor(3, "KV", "key", Part("k", "head_dim"), Part("v", "v_head_dim"), fused=True, fetched=PHASES)
    # the normalised output, and its log-sum-exp
    O = _tensor(4, "O", "query", Part("o", "v_head_dim"), Part("lse"), partial=True, returned=("forward",))  # noqa: E741
    DX = _tensor(5, "dX", None, Part("dx", "hidden"), partial=True, phases=_BACKWARD)
    DQ = _tensor(6, "dQ", "query", Part("dq", "head_dim"), partial=True, phases=_BACKWARD, returned=_BACKWARD)
    DKV = _tensor(
        7,
        "dKV",
        "key",
        Part("dk", "head_dim"),
        Part("dv", "v_head_dim"),
        partial=True,
        fused=True,
        phases=_BACKWARD,
        returned=_BACKWARD,
    )
    # gradient of the output
    DO = _tensor(8, "dO", "query", Part("do", "v_head_dim"), phases=_BACKWARD, fetched=_BACKWARD)
    # row statistics of the merged forward: its LSE, and rowsum(dO * O)
    DELTA = _tensor(
        9,
        "delta",
        "query",
        Part("lse"),
        Part("delta"),
        wide=True,
        fused=True,
        phases=_BACKWARD,
        fetched=_BACKWARD,
    )


TENSOR_NAMES: Mapping[Tensor, str] = MappingProxyType({tensor: tensor.contents.name for tensor in Tensor})

#: tensors that are sums of partial results
PARTIALS = tuple(tensor for tensor in Tensor if tensor.contents.partial)
#: the gradients among them, which may travel in the model's dtype even if they are not sent as results
GRADIENTS = frozenset(tensor for tensor in PARTIALS if tensor.contents.phases == ("backward",))
#: transfer dtype of gradients that are not sent as results: the accumulators', or rounded to the model's
SENT_GRADIENTS = ("wide", "model")
KV_SIDE = frozenset(tensor for tensor in Tensor if tensor.contents.side == "key")
HEADLESS = frozenset(tensor for tensor in Tensor if tensor.contents.side is None)


def _travelling_tensors(use: str) -> Mapping[tuple[Side, str], tuple[Tensor, ...]]:
    return MappingProxyType(
        {
            (side, phase): tuple(
                item for item in Tensor if item.contents.side == side and phase in getattr(item.contents, use)
            )
            for side in SIDES
            for phase in PHASES
        }
    )


#: (side, phase) -> tensors whose rows travel to tasks (FETCHED), whose partial results travel back (RETURNED), or both
FETCHED, RETURNED = _travelling_tensors("fetched"), _travelling_tensors("returned")
TRAVELLING: Mapping[tuple[Side, str], tuple[Tensor, ...]] = MappingProxyType(
    {key: (*tensors, *RETURNED[key]) for key, tensors in FETCHED.items()}
)


class Space(IntEnum):
    """Memory spaces of rows."""

    HOME = 0
    WORK = 1
